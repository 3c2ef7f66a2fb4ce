#include "fakes/cuda/fake_cuda.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "backends/cpu/cpu.h"
#include "cuda_runtime.h"
#include "fakes/deferred/deferred_device.h"
#include "fakes/ptx/launches.h"

struct FakeStream {
  int device;
  mgpu::Stream stream;
};
struct FakeEvent {
  int device;
  mgpu::Event event;
  bool captured = false;  // recorded inside a capture: a node of a graph, no point in time
};

namespace {

struct Memory {
  std::unique_ptr<char[]> bytes;
  size_t nbytes;
  cudaMemoryType type;
  int device;
};

struct Machine {
  Machine(int devices, uint64_t seed, bool peers)
      : devices(devices), peers(peers), deferred(seed, mgpu::cpu::device_ops(), [](int, int) { return true; }) {
    for (int device = 0; device < devices; ++device) defaults.push_back(new_stream(device));
  }
  cudaStream_t new_stream(int device) {
    streams.push_back(std::make_unique<FakeStream>(FakeStream{device, deferred.new_stream(device)}));
    return streams.back().get();
  }

  int devices;
  bool peers;
  bool at_once = false;
  bool count_only = false;
  bool maps_for_peers = true;
  mgpu::fakes::DeferredDevice deferred;
  std::vector<cudaStream_t> defaults;
  std::vector<std::unique_ptr<FakeStream>> streams;
  std::map<std::pair<int, int>, bool> enabled;
  std::map<std::string, std::pair<int, cudaError_t>> failures;  // calls that still succeed, code
  int launches = 0;
  int pointer_looks = 0;
  bool capturing = false;
  int waits_in_captures = 0;
  std::set<int> contexts;
};

// Those of before stay: the backend keeps events and pinned memory for good.
std::vector<std::unique_ptr<Machine>> machines;
Machine* made = nullptr;
std::map<const char*, Memory> memory_of_all;
int64_t pinned = 0, peak_pinned = 0;
void (*on_host_alloc)() = nullptr;
std::recursive_mutex mutex;  // the backend is used by many threads, and the deferred device is one thread's
#define LOCKED() const std::lock_guard<std::recursive_mutex> locked(mutex)

// A process that sets FAKE_CUDA_DEVICES has a machine from the start: its work is done at once, and memory that it does
// not know is somebody else's that every device reaches.
Machine* machine() {
  const char* devices = std::getenv("FAKE_CUDA_DEVICES");
  if (!made && devices) {
    fakeCudaReset(std::atoi(devices), 0);
    made->at_once = true;
    ptx::allow_unknown_memory(true);
  }
  return made;
}

// As the driver has it: a thread without a context has none, and the runtime takes device 0 for it then.
thread_local std::vector<int> stack;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last = cudaSuccess;

cudaError_t fail(cudaError_t code) { return last = code; }

// The device of the thread's context; whoever asks makes one.
int current() {
  if (stack.empty()) stack.push_back(0);
  machine()->contexts.insert(stack.back());
  return stack.back();
}

// Whether a test wants this call to fail.
cudaError_t injected(const char* function) {
  const auto found = machine()->failures.find(function);
  if (found == machine()->failures.end() || found->second.first-- > 0) return cudaSuccess;
  const cudaError_t code = found->second.second;
  machine()->failures.erase(found);
  return fail(code);
}

#define RETURN_IF_INJECTED() \
  if (const cudaError_t code = injected(__func__)) return code

// While a graph is captured, threads that have a part in it may not ask, wait, allocate nor free.
bool forbidden() { return machine()->capturing && mode != cudaStreamCaptureModeRelaxed; }

const Memory* memory_at(const void* pointer) {
  auto found = memory_of_all.upper_bound(static_cast<const char*>(pointer));
  if (found == memory_of_all.begin()) return nullptr;
  --found;
  return static_cast<const char*>(pointer) < found->first + found->second.nbytes ? &found->second : nullptr;
}

// Null is the legacy default stream of the current device; a stream takes work only while its device is current.
FakeStream* stream_of(cudaStream_t stream) { return stream ? stream : machine()->defaults[current()]; }

cudaError_t submit(cudaStream_t stream, std::function<bool()> work) {
  FakeStream* on = stream_of(stream);
  if (on->device != current()) return fail(cudaErrorInvalidResourceHandle);
  machine()->deferred.submit(on->stream, [work = std::move(work)] { return machine()->count_only || work(); });
  if (machine()->at_once) machine()->deferred.run_all();
  return cudaSuccess;
}

cudaError_t allocate(void** memory, size_t nbytes, cudaMemoryType type) {
  std::unique_ptr<char[]> bytes(new char[nbytes]);  // not set: a page that nobody touches is not there
  if (!machine()->count_only) std::memset(bytes.get(), mgpu::fakes::kPoison, nbytes);
  char* start = bytes.get();
  *memory = start;
  memory_of_all[start] = {std::move(bytes), nbytes, type, current()};
  ptx::add_memory(start, nbytes, type == cudaMemoryTypeDevice ? current() : -1, machine()->maps_for_peers);
  return cudaSuccess;
}

struct Named {
  cudaError_t code;
  const char* name;
  const char* text;
};
constexpr Named kErrors[] = {
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capture"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
};
const Named& named(cudaError_t code) {
  for (const Named& each : kErrors)
    if (each.code == code) return each;
  static constexpr Named other{cudaSuccess, "cudaErrorOther", "another error"};
  return other;
}

}  // namespace

