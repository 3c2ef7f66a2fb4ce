#include "core/types.h"

#include "core/error.h"

namespace mgpu {
namespace {

struct DTypeRow {
  const char* name;
  size_t itemsize;
};
constexpr DTypeRow kDTypes[] = {{"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8},
                                {"int32", 4},   {"int64", 8},    {"uint8", 1}};
constexpr const char* kReduceOps[] = {"sum", "avg", "prod", "min", "max"};
constexpr const char* kAlgorithms[] = {"auto", "naive", "direct", "ring", "tree", "nccl"};

template <class Names, class Get>
int find(const char* what, const std::string& name, const Names& names, Get get) {
  std::string all;
  int place = 0;
  for (const auto& row : names) {
    if (name == get(row)) return place;
    all += std::string(place++ ? ", " : "") + get(row);
  }
  throw InvalidArgument(std::string(what) + " must be one of " + all + ", not '" + name + "'");
}
const char* as_is(const char* name) { return name; }

}  // namespace

size_t itemsize(DType dtype) { return kDTypes[static_cast<int>(dtype)].itemsize; }
const char* name_of(DType dtype) { return kDTypes[static_cast<int>(dtype)].name; }
const char* name_of(ReduceOp op) { return kReduceOps[static_cast<int>(op)]; }
const char* name_of(Algorithm algorithm) { return kAlgorithms[static_cast<int>(algorithm)]; }

DType dtype_from(const std::string& name) {
  return static_cast<DType>(find("dtype", name, kDTypes, [](const DTypeRow& row) { return row.name; }));
}
ReduceOp reduce_op_from(const std::string& name) { return static_cast<ReduceOp>(find("op", name, kReduceOps, as_is)); }
Algorithm algorithm_from(const std::string& name) {
  return static_cast<Algorithm>(find("algorithm", name, kAlgorithms, as_is));
}

}  // namespace mgpu
