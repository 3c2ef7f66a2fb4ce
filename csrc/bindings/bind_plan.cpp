#include "bindings/bindings.h"
#include "core/plan.h"

namespace mgpu::bindings {
namespace {

using Rows = std::vector<std::pair<int64_t, int64_t>>;
using Hops = std::vector<std::vector<std::tuple<int, int, int, bool>>>;

Rows rows_of(const std::vector<Chunk>& chunks) {
  Rows rows;
  for (const Chunk& chunk : chunks) rows.emplace_back(chunk.begin, chunk.count);
  return rows;
}

Hops hops_of(const Schedule& schedule) {
  Hops hops;
  for (const auto& round : schedule) {
    hops.emplace_back();
    for (const Hop& hop : round) hops.back().emplace_back(hop.from, hop.to, hop.chunk, hop.reduce);
  }
  return hops;
}

}  // namespace

void bind_plan(py::module_& m) {
  m.def(
      "chunk_plan", [](int64_t count, int ranks) { return rows_of(chunk_plan(count, ranks)); }, py::arg("count"),
      py::arg("ranks"), "Return (begin, count) per rank; counts differ by at most one, the larger first.");
  m.def(
      "share_plan", [](int64_t count, const std::vector<double>& shares) { return rows_of(share_plan(count, shares)); },
      py::arg("count"), py::arg("shares"), "Return (begin, count) per rank, in the proportion of the shares.");
  m.def("bucket_plan", &bucket_plan, py::arg("nbytes"), py::arg("kinds"), py::arg("limit_nbytes"),
        "Return the positions of the tensors of each bucket: consecutive, of one kind, up to the limit.");
  m.def(
      "ring_schedule", [](int ranks) { return hops_of(ring_schedule(ranks)); }, py::arg("ranks"),
      "Return rounds of (from, to, chunk, reduce).");
  m.def(
      "tree_schedule", [](int ranks) { return hops_of(tree_schedule(ranks)); }, py::arg("ranks"),
      "Return rounds of (from, to, chunk, reduce); one chunk.");
}

}  // namespace mgpu::bindings
