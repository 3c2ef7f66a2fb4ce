// Teams of NCCL.  A team is an object: it owns communicators, which end with it.  Its calls take what those of the same
// names in bind_collectives.cpp take; where a team has ranks in other processes, the lists are of this process's ranks.
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>

#include "backends.h"
#include "bindings/bindings.h"
#include "core/checks.h"
#include "core/counters.h"
#include "core/error.h"

namespace mgpu::bindings {
namespace {

using nccl::Message;
using nccl::Messages;
using nccl::NcclCollectives;
using nccl::Team;

struct NcclTeam {
  std::shared_ptr<Team> team;
  NcclCollectives collectives;
  explicit NcclTeam(std::shared_ptr<Team> made) : team(std::move(made)), collectives(team) {}
};
// The end of a team waits for what is in flight, so the GIL is let go for it too.
std::shared_ptr<NcclTeam> owned(std::shared_ptr<Team> made) {
  return {new NcclTeam(std::move(made)), [](NcclTeam* team) { without_gil([team] { delete team; }); }};
}

py::bytes unique_id() {
  const nccl::UniqueId id = without_gil([] { return nccl::unique_id(); });
  return {id.internal, sizeof id.internal};
}

nccl::UniqueId id_from(const std::string& bytes) {
  nccl::UniqueId id{};
  require(bytes.size() == sizeof id.internal, "a unique id of NCCL has " + std::to_string(sizeof id.internal) +
                                                  " bytes, not " + std::to_string(bytes.size()));
  std::memcpy(id.internal, bytes.data(), sizeof id.internal);
  return id;
}

nccl::Limits limits_from(double seconds) {
  require(seconds > 0 && seconds < 1e9, "limit_seconds must be positive, not " + std::to_string(seconds));
  const std::chrono::milliseconds limit(static_cast<int64_t>(seconds * 1000) + 1);
  nccl::Limits limits;
  limits.init = limits.collective = limit;
  limits.close = std::min(limits.close, limit);
  return limits;
}

std::shared_ptr<NcclTeam> init(const py::bytes& unique_id, int world, const std::vector<int>& ranks,
                               const std::vector<int>& devices, double limit_seconds) {
  require(ranks.size() == devices.size() && !ranks.empty(), "ranks and devices must have one entry per rank, and some");
  const nccl::UniqueId id = id_from(unique_id);
  const nccl::Limits limits = limits_from(limit_seconds);
  std::vector<nccl::RankDevice> mine;
  for (size_t i = 0; i < ranks.size(); ++i) mine.push_back({ranks[i], devices[i]});
  return owned(without_gil(
      [&] { return nccl::init(device_ops_of({BackendId::cuda, devices[0], nullptr}), id, world, mine, limits); }));
}

// Returns how many ranks a result is made of: those of the call, or of all processes.
int64_t parts_of(const NcclTeam& self, size_t ranks) {
  return self.team->whole() ? static_cast<int64_t>(ranks) : self.team->world();
}

void all_reduce(NcclTeam& self, const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype_name,
                const std::string& op_name, const Streams& streams, bool merge_shared_devices) {
  const AllReduceCall call = all_reduce_call(in, out, count, dtype_name, op_name);
  const Ranks ranks = ranks_of(streams, in.size(), merge_shared_devices);
  without_gil([&] { self.collectives.all_reduce(call.in, call.out, call.op, Algorithm::nccl, ranks); });
  count_ranks("all_reduce", "nccl", std::vector<int64_t>(in.size(), nbytes_of(call.in[0])));
}

void reduce(NcclTeam& self, const std::vector<Pointers>& in, const Pointers& out, const std::vector<int64_t>& counts,
            const std::string& dtype_name, const std::string& op_name, const Streams& streams, const Stream& root) {
  const DType dtype = dtype_from(dtype_name);
  const ReduceOp op = reduce_op_from(op_name);
  require(in.size() == out.size() && in.size() == counts.size(), "in, out and counts must have one entry per tensor");
  const Ranks ranks = ranks_of(streams, streams.size());
  std::vector<ReduceCall> calls;
  std::vector<int64_t> nbytes(streams.size(), -1);  // per rank; -1: took no part
  for (size_t i = 0; i < in.size(); ++i) {
    ranks_of(streams, in[i].size());
    calls.push_back({buffers_of(in[i], counts[i], dtype), buffer_of(out[i], counts[i], dtype)});
    for (size_t rank = 0; rank < in[i].size(); ++rank)
      if (in[i][rank] != 0) nbytes[rank] = std::max<int64_t>(nbytes[rank], 0) + nbytes_of(calls.back().out);
  }
  check_reduce(calls);
  without_gil([&] { self.collectives.reduce(calls, op, ranks, root); });
  count_ranks("reduce", "nccl", nbytes);
}

void broadcast(NcclTeam& self, const Pointers& in, const std::vector<Pointers>& out, const std::vector<int64_t>& nbytes,
               const Stream& root, const Streams& streams) {
  require(in.size() == out.size() && in.size() == nbytes.size(), "in, out and nbytes must have one entry per tensor");
  const Ranks ranks = ranks_of(streams, streams.size());
  std::vector<BroadcastCall> calls;
  std::vector<int64_t> moved(streams.size(), -1);
  for (size_t i = 0; i < in.size(); ++i) {
    ranks_of(streams, out[i].size());
    calls.push_back({buffer_of(in[i], nbytes[i], DType::u8), buffers_of(out[i], nbytes[i], DType::u8)});
    for (size_t rank = 0; rank < out[i].size(); ++rank)
      if (out[i][rank] != in[i]) moved[rank] = std::max<int64_t>(moved[rank], 0) + nbytes[i];
  }
  check_broadcast(calls);
  without_gil([&] { self.collectives.broadcast(calls, root, ranks); });
  count_ranks("broadcast", "nccl", moved);
}

void all_gather(NcclTeam& self, const Pointers& in, const std::vector<int64_t>& in_nbytes, const Pointers& out,
                const Streams& streams) {
  require(in.size() == in_nbytes.size() && in.size() == out.size() && !in.empty(),
          "in_, in_nbytes and out must have one entry per rank");
  Buffers from;
  for (size_t rank = 0; rank < in.size(); ++rank) from.push_back(buffer_of(in[rank], in_nbytes[rank], DType::u8));
  const int64_t mine = std::accumulate(in_nbytes.begin(), in_nbytes.end(), int64_t{0});
  const Buffers to = buffers_of(out, self.team->whole() ? mine : in_nbytes[0] * self.team->world(), DType::u8);
  if (self.team->whole()) check_all_gather(from, to);
  const Ranks ranks = ranks_of(streams, in.size());
  without_gil([&] { self.collectives.all_gather(from, to, ranks); });
  count_ranks("all_gather", "nccl", in_nbytes);
}

void reduce_scatter(NcclTeam& self, const Pointers& in, const Pointers& out, int64_t count,
                    const std::string& dtype_name, const std::string& op_name, const Streams& streams) {
  const DType dtype = dtype_from(dtype_name);
  const ReduceOp op = reduce_op_from(op_name);
  require(in.size() == out.size() && !in.empty(), "in_ and out must have one entry per rank");
  const Buffers from = buffers_of(in, count * parts_of(self, in.size()), dtype), to = buffers_of(out, count, dtype);
  if (self.team->whole()) check_reduce_scatter(from, to);
  const Ranks ranks = ranks_of(streams, in.size());
  without_gil([&] { self.collectives.reduce_scatter(from, to, op, ranks); });
  count_ranks("reduce_scatter", "nccl", std::vector<int64_t>(in.size(), nbytes_of(to[0])));
}

void exchange(NcclTeam& self, const Messages& sends, const Messages& receives, const Streams& streams) {
  without_gil([&] { self.collectives.exchange(sends, receives, streams); });
  for (const Message& each : sends) count("exchange", "nccl", each.rank, nbytes_of(each.buffer));
}

void bind_team(py::module_& m) {
  py::class_<Message>(m, "Message", "One message of an exchange, seen from one end.")
      .def(py::init([](int rank, int peer, Pointer pointer, int64_t count, const std::string& dtype) {
             return Message{rank, peer, buffer_of(pointer, count, dtype_from(dtype))};
           }),
           py::arg("rank"), py::arg("peer"), py::arg("pointer"), py::arg("count"), py::arg("dtype"));
  py::class_<NcclTeam, std::shared_ptr<NcclTeam>>(m, "NcclTeam", "Communicators of this process's ranks of a team.")
      .def("all_reduce", &all_reduce, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op"),
           py::arg("streams"), py::arg("merge_shared_devices"))
      .def("reduce", &reduce, py::arg("in_"), py::arg("out"), py::arg("counts"), py::arg("dtype"), py::arg("op"),
           py::arg("streams"), py::arg("root"))
      .def("broadcast", &broadcast, py::arg("in_"), py::arg("out"), py::arg("nbytes"), py::arg("root"),
           py::arg("streams"))
      .def("all_gather", &all_gather, py::arg("in_"), py::arg("in_nbytes"), py::arg("out"), py::arg("streams"))
      .def("reduce_scatter", &reduce_scatter, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"),
           py::arg("op"), py::arg("streams"))
      .def("exchange", &exchange, py::arg("sends"), py::arg("receives"), py::arg("streams"),
           "Send and receive messages, all at once.")
      .def(
          "check", [](NcclTeam& self) { self.team->check(); },
          "Raise NcclError if the team has failed, ValueError if it is closed.")
      .def(
          "wait", [](NcclTeam& self, const Streams& streams) { without_gil([&] { self.team->wait(streams); }); },
          py::arg("streams"), "Wait until what is on the streams has run; raise as soon as the team fails.")
      .def(
          "abort", [](NcclTeam& self, const std::string& reason) { without_gil([&] { self.team->abort(reason); }); },
          py::arg("reason"), "End what is in flight; the team cannot be used again.")
      .def(
          "close", [](NcclTeam& self) { without_gil([&] { self.team->close(); }); },
          "Wait for what is in flight, with a limit, and end the team.");
}

}  // namespace

void bind_nccl(py::module_& m) {
  m.def(
      "nccl_open",
      [](const std::vector<std::string>& candidates) { return without_gil([&] { return nccl::open(candidates); }); },
      py::arg("candidates"), "Open NCCL if it is not open yet; return its version, 23007 for 2.30.7.");
  m.def("nccl_version", &nccl::version, "Return the version of the open NCCL; 0: none is open.");
  m.def("nccl_unique_id", &unique_id, "Return a new id, by which the ranks of one team find each other.");
  m.def("nccl_init", &init, py::arg("unique_id"), py::arg("world"), py::arg("ranks"), py::arg("devices"),
        py::arg("limit_seconds"), "Make a team of `world` ranks, of which this process has `ranks`, on `devices`.");
  bind_team(m);
}

}  // namespace mgpu::bindings
