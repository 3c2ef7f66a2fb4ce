#include "backends.h"
#include "bindings/bindings.h"
#include "core/checks.h"
#include "core/counters.h"
#include "core/error.h"

namespace mgpu::bindings {
namespace {

std::string all_reduce(const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype_name,
                       const std::string& op_name, const std::string& algorithm_name, const Streams& streams,
                       bool merge_shared_devices) {
  const AllReduceCall call = all_reduce_call(in, out, count, dtype_name, op_name);
  // `automatic` is resolved here, so that the counters and the caller learn what ran.
  const Algorithm asked = algorithm_from(algorithm_name);
  const Algorithm algorithm = asked == Algorithm::automatic ? Algorithm::direct : asked;
  const Ranks ranks = ranks_of(streams, in.size(), merge_shared_devices);
  without_gil([&] { collectives_of(ranks.streams).all_reduce(call.in, call.out, call.op, algorithm, ranks); });
  count_ranks("all_reduce", name_of(algorithm), std::vector<int64_t>(in.size(), nbytes_of(call.in[0])));
  return name_of(algorithm);
}

// A rank whose pointer is 0 has nothing to add to that sum; it is left out, and not counted.
void reduce(const std::vector<Pointers>& in, const Pointers& out, const std::vector<int64_t>& counts,
            const std::string& dtype_name, const std::string& op_name, const Streams& streams, const Stream& root) {
  const DType dtype = dtype_from(dtype_name);
  const ReduceOp op = reduce_op_from(op_name);
  require(in.size() == out.size() && in.size() == counts.size(), "in, out and counts must have one entry per tensor");
  std::vector<ReduceCall> calls;
  std::vector<int64_t> nbytes;  // per rank; -1: took no part
  for (size_t i = 0; i < in.size(); ++i) {
    calls.push_back({{}, buffer_of(out[i], counts[i], dtype)});
    nbytes.resize(std::max(nbytes.size(), in[i].size()), -1);
    calls.back().in = buffers_of(in[i], counts[i], dtype);
    for (size_t rank = 0; rank < in[i].size(); ++rank)
      if (in[i][rank] != 0) nbytes[rank] = std::max<int64_t>(nbytes[rank], 0) + nbytes_of(calls.back().out);
  }
  const Ranks ranks = ranks_of(streams, streams.size());
  for (const Pointers& each : in) ranks_of(streams, each.size());
  check_reduce(calls);
  without_gil([&] { collectives_of(ranks.streams, root).reduce(calls, op, ranks, root); });
  count_ranks("reduce", "direct", nbytes);
}

// out[i][rank] is rank's copy of tensor i.  A rank whose copy is the source itself is not counted.
void broadcast(const Pointers& in, const std::vector<Pointers>& out, const std::vector<int64_t>& nbytes,
               const Stream& root, const Streams& streams) {
  require(in.size() == out.size() && in.size() == nbytes.size(), "in, out and nbytes must have one entry per tensor");
  std::vector<BroadcastCall> calls;
  std::vector<int64_t> moved;
  for (size_t i = 0; i < in.size(); ++i) {
    calls.push_back({buffer_of(in[i], nbytes[i], DType::u8), buffers_of(out[i], nbytes[i], DType::u8)});
    moved.resize(std::max(moved.size(), out[i].size()), -1);
    for (size_t rank = 0; rank < out[i].size(); ++rank)
      if (out[i][rank] != in[i]) moved[rank] = std::max<int64_t>(moved[rank], 0) + nbytes[i];
  }
  const Ranks ranks = ranks_of(streams, streams.size());
  for (const Pointers& each : out) ranks_of(streams, each.size());
  check_broadcast(calls);
  without_gil([&] { collectives_of(ranks.streams, root).broadcast(calls, root, ranks); });
  count_ranks("broadcast", "direct", moved);
}

void all_gather(const Pointers& in, const std::vector<int64_t>& in_nbytes, const Pointers& out,
                const Streams& streams) {
  require(in.size() == in_nbytes.size(), "in and in_nbytes must have one entry per rank");
  Buffers from;
  int64_t total = 0;
  for (size_t rank = 0; rank < in.size(); ++rank) {
    from.push_back(buffer_of(in[rank], in_nbytes[rank], DType::u8));
    total += in_nbytes[rank];
  }
  const Buffers to = buffers_of(out, total, DType::u8);
  check_all_gather(from, to);
  const Ranks ranks = ranks_of(streams, in.size());
  without_gil([&] { collectives_of(ranks.streams).all_gather(from, to, ranks); });
  count_ranks("all_gather", "direct", in_nbytes);
}

void reduce_scatter(const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype_name,
                    const std::string& op_name, const Streams& streams) {
  const DType dtype = dtype_from(dtype_name);
  const ReduceOp op = reduce_op_from(op_name);
  const Buffers from = buffers_of(in, count * static_cast<int64_t>(in.size()), dtype);
  const Buffers to = buffers_of(out, count, dtype);
  check_reduce_scatter(from, to);
  const Ranks ranks = ranks_of(streams, in.size());
  without_gil([&] { collectives_of(ranks.streams).reduce_scatter(from, to, op, ranks); });
  count_ranks("reduce_scatter", "direct", std::vector<int64_t>(in.size(), nbytes_of(to[0])));
}

}  // namespace

void bind_collectives(py::module_& m) {
  m.def("all_reduce", &all_reduce, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op"),
        py::arg("algorithm"), py::arg("streams"), py::arg("merge_shared_devices"),
        "One pointer and one stream per rank; returns the algorithm that ran.");
  m.def("reduce", &reduce, py::arg("in_"), py::arg("out"), py::arg("counts"), py::arg("dtype"), py::arg("op"),
        py::arg("streams"), py::arg("root"),
        "Many sums in one call: in_[tensor][rank], 0 for a rank that has none; out[tensor], of the root's device.");
  m.def("broadcast", &broadcast, py::arg("in_"), py::arg("out"), py::arg("nbytes"), py::arg("root"), py::arg("streams"),
        "Many copies in one call: in_[tensor], of the root's device; out[tensor][rank].");
  m.def("all_gather", &all_gather, py::arg("in_"), py::arg("in_nbytes"), py::arg("out"), py::arg("streams"),
        "out[rank] = in_[0] in_[1] ...");
  m.def("reduce_scatter", &reduce_scatter, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"),
        py::arg("op"), py::arg("streams"), "out[rank] = chunk `rank`, of `count` elements, of the reduction.");
}

}  // namespace mgpu::bindings