void fakeCudaReset(int devices, uint64_t seed, bool peers) {
  machines.push_back(std::make_unique<Machine>(devices, seed, peers));
  made = machines.back().get();
  ptx::allow_unknown_memory(false);
  stack.clear();
  mode = cudaStreamCaptureModeGlobal;
  last = cudaSuccess;
}
void fakeCudaFail(const char* function, cudaError_t code, int after) { machine()->failures[function] = {after, code}; }
bool fakeHasCode() { return injected("cudaFuncGetAttributes") == cudaSuccess; }
void fakeCudaCapture(bool on) { machine()->capturing = on; }
int fakeCudaContexts() { return static_cast<int>(machine()->contexts.size()); }
int fakeCudaLaunches() { return machine()->launches; }
int fakeCudaPointerLooks() { return machine()->pointer_looks; }
void fakeCudaOnHostAlloc(void (*inside)()) { on_host_alloc = inside; }
int fakeCudaWaitsInCaptures() { return machine()->waits_in_captures; }
int64_t fakeCudaPinned() { return pinned; }
int64_t fakeCudaPeakPinned() { return peak_pinned; }
void fakeCudaForgetPeak() { peak_pinned = pinned; }
void fakeCudaMapForPeers(bool on) { machine()->maps_for_peers = on; }
void fakeCudaCountOnly(bool on) { machine()->count_only = on; }

cudaError_t cudaGetLastError() {
  const cudaError_t code = last;
  last = cudaSuccess;
  return code;
}
const char* cudaGetErrorString(cudaError_t code) { return named(code).text; }
const char* cudaGetErrorName(cudaError_t code) { return named(code).name; }

cudaError_t cudaGetDeviceCount(int* count) {
  LOCKED();
  *count = machine() ? machine()->devices : 0;
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = stack.empty() ? 0 : stack.back();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  LOCKED();
  RETURN_IF_INJECTED();
  if (device < 0 || device >= machine()->devices) return fail(cudaErrorInvalidDevice);
  if (!stack.empty()) stack.pop_back();
  stack.push_back(device);
  machine()->contexts.insert(device);
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  const char* given = std::getenv("FAKE_CUDA_DRIVER");
  *version = given ? std::atoi(given) : CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = machine()->peers && device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  LOCKED();
  RETURN_IF_INJECTED();
  bool& enabled = machine()->enabled[{current(), peer}];
  if (enabled) return fail(cudaErrorPeerAccessAlreadyEnabled);
  enabled = true;
  return cudaSuccess;
}

