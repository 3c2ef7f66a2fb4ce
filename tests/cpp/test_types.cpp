#include "check.h"
#include "core/error.h"
#include "core/types.h"

using namespace mgpu;

int main() {
  for (DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32, DType::i64, DType::u8})
    CHECK(dtype_from(name_of(dtype)) == dtype);
  for (ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max})
    CHECK(reduce_op_from(name_of(op)) == op);
  CHECK(algorithm_from("auto") == Algorithm::automatic && algorithm_from("tree") == Algorithm::tree);
  CHECK(itemsize(DType::bf16) == 2 && itemsize(DType::f64) == 8 && itemsize(DType::u8) == 1);
  CHECK(nbytes_of({nullptr, 5, DType::i64}) == 40);
  CHECK_THROWS(InvalidArgument, "float16, bfloat16", dtype_from("float8"));
  CHECK_THROWS(InvalidArgument, "sum, avg", reduce_op_from("mean"));
  CHECK_THROWS(InvalidArgument, "naive", algorithm_from("star"));
  return passed();
}
