// Memory of a CUDA device for the kernel tests, which run on a GPU and on the fake runtime alike.  Every array has a
// guard behind it, and may begin some elements after an aligned address.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>
#include <vector>

#include "check.h"

inline void cuda_ok(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
  std::exit(1);
}
#define CUDA_OK(call) cuda_ok(call, #call)

template <class T>
class DeviceMemory {
 public:
  explicit DeviceMemory(const std::vector<T>& values, int64_t offset = 0) : count_(values.size()), offset_(offset) {
    std::vector<T> all(offset + count_ + kGuard);
    std::memset(static_cast<void*>(all.data()), 0xEE, all.size() * sizeof(T));
    if (count_) std::memcpy(static_cast<void*>(all.data() + offset), values.data(), count_ * sizeof(T));
    CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&start_), all.size() * sizeof(T)));
    CUDA_OK(cudaMemcpy(start_, all.data(), all.size() * sizeof(T), cudaMemcpyDefault));
    CUDA_OK(cudaStreamSynchronize(nullptr));  // a small copy may still be on its way, and other streams do not wait
  }
  // Memory for a kernel to write; reading it first is a fault where the PTX machine runs the kernels.
  static DeviceMemory unwritten(size_t count) {
    DeviceMemory memory(count);
    CUDA_OK(cudaMalloc(reinterpret_cast<void**>(&memory.start_), (count + kGuard) * sizeof(T)));
    return memory;
  }
  DeviceMemory(DeviceMemory&& other) noexcept : count_(other.count_), offset_(other.offset_), start_(other.start_) {
    other.start_ = nullptr;
  }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(count_, other.count_);
    std::swap(offset_, other.offset_);
    std::swap(start_, other.start_);
    return *this;
  }
  DeviceMemory(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    if (start_) cudaFree(start_);
  }

  T* data() { return start_ + offset_; }
  // What it holds, after all work on the stream; nothing may have been written around it.
  std::vector<T> values(cudaStream_t stream) const {
    CUDA_OK(cudaStreamSynchronize(stream));
    std::vector<T> all(offset_ + count_ + kGuard);
    CUDA_OK(cudaMemcpy(all.data(), start_, all.size() * sizeof(T), cudaMemcpyDefault));
    const auto* bytes = reinterpret_cast<const unsigned char*>(all.data());
    for (size_t i = 0; i < offset_ * sizeof(T); ++i) CHECK(bytes[i] == 0xEE);
    for (size_t i = (offset_ + count_) * sizeof(T); i < all.size() * sizeof(T); ++i) CHECK(bytes[i] == 0xEE);
    return {all.begin() + offset_, all.begin() + offset_ + count_};
  }

 private:
  static constexpr size_t kGuard = 16;
  explicit DeviceMemory(size_t count) : count_(count), offset_(0) {}
  size_t count_, offset_;
  T* start_ = nullptr;
};