static int fakeRetain(void** context, int device) {
  LOCKED();
  if (device < 0 || device >= machine()->devices) return cudaErrorInvalidDevice;
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device) + 1);
  return cudaSuccess;
}
static int fakePush(void* context) {
  LOCKED();
  if (const cudaError_t code = injected("cuCtxPushCurrent")) return code;
  const int device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  if (device >= machine()->devices) return cudaErrorInvalidDevice;
  stack.push_back(device);
  machine()->contexts.insert(device);
  return cudaSuccess;
}
static int fakePop(void** context) {
  if (stack.empty()) return cudaErrorInvalidValue;
  *context = nullptr;
  stack.pop_back();
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const std::map<std::string, void*> functions{{"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(fakeRetain)},
                                               {"cuCtxPushCurrent", reinterpret_cast<void*>(fakePush)},
                                               {"cuCtxPopCurrent", reinterpret_cast<void*>(fakePop)}};
  const auto found = functions.find(name);
  *function = found == functions.end() ? nullptr : found->second;
  *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* wanted) {
  std::swap(mode, *wanted);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  LOCKED();
  *status = machine()->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t nbytes) {
  LOCKED();
  return allocate(memory, nbytes, cudaMemoryTypeDevice);
}
cudaError_t cudaFree(void* memory) {
  LOCKED();
  memory_of_all.erase(static_cast<const char*>(memory));
  ptx::remove_memory(memory);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t nbytes, unsigned) {
  LOCKED();
  RETURN_IF_INJECTED();
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  if (on_host_alloc) on_host_alloc();
  pinned += static_cast<int64_t>(nbytes);
  peak_pinned = std::max(peak_pinned, pinned);
  const cudaError_t code = allocate(memory, nbytes, cudaMemoryTypeHost);
  ptx::mark_written(*memory, nbytes);  // the host writes there, which nobody sees
  return code;
}
cudaError_t cudaFreeHost(void* memory) {
  LOCKED();
  RETURN_IF_INJECTED();
  const auto found = memory_of_all.find(static_cast<const char*>(memory));
  if (found == memory_of_all.end() || found->second.type != cudaMemoryTypeHost) return fail(cudaErrorInvalidValue);
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  if (machine()->capturing) ++machine()->waits_in_captures;
  pinned -= static_cast<int64_t>(found->second.nbytes);
  memory_of_all.erase(found);
  ptx::remove_memory(memory);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  LOCKED();
  ++machine()->pointer_looks;
  const Memory* memory = memory_at(pointer);
  const auto unknown = machine()->at_once ? cudaMemoryTypeManaged : cudaMemoryTypeUnregistered;
  *attributes = memory ? cudaPointerAttributes{memory->type, memory->device} : cudaPointerAttributes{unknown, -1};
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  LOCKED();
  *stream = machine()->new_stream(current());
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  LOCKED();
  RETURN_IF_INJECTED();
  if (machine()->capturing) return fail(cudaErrorStreamCaptureUnsupported);
  machine()->deferred.synchronize(stream_of(stream)->stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  LOCKED();
  RETURN_IF_INJECTED();
  if (machine()->capturing && !event->captured) return fail(cudaErrorStreamCaptureIsolation);
  if (!machine()->capturing && event->captured) return fail(cudaErrorCapturedEvent);
  machine()->deferred.wait(stream_of(stream)->stream, event->event);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  LOCKED();
  RETURN_IF_INJECTED();
  *event = new FakeEvent{current(), nullptr, false};  // the backend keeps them for good
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  LOCKED();
  RETURN_IF_INJECTED();
  FakeStream* on = stream_of(stream);
  if (on->device != event->device) return fail(cudaErrorInvalidResourceHandle);
  event->event = machine()->deferred.record(on->stream);
  event->captured = machine()->capturing;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  LOCKED();
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  if (event->captured) return fail(cudaErrorCapturedEvent);
  return machine()->deferred.reached(event->event) ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  LOCKED();
  if (forbidden()) return fail(cudaErrorStreamCaptureUnsupported);
  if (event->captured) return fail(cudaErrorCapturedEvent);
  if (machine()->capturing) ++machine()->waits_in_captures;
  machine()->deferred.wait({}, event->event);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  LOCKED();
  machine()->deferred.synchronize(machine()->defaults[current()]->stream);
  std::memcpy(to, from, nbytes);
  ptx::mark_written(to, nbytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
  LOCKED();
  RETURN_IF_INJECTED();
  return cudaMemcpy2DAsync(to, nbytes, from, nbytes, nbytes, 1, kind, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  LOCKED();
  // The real one stages ordinary memory and waits; the backend never hands it any.
  if (!machine()->at_once && (!memory_at(to) || !memory_at(from))) std::abort();
  for (size_t row = 0; row < height; ++row) ptx::mark_written(static_cast<char*>(to) + row * to_pitch, width);
  return submit(stream, [=] {
    for (size_t row = 0; row < height; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return true;
  });
}

size_t fakeMostArgumentBytes() {
  int version = 0;
  cudaDriverGetVersion(&version);
  return version < 12010 ? 4096 : 32764;
}
std::function<bool()> fakeStartKernel(const FakeKernel& kernel, int device) {
  if (ptx::is_wanted()) return ptx::start_grid(kernel.symbol, kernel.blocks, kernel.threads, device, kernel.arguments);
  return fakeStartGrid(kernel.blocks, kernel.threads, kernel.body);
}
cudaError_t fakeLaunch(cudaStream_t stream, std::function<bool(int)> work) {
  LOCKED();
  if (const cudaError_t code = injected("cudaLaunchKernel")) return code;
  ++machine()->launches;
  const int device = stream_of(stream)->device;
  return submit(stream, [device, work = std::move(work)]() mutable { return work(device); });
}
