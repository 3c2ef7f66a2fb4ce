// Teams of push.  The memory in which the ranks meet is the caller's, as all memory of devices.
#include <chrono>

#include "backends.h"
#include "bindings/bindings.h"
#include "core/counters.h"
#include "core/error.h"
#include "core/push_team.h"

namespace mgpu::bindings {
namespace {

std::unique_ptr<PushTeam> team_of(const Pointers& memory, const Streams& streams) {
  std::vector<void*> pointers;
  for (Pointer each : memory) pointers.push_back(pointer_of(each, sizeof(uint64_t)));
  collectives_of(streams);  // throws where they are of several backends
  return without_gil([&] {
    return std::make_unique<PushTeam>(device_ops_of(streams[0]), backend_of(streams[0].backend).reach, streams,
                                      std::move(pointers));
  });
}

void all_reduce(PushTeam& self, const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype_name,
                const std::string& op_name, const Streams& streams, double limit_seconds) {
  const AllReduceCall call = all_reduce_call(in, out, count, dtype_name, op_name);
  const Ranks ranks = ranks_of(streams, in.size());
  require(limit_seconds > 0 && limit_seconds <= 1e9,
          "limit_seconds must be positive, not " + std::to_string(limit_seconds));
  const std::chrono::nanoseconds limit(static_cast<int64_t>(limit_seconds * 1e9));
  without_gil([&] { self.all_reduce(call.in, call.out, call.op, ranks.streams, limit); });
  count_ranks("all_reduce", name_of(Algorithm::push), std::vector<int64_t>(in.size(), nbytes_of(call.in[0])));
}

}  // namespace

void bind_push(py::module_& m) {
  m.def("push_nbytes", [] { return kPushNbytes; }, "Bytes of each rank that go in one launch.");
  m.def("push_memory_nbytes", &push_memory_nbytes, py::arg("ranks"),
        "Bytes in which the ranks of a team meet, of each.");
  py::class_<PushTeam>(m, "PushTeam", "Ranks that write their values and flags into each other's memory.")
      .def(py::init(&team_of), py::arg("memory"), py::arg("streams"),
           "One pointer per rank, to memory of its stream's device that is 0 by now, and that outlives late kernels.")
      .def("all_reduce", &all_reduce, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op"),
           py::arg("streams"), py::arg("limit_seconds"),
           "Like all_reduce(), but each rank has a stream of its own and waits for the others up to the limit.")
      .def("check", &PushTeam::check, "Raise Error once a wait was given up, or a launch failed.");
}

}  // namespace mgpu::bindings
