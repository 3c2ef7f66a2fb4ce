// What torch asks of a device: which is current, which stream, how much memory, which random numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fake.h"

namespace fake {
namespace {

// The one device that this process may use, as a TPU's plug-in binds it; negative: it may use all of them.
c10::DeviceIndex bound_index() {
  const char* kind = std::getenv("MGPU_TEST_FAKE");
  if (!kind || std::string(kind) != "tpu") return -1;
  const char* process = std::getenv("LOCAL_RANK");
  return process ? c10::DeviceIndex(std::atoi(process)) : 0;
}

const c10::DeviceIndex bound = bound_index();
thread_local c10::DeviceIndex current = std::max<c10::DeviceIndex>(bound, 0);
thread_local std::array<c10::StreamId, kDevices> streams{};  // the current one of each device; 0 is the default

// The index, if it is of a device that this process may use.
c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < kDevices, c10::Device(kType, index), " does not exist");
  TORCH_CHECK(bound < 0 || index == bound, c10::Device(kType, index), " is not ", c10::Device(kType, bound),
              ", which this process is bound to");
  return index;
}

void make_current(c10::DeviceIndex index) { current = checked(index); }

// A block of memory as its deleter sees it: before the first byte that is given out.
struct alignas(64) Header {
  c10::DeviceIndex device;
  int64_t nbytes;
};

std::array<std::atomic<int64_t>, kDevices> allocated{}, most_allocated{};  // bytes of each device

void free_block(void* start) {
  if (!start) return;
  Header* header = static_cast<Header*>(start) - 1;
  allocated[header->device] -= header->nbytes;
  std::free(header);
}

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &free_block, meant()};
    void* whole = std::aligned_alloc(64, sizeof(Header) + (nbytes + 63) / 64 * 64);
    TORCH_CHECK_WITH(OutOfMemoryError, whole, "fake:", int(meant().index()), " has no memory left");
    Header* header = new (whole) Header{meant().index(), int64_t(nbytes)};
    const int64_t now = allocated[header->device] += nbytes;
    int64_t most = most_allocated[header->device];
    while (most < now && !most_allocated[header->device].compare_exchange_weak(most, now)) {
    }
    return {header + 1, header + 1, &free_block, meant()};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

struct Late {
  c10::DeviceIndex source;
  at::Tensor host, value;  // kept alive, as pinned memory is until the device is done with it
};

constexpr int kPriorities = 4;  // 0, -1, -2 and -3
constexpr c10::StreamId kStreamsOfAPool = 32;

// What an event points at.
struct Recorded {
  c10::Stream stream;
  std::chrono::steady_clock::time_point time;
  int64_t copies;  // from one device to another, that there were before
};

struct Wait {
  c10::Stream waiter, awaited;
  int64_t copies;  // before the event
};
std::mutex waits_lock;
std::vector<Wait> waits;
std::vector<std::pair<int64_t, int64_t>> recorded;  // pointer, stream

std::vector<std::string> waits_of_the_host;      // under waits_lock
std::vector<std::pair<int, int>> direct_copies;  // under waits_lock
std::atomic<int64_t> all_copies{0};              // of these

std::mutex late_lock;
std::vector<Late> late;

