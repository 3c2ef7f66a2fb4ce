#include "core/types.h"

#include "core/error.h"

namespace mgpu {
namespace {

struct DTypeRow {
  const char* name;
  size_t itemsize;
  bool is_floating;
};
// The name is null for a number that no dtype has.
constexpr DTypeRow row_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return {"float16", 2, true};
    case DType::bf16:
      return {"bfloat16", 2, true};
    case DType::f32:
      return {"float32", 4, true};
    case DType::f64:
      return {"float64", 8, true};
    case DType::i32:
      return {"int32", 4, false};
    case DType::i64:
      return {"int64", 8, false};
    case DType::u8:
      return {"uint8", 1, false};
  }
  return {nullptr, 0, false};
}

template <class Enum>
Enum find(const char* what, const std::string& name) {
  std::string all;
  for (int number = 0; const char* each = name_of(static_cast<Enum>(number)); ++number) {
    if (name == each) return static_cast<Enum>(number);
    all += std::string(number ? ", " : "") + each;
  }
  throw InvalidArgument(std::string(what) + " must be one of " + all + ", not '" + name + "'");
}

}  // namespace

size_t itemsize(DType dtype) { return row_of(dtype).itemsize; }
bool is_floating(DType dtype) { return row_of(dtype).is_floating; }
const char* name_of(DType dtype) { return row_of(dtype).name; }

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::avg:
      return "avg";
    case ReduceOp::prod:
      return "prod";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
  }
  return nullptr;
}

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::automatic:
      return "auto";
    case Algorithm::naive:
      return "naive";
    case Algorithm::direct:
      return "direct";
    case Algorithm::push:
      return "push";
    case Algorithm::ring:
      return "ring";
    case Algorithm::tree:
      return "tree";
    case Algorithm::nccl:
      return "nccl";
  }
  return nullptr;
}

DType dtype_from(const std::string& name) { return find<DType>("dtype", name); }
ReduceOp reduce_op_from(const std::string& name) { return find<ReduceOp>("op", name); }
Algorithm algorithm_from(const std::string& name) { return find<Algorithm>("algorithm", name); }

void refuse_dtype(const char* kernel, DType dtype) {
  const char* name = name_of(dtype);
  throw InvalidArgument(std::string(kernel) + " does not work on " +
                        (name ? name : "dtype number " + std::to_string(static_cast<int>(dtype))));
}

}  // namespace mgpu
