#include "bindings/bindings.h"
#include "core/checks.h"
#include "core/counters.h"
#include "core/error.h"
#include "rooms.h"

namespace mgpu::bindings {
namespace {

Buffers buffers_of(const Pointers& pointers, int64_t count, DType dtype) {
  Buffers buffers;
  for (Pointer pointer : pointers) buffers.push_back(buffer_of(pointer, count, dtype));
  return buffers;
}

void count_ranks(const char* operation, const std::string& algorithm, const std::vector<int64_t>& nbytes) {
  for (size_t rank = 0; rank < nbytes.size(); ++rank)
    if (nbytes[rank] >= 0) count(operation, algorithm, static_cast<int>(rank), nbytes[rank]);
}

// `automatic` is resolved here, so that the counters and the caller learn what ran.
Algorithm chosen(const std::string& name, int64_t nbytes, size_t ranks) {
  const Algorithm algorithm = algorithm_from(name);
  return algorithm == Algorithm::automatic ? host_collectives().choose(nbytes, static_cast<int>(ranks)) : algorithm;
}

std::string all_reduce(const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype_name,
                       const std::string& op_name, const std::string& algorithm_name) {
  const DType dtype = dtype_from(dtype_name);
  const ReduceOp op = reduce_op_from(op_name);
  const Buffers from = buffers_of(in, count, dtype), to = buffers_of(out, count, dtype);
  check_all_reduce(from, to);
  const Algorithm algorithm = chosen(algorithm_name, nbytes_of(from[0]), from.size());
  without_gil([&] { host_collectives().all_reduce(from, to, op, algorithm); });
  count_ranks("all_reduce", name_of(algorithm), std::vector<int64_t>(in.size(), nbytes_of(from[0])));
  return name_of(algorithm);
}

// A rank whose pointer is 0 has nothing to add to that sum; it is left out, and not counted.
void reduce(const std::vector<Pointers>& in, const Pointers& out, const std::vector<int64_t>& counts,
            const std::string& dtype_name, const std::string& op_name) {
  const DType dtype = dtype_from(dtype_name);
  const ReduceOp op = reduce_op_from(op_name);
  require(in.size() == out.size() && in.size() == counts.size(), "in, out and counts must have one entry per tensor");
  std::vector<ReduceCall> calls;
  std::vector<int64_t> nbytes;  // per rank; -1: took no part
  for (size_t i = 0; i < in.size(); ++i) {
    calls.push_back({{}, buffer_of(out[i], counts[i], dtype)});
    nbytes.resize(std::max(nbytes.size(), in[i].size()), -1);
    for (size_t rank = 0; rank < in[i].size(); ++rank) {
      if (in[i][rank] == 0) continue;
      calls.back().in.push_back(buffer_of(in[i][rank], counts[i], dtype));
      nbytes[rank] = std::max<int64_t>(nbytes[rank], 0) + nbytes_of(calls.back().out);
    }
  }
  check_reduce(calls);
  without_gil([&] { host_collectives().reduce(calls, op); });
  count_ranks("reduce", "direct", nbytes);
}

// out[i][rank] is rank's copy of tensor i.  A rank that stands on the source itself needs no copy and is not counted.
void broadcast(const Pointers& in, const std::vector<Pointers>& out, const std::vector<int64_t>& nbytes) {
  require(in.size() == out.size() && in.size() == nbytes.size(), "in, out and nbytes must have one entry per tensor");
  std::vector<BroadcastCall> calls;
  std::vector<int64_t> moved;
  for (size_t i = 0; i < in.size(); ++i) {
    calls.push_back({buffer_of(in[i], nbytes[i], DType::u8), buffers_of(out[i], nbytes[i], DType::u8)});
    moved.resize(std::max(moved.size(), out[i].size()), -1);
    for (size_t rank = 0; rank < out[i].size(); ++rank)
      if (out[i][rank] != in[i]) moved[rank] = std::max<int64_t>(moved[rank], 0) + nbytes[i];
  }
  check_broadcast(calls);
  without_gil([&] { host_collectives().broadcast(calls); });
  count_ranks("broadcast", "direct", moved);
}

void all_gather(const Pointers& in, const std::vector<int64_t>& in_nbytes, const Pointers& out) {
  require(in.size() == in_nbytes.size(), "in and in_nbytes must have one entry per rank");
  Buffers from;
  int64_t total = 0;
  for (size_t rank = 0; rank < in.size(); ++rank) {
    from.push_back(buffer_of(in[rank], in_nbytes[rank], DType::u8));
    total += in_nbytes[rank];
  }
  const Buffers to = buffers_of(out, total, DType::u8);
  check_all_gather(from, to);
  without_gil([&] { host_collectives().all_gather(from, to); });
  count_ranks("all_gather", "direct", in_nbytes);
}

void reduce_scatter(const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype_name,
                    const std::string& op_name) {
  const DType dtype = dtype_from(dtype_name);
  const ReduceOp op = reduce_op_from(op_name);
  const Buffers from = buffers_of(in, count * static_cast<int64_t>(in.size()), dtype);
  const Buffers to = buffers_of(out, count, dtype);
  check_reduce_scatter(from, to);
  without_gil([&] { host_collectives().reduce_scatter(from, to, op); });
  count_ranks("reduce_scatter", "direct", std::vector<int64_t>(in.size(), nbytes_of(to[0])));
}

}  // namespace

void bind_collectives(py::module_& m) {
  m.def("all_reduce", &all_reduce, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op"),
        py::arg("algorithm"), "One pointer per rank; returns the algorithm that ran.");
  m.def("reduce", &reduce, py::arg("in_"), py::arg("out"), py::arg("counts"), py::arg("dtype"), py::arg("op"),
        "Many sums in one call: in_[tensor][rank], 0 for a rank that has none; out[tensor].");
  m.def("broadcast", &broadcast, py::arg("in_"), py::arg("out"), py::arg("nbytes"),
        "Many copies in one call: in_[tensor], out[tensor][rank].");
  m.def("all_gather", &all_gather, py::arg("in_"), py::arg("in_nbytes"), py::arg("out"),
        "out[rank] = in_[0] in_[1] ...");
  m.def("reduce_scatter", &reduce_scatter, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"),
        py::arg("op"), "out[rank] = chunk `rank`, of `count` elements, of the reduction.");
}

}  // namespace mgpu::bindings
