// What the files of this folder share.  Only here is pybind11 included, and only here is the GIL let go.
#pragma once

#include <pybind11/critical_section.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "core/collectives.h"
#include "core/counters.h"
#include "core/error.h"
#include "core/types.h"

namespace mgpu::bindings {

namespace py = pybind11;

using Pointer = std::uintptr_t;
using Pointers = std::vector<Pointer>;

void bind_errors(py::module_& m);
void bind_plan(py::module_& m);
void bind_stream(py::module_& m);
void bind_collectives(py::module_& m);
void bind_transfer(py::module_& m);
void bind_kernels(py::module_& m);
void bind_nccl(py::module_& m);
void bind_push(py::module_& m);
void bind_op_log(py::module_& m);
void bind_null_context(py::module_& m);
void bind_reentrancy_guard(py::module_& m);

// Runs `work` without the GIL.  It must touch no Python object.
template <class Work>
auto without_gil(Work&& work) {
  const py::gil_scoped_release release;
  return std::forward<Work>(work)();
}

// Throws InvalidArgument unless the address is a multiple of the elements' size: a GPU stops at any other.
inline void* pointer_of(Pointer pointer, size_t itemsize = 1) {
  if (pointer % itemsize)  // not `require`, which would build the message for each pointer of each call
    throw InvalidArgument("memory of elements of " + std::to_string(itemsize) + " bytes begins at address " +
                          std::to_string(pointer) + ", which is not a multiple of their size");
  return reinterpret_cast<void*>(pointer);
}

inline Buffer buffer_of(Pointer pointer, int64_t count, DType dtype) {
  return {pointer_of(pointer, itemsize(dtype)), count, dtype};
}

inline Buffers buffers_of(const Pointers& pointers, int64_t count, DType dtype) {
  Buffers buffers;
  for (Pointer pointer : pointers) buffers.push_back(buffer_of(pointer, count, dtype));
  return buffers;
}

// The arguments of an all-reduce, checked.
struct AllReduceCall {
  Buffers in, out;
  ReduceOp op;
};
inline AllReduceCall all_reduce_call(const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype,
                                     const std::string& op) {
  const DType of = dtype_from(dtype);
  AllReduceCall call{buffers_of(in, count, of), buffers_of(out, count, of), reduce_op_from(op)};
  check_all_reduce(call.in, call.out);
  return call;
}

// Throws InvalidArgument unless there is one stream per rank.
inline Ranks ranks_of(const Streams& streams, size_t ranks, bool merge_shared_devices = true) {
  require(streams.size() == ranks,
          "one stream per rank: " + std::to_string(ranks) + " ranks, " + std::to_string(streams.size()) + " streams");
  return {streams, merge_shared_devices};
}

// Counts what each rank moved; -1: the rank took no part.
inline void count_ranks(const char* operation, const std::string& algorithm, const std::vector<int64_t>& nbytes) {
  for (size_t rank = 0; rank < nbytes.size(); ++rank)
    if (nbytes[rank] >= 0) count(operation, algorithm, static_cast<int>(rank), nbytes[rank]);
}

}  // namespace mgpu::bindings
