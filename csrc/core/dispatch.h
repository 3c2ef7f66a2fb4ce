// From a dtype to the C++ type of its elements.  The switches have no default, and a missing case is an error in our
// builds (-Werror=switch): the compiler lists what a new dtype must provide.
//
// `Elements` has the types that differ between backends: `Elements::f16` and `Elements::bf16`.
#pragma once

#include "core/types.h"

namespace mgpu {

// Calls work(T()) with the type of the elements, and returns its result.
template <class Elements, class Work>
auto dispatch_dtype(DType dtype, const char* kernel, Work&& work) {
  switch (dtype) {
    case DType::f16:
      return work(typename Elements::f16());
    case DType::bf16:
      return work(typename Elements::bf16());
    case DType::f32:
      return work(float());
    case DType::f64:
      return work(double());
    case DType::i32:
      return work(int32_t());
    case DType::i64:
      return work(int64_t());
    case DType::u8:
      return work(uint8_t());
  }
  refuse_dtype(kernel, dtype);
}

// The same for floating dtypes; throws InvalidArgument for others.
template <class Elements, class Work>
auto dispatch_floating(DType dtype, const char* kernel, Work&& work) {
  switch (dtype) {
    case DType::f16:
      return work(typename Elements::f16());
    case DType::bf16:
      return work(typename Elements::bf16());
    case DType::f32:
      return work(float());
    case DType::f64:
      return work(double());
    case DType::i32:
    case DType::i64:
    case DType::u8:
      break;
  }
  refuse_dtype(kernel, dtype);
}

}  // namespace mgpu
