// What all backends share: what an element is, how elements are combined, and a buffer. A Buffer owns nothing: Python
// allocates, keeps alive and frees; the core speaks pointers, counts and dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mgpu {

enum class DType : int { f16, bf16, f32, f64, i32, i64, u8 };
enum class ReduceOp : int { sum, avg, prod, min, max };
enum class Algorithm : int { automatic, naive, direct, push, ring, tree, nccl };

struct Buffer {
  void* pointer;
  int64_t count;  // elements, not bytes
  DType dtype;
};

size_t itemsize(DType dtype);
bool is_floating(DType dtype);
// Null for a number that is none of the enum's.
const char* name_of(DType dtype);
const char* name_of(ReduceOp op);
const char* name_of(Algorithm algorithm);

// The inverse of name_of; they throw InvalidArgument, with a list of all names.
DType dtype_from(const std::string& name);
ReduceOp reduce_op_from(const std::string& name);
Algorithm algorithm_from(const std::string& name);

// Throws InvalidArgument: the kernel has no code for the dtype.
[[noreturn]] void refuse_dtype(const char* kernel, DType dtype);

inline int64_t nbytes_of(const Buffer& buffer) { return buffer.count * static_cast<int64_t>(itemsize(buffer.dtype)); }

}  // namespace mgpu
