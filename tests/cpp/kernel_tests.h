// What the tests of the CUDA kernels share: memory on both sides, values, and a run of all tests of a program.  They
// run on the fake runtime, where the host runs the kernels' own source or nvcc's PTX of it, and on a GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "backends/cpu/cpu.h"
#include "backends/cuda/cuda.h"
#include "check.h"
#include "core/error.h"
#include "device_memory.h"
#include "ptx_faults.h"
#ifdef MGPU_FAKE_CUDA
#include "fakes/cuda/fake_cuda.h"
#endif

using namespace mgpu;

inline cudaStream_t stream;
inline Stream on() { return {BackendId::cuda, 0, stream}; }
inline DeviceOps& gpu() { return cuda::device_ops(); }
inline DeviceOps& host() { return cpu::device_ops(); }

using Bytes = std::vector<unsigned char>;
constexpr DType kFloating[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
constexpr DType kAll[] = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32, DType::i64, DType::u8};
constexpr int64_t kCounts[] = {1, 2, 7, 8, 9, 31, 1000, 4096, 4097, 9001};

// Small whole numbers of a dtype, as bytes.
inline Bytes numbers(int64_t count, DType dtype, int start = 0) {
  std::vector<float> wide(count);
  for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<float>((i + start) % 13);
  Bytes bytes(count * itemsize(dtype));
  if (dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64) {
    host().scale_cast({wide.data(), DType::f32, bytes.data(), dtype, count, 1.0}, {});
    return bytes;
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto whole = static_cast<int64_t>(wide[i]);  // little end first
    std::memcpy(bytes.data() + i * itemsize(dtype), &whole, itemsize(dtype));
  }
  return bytes;
}

// Memory of the device and its twin of the host, with the same contents.
struct Both {
  Both(int64_t count, DType dtype, int start = 0, int64_t offset = 0)
      : Both(numbers(count, dtype, start), dtype, offset) {}
  Both(const Bytes& bytes, DType dtype, int64_t offset = 0)
      : twin(bytes), device(bytes, offset * static_cast<int64_t>(itemsize(dtype))) {}
  void check_equal() const { CHECK(device.values(stream) == twin); }
  // What comes from pow, as Adam's constants do, may differ between CPU and GPU in its last bits.
  void check_close(DType dtype) const {
    const double tolerance = dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-5 : 1.0 / 64;
    const auto count = static_cast<int64_t>(twin.size() / itemsize(dtype));
    std::vector<double> made(twin.size() / itemsize(dtype)), expected = made;
    const Bytes bytes = device.values(stream);
    host().scale_cast({bytes.data(), dtype, made.data(), DType::f64, count, 1.0}, {});
    host().scale_cast({twin.data(), dtype, expected.data(), DType::f64, count, 1.0}, {});
    for (size_t i = 0; i < made.size(); ++i)
      CHECK(made[i] == expected[i] ||
            std::fabs(made[i] - expected[i]) <= tolerance * std::max(1.0, std::fabs(expected[i])));
  }
  Bytes twin;
  DeviceMemory<unsigned char> device;
};

using KernelTests = std::vector<std::pair<const char*, std::function<void()>>>;

inline int run_all(const KernelTests& tests, [[maybe_unused]] bool on_a_new_machine = true) {
#ifdef MGPU_FAKE_CUDA
  if (on_a_new_machine) fakeCudaReset(1, 3);
#endif
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const auto& [name, test] : tests) {
    test();
    no_faults();
    std::printf("%s\n", name);
    std::fflush(stdout);
  }
  return passed();
}
