#include "fakes/cuda/fake_cuda.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backends/cpu/cpu.h"
#include "cuda_runtime.h"
#include "fakes/deferred/deferred_device.h"

struct FakeStream {
  int device;
  mgpu::Stream stream;
};
struct FakeEvent {
  int device;
  mgpu::Event event;
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
      : devices(devices), peers(peers), room(seed, mgpu::cpu::device_ops(), [](int, int) { return true; }) {
    for (int device = 0; device < devices; ++device) defaults.push_back(new_stream(device));
  }
  cudaStream_t new_stream(int device) {
    streams.push_back(std::make_unique<FakeStream>(FakeStream{device, room.new_stream(device)}));
    return streams.back().get();
  }

  int devices;
  bool peers;
  mgpu::fakes::DeferredDevice room;
  std::vector<cudaStream_t> defaults;
  std::vector<std::unique_ptr<FakeStream>> streams;
  std::map<std::pair<int, int>, bool> enabled;
  std::map<std::string, std::pair<int, cudaError_t>> failures;  // calls that still succeed, code
  int launches = 0;
};

// Those of before stay: the room keeps events and pinned memory for good.
std::vector<std::unique_ptr<Machine>> machines;
Machine* machine = nullptr;
std::map<const char*, Memory> memory_of_all;
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

cudaError_t fail(cudaError_t code) { return last = code; }

// Whether a test wants this call to fail.
cudaError_t injected(const char* function) {
  const auto found = machine->failures.find(function);
  if (found == machine->failures.end() || found->second.first-- > 0) return cudaSuccess;
  const cudaError_t code = found->second.second;
  machine->failures.erase(found);
  return fail(code);
}

#define RETURN_IF_INJECTED() \
  if (const cudaError_t code = injected(__func__)) return code

const Memory* memory_at(const void* pointer) {
  auto found = memory_of_all.upper_bound(static_cast<const char*>(pointer));
  if (found == memory_of_all.begin()) return nullptr;
  --found;
  return static_cast<const char*>(pointer) < found->first + found->second.nbytes ? &found->second : nullptr;
}

// Null is the legacy default stream of the current device; a stream takes work only while its device is current.
FakeStream* stream_of(cudaStream_t stream) { return stream ? stream : machine->defaults[current]; }

cudaError_t submit(cudaStream_t stream, std::function<void()> work) {
  FakeStream* on = stream_of(stream);
  if (on->device != current) return fail(cudaErrorInvalidResourceHandle);
  machine->room.submit(on->stream, [work = std::move(work)] {
    work();
    return true;
  });
  return cudaSuccess;
}

cudaError_t allocate(void** memory, size_t nbytes, cudaMemoryType type) {
  auto bytes = std::make_unique<char[]>(nbytes);
  std::memset(bytes.get(), mgpu::fakes::kPoison, nbytes);
  char* start = bytes.get();
  *memory = start;
  memory_of_all[start] = {std::move(bytes), nbytes, type, current};
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
  machine = machines.back().get();
  current = 0;
  last = cudaSuccess;
}
void fakeCudaFail(const char* function, cudaError_t code, int after) { machine->failures[function] = {after, code}; }
int fakeCudaLaunches() { return machine->launches; }

cudaError_t cudaGetLastError() {
  const cudaError_t code = last;
  last = cudaSuccess;
  return code;
}
const char* cudaGetErrorString(cudaError_t code) { return named(code).text; }
const char* cudaGetErrorName(cudaError_t code) { return named(code).name; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = machine ? machine->devices : 0;
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  RETURN_IF_INJECTED();
  if (device < 0 || device >= machine->devices) return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = machine->peers && device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  RETURN_IF_INJECTED();
  bool& enabled = machine->enabled[{current, peer}];
  if (enabled) return fail(cudaErrorPeerAccessAlreadyEnabled);
  enabled = true;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t nbytes) { return allocate(memory, nbytes, cudaMemoryTypeDevice); }
cudaError_t cudaFree(void* memory) {
  memory_of_all.erase(static_cast<const char*>(memory));
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t nbytes, unsigned) {
  RETURN_IF_INJECTED();
  return allocate(memory, nbytes, cudaMemoryTypeHost);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Memory* memory = memory_at(pointer);
  *attributes = memory ? cudaPointerAttributes{memory->type, memory->device}
                       : cudaPointerAttributes{cudaMemoryTypeUnregistered, -1};
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = machine->new_stream(current);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RETURN_IF_INJECTED();
  machine->room.synchronize(stream_of(stream)->stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  RETURN_IF_INJECTED();
  machine->room.wait(stream_of(stream)->stream, event->event);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  RETURN_IF_INJECTED();
  *event = new FakeEvent{current, nullptr};  // the room keeps them for good
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RETURN_IF_INJECTED();
  FakeStream* on = stream_of(stream);
  if (on->device != event->device) return fail(cudaErrorInvalidResourceHandle);
  event->event = machine->room.record(on->stream);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return machine->room.reached(event->event) ? cudaSuccess : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  machine->room.wait({}, event->event);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  machine->room.synchronize(machine->defaults[current]->stream);
  std::memcpy(to, from, nbytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
  RETURN_IF_INJECTED();
  return cudaMemcpy2DAsync(to, nbytes, from, nbytes, nbytes, 1, kind, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  // The real one stages ordinary memory and waits; the room never hands it any.
  if (!memory_at(to) || !memory_at(from)) std::abort();
  return submit(stream, [=] {
    for (size_t row = 0; row < height; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  });
}

cudaError_t fakeLaunch(cudaStream_t stream, std::function<void()> work) {
  if (const cudaError_t code = injected("cudaLaunchKernel")) return code;
  ++machine->launches;
  return submit(stream, std::move(work));
}