// A generator whose numbers come from a CPU generator, because that is what CPU kernels can use.
struct Numbers final : c10::GeneratorImpl {
  Numbers(c10::DeviceIndex index, at::Generator source)
      : GeneratorImpl({kType, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), source(std::move(source)) {}

  void set_current_seed(uint64_t seed) override { source.set_current_seed(seed); }
  uint64_t current_seed() const override { return source.current_seed(); }
  uint64_t seed() override { return source.seed(); }
  void set_offset(uint64_t offset) override { source.set_offset(offset); }
  uint64_t get_offset() const override { return source.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { source.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return source.unsafeGetGeneratorImpl()->get_state();
  }
  Numbers* clone_impl() const override { return new Numbers(device().index(), source.clone()); }

  at::Generator source;
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Numbers>(index < 0 ? current : index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const std::array<at::Generator, kDevices> all{new_generator(0), new_generator(1), new_generator(2),
                                                       new_generator(3)};
  return all.at(index < 0 ? current : checked(index));
}

// For C++: what the guards that surround every kernel and every autograd node do.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return meant(); }
  void setDevice(c10::Device device) const override { make_current(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && bound < 0) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = meant();
    make_current(device.index());
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams.at(meant(device).index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  // As on CUDA, a device has 32 streams of each priority, and the 33rd is the first again.
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    static std::array<std::array<std::atomic<c10::StreamId>, kPriorities>, kDevices> made{};
    const int pool = std::clamp(-priority, 0, kPriorities - 1);
    const c10::StreamId index = made.at(meant(device).index()).at(pool)++ % kStreamsOfAPool;
    return c10::Stream(c10::Stream::UNSAFE, meant(device), 1 + pool * kStreamsOfAPool + index);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams.at(stream.device_index()) = stream.id();
    return before;
  }

  // All work but the late copies is done when its call returns, so there is little to wait for; tests ask who waited.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Recorded*>(*event);
    *event = new Recorded{stream, std::chrono::steady_clock::now(), all_copies};
  }
  void block(void* event, const c10::Stream& stream) const override {
    const std::lock_guard<std::mutex> guard(waits_lock);
    waits.push_back({stream, static_cast<Recorded*>(event)->stream, static_cast<Recorded*>(event)->copies});
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  double elapsedTime(void* first, void* last, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Recorded*>(last)->time -
                                                     static_cast<Recorded*>(first)->time)
        .count();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void* event) const override {
    synchronize("event", static_cast<Recorded*>(event)->stream.device_index());
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize("stream", stream.device_index()); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize("device", device); }
  static void synchronize(const char* what, c10::DeviceIndex device) {
    host_waits(what);
    arrive(device < 0 ? current : device);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// For Python: what torch.accelerator and torch.Generator ask.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { make_current(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = current;
    make_current(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::StorageImpl& resized = *storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    at::DataPtr grown = allocator().allocate(nbytes);
    if (const size_t kept = std::min(nbytes, resized.nbytes())) std::memcpy(grown.get(), resized.data(), kept);
    resized.set_data_ptr_noswap(std::move(grown));
    resized.set_nbytes(nbytes);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
};

}  // namespace

c10::Device meant(std::optional<c10::Device> given) {
  return given && given->has_index() ? *given : c10::Device(kType, current);
}

at::Allocator& allocator() { return memory; }

at::Generator cpu_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  const at::Generator& wanted = given && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(wanted.device() == c10::Device(kType, device), "Expected a generator of fake:", int(device),
              " but found ", wanted.device());
  return static_cast<Numbers*>(wanted.unsafeGetGeneratorImpl())->source;
}

void copy_later(c10::DeviceIndex source, const at::Tensor& host, const at::Tensor& value) {
  const std::lock_guard<std::mutex> guard(late_lock);
  late.push_back({source, host, value});
  std::memset(host.data_ptr(), 0xEE, host.nbytes());
}

void host_waits(const char* what) {
  const std::lock_guard<std::mutex> guard(waits_lock);
  waits_of_the_host.push_back(what);
}

void copied_directly(c10::Device source, c10::Device target) {
  const std::lock_guard<std::mutex> guard(waits_lock);
  direct_copies.push_back({source.index(), target.index()});
  ++all_copies;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  const std::lock_guard<std::mutex> guard(waits_lock);
  recorded.push_back({reinterpret_cast<int64_t>(tensor.data_ptr()), stream.id()});
}

void arrive(c10::DeviceIndex source) {
  const std::lock_guard<std::mutex> guard(late_lock);
  const auto arriving =
      std::stable_partition(late.begin(), late.end(), [=](const Late& each) { return each.source != source; });
  for (auto each = arriving; each != late.end(); ++each)
    std::memcpy(each->host.data_ptr(), each->value.data_ptr(), each->host.nbytes());
  late.erase(arriving, late.end());
}

}  // namespace fake

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new fake::Hooks());
  module.attr("devices") = int(fake::kDevices);
  // Bytes of a device that are given out, and the most there were since the last call of `forget_most_allocated`.
  module.def("allocated", [](int index) { return fake::allocated[index].load(); });
  module.def("most_allocated", [](int index) { return fake::most_allocated[index].load(); });
  module.def("forget_most_allocated", [] {
    for (int index = 0; index < fake::kDevices; ++index) fake::most_allocated[index] = fake::allocated[index].load();
  });
  module.def("current", [] { return int(fake::current); });
  module.def("make_current", [](int index) { fake::make_current(c10::DeviceIndex(index)); });
  // Since the last call: (device, stream, device, stream, copies), of which the first stream waited for the second,
  // where so many copies from one device to another had been made.
  module.def("take_waits", [] {
    const std::lock_guard<std::mutex> guard(fake::waits_lock);
    std::vector<std::array<int64_t, 5>> found;
    for (const auto& [waiter, awaited, copies] : fake::waits)
      found.push_back({waiter.device_index(), waiter.id(), awaited.device_index(), awaited.id(), copies});
    fake::waits.clear();
    return found;
  });
  // Since the last call: for what the host has waited, each time: an event, a stream, a device, a copy, a number.
  module.def("take_host_waits", [] {
    const std::lock_guard<std::mutex> guard(fake::waits_lock);
    return std::exchange(fake::waits_of_the_host, {});
  });
  // Since the last call: copies from one device to another, as pairs of indices.
  module.def("take_direct_copies", [] {
    const std::lock_guard<std::mutex> guard(fake::waits_lock);
    return std::exchange(fake::direct_copies, {});
  });
  module.def("take_recorded", [] {
    const std::lock_guard<std::mutex> guard(fake::waits_lock);
    return std::exchange(fake::recorded, {});
  });
  module.def("default_generator", [](int index) { return fake::default_generator(c10::DeviceIndex(index)); });
}
