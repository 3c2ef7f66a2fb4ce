// mgpu_core._core: pointers, counts, dtypes by name.  Python allocates and keeps alive; nothing here owns memory.
#include "backends.h"
#include "bindings/bindings.h"
#include "core/counters.h"

namespace mgpu::bindings {
namespace {

std::vector<std::tuple<std::string, bool, std::string>> backends_as_tuples() {
  std::vector<std::tuple<std::string, bool, std::string>> result;
  for (const BackendDetail& backend : backend_details())
    result.emplace_back(backend.name, backend.built, backend.detail);
  return result;
}

py::dict counters_as_dict() {
  py::dict result;
  for (const auto& [key, count] : counters()) {
    const auto& [operation, algorithm, rank] = key;
    result[py::make_tuple(operation, algorithm, rank)] = py::make_tuple(count.calls, count.nbytes);
  }
  return result;
}

const Backend& named(const std::string& backend) { return backend_of(backend_from(backend)); }

void bind_machine(py::module_& m) {
  m.def("backends", &backends_as_tuples, "Return (name, built, what it is or why it is missing) of every backend.");
  m.def("num_threads", &host_threads, "Return how many threads share one call on host memory.");
  m.def("set_num_threads", &set_host_threads, py::arg("threads"));
  m.def(
      "device_count", [](const std::string& backend) { return named(backend).device_count(); }, py::arg("backend"),
      "Return how many devices this build can use.");
  m.def(
      "runtime_version", [](const std::string& backend) { return named(backend).runtime_version(); },
      py::arg("backend"), "Return the runtime's version: 13000 is 13.0; 0: there is none.");
  m.def(
      "driver_version", [](const std::string& backend) { return named(backend).driver_version(); }, py::arg("backend"),
      "Return the driver's version: 13000 is 13.0; 0: there is none.");
  m.def(
      "has_code_for", [](const std::string& backend, int device) { return named(backend).has_code_for(device); },
      py::arg("backend"), py::arg("device"), "Return whether this build has code that the device runs.");
  m.def(
      "check_memory",
      [](const std::string& backend, Pointer pointer, int device, const std::string& name) {
        named(backend).check_memory(pointer_of(pointer), device, name);
      },
      py::arg("backend"), py::arg("pointer"), py::arg("device"), py::arg("name"),
      "Raise ValueError unless the device reaches the memory.  The other functions trust the pointers they are "
      "given.");
  m.def(
      "allow_peers",
      [](const std::string& backend, const std::vector<std::pair<int, int>>& device_and_peer) {
        named(backend).allow_peers(device_and_peer);
      },
      py::arg("backend"), py::arg("device_and_peer"),
      "Let work on the first of each pair touch the second's memory; a test must have shown that it works.");
}

void bind_counters(py::module_& m) {
  m.def("counters", &counters_as_dict, "Return {(operation, algorithm, rank): (calls, bytes)} since the last reset.");
  m.def("reset_counters", &reset_counters);
  m.def("count", &count, py::arg("operation"), py::arg("algorithm"), py::arg("rank"), py::arg("nbytes"),
        "Add one call, for code that moves bytes without this module.");
}

}  // namespace
}  // namespace mgpu::bindings

PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  using namespace mgpu::bindings;
  m.doc() = "The compiled half of mgpu_core: plans, transfers and collectives over raw pointers.";
  bind_errors(m);
  bind_machine(m);
  bind_counters(m);
  bind_plan(m);
  bind_stream(m);
  bind_transfer(m);
  bind_kernels(m);
  bind_collectives(m);
  bind_nccl(m);
  bind_push(m);
  bind_op_log(m);
  bind_null_context(m);
  bind_reentrancy_guard(m);
}
