#include "bindings/bindings.h"
#include "core/op_log.h"

namespace mgpu::bindings {
namespace {

Pointers numbers_of(const std::vector<const void*>& pointers) {
  Pointers numbers;
  for (const void* pointer : pointers) numbers.push_back(reinterpret_cast<Pointer>(pointer));
  return numbers;
}

}  // namespace

void bind_op_log(py::module_& m) {
  py::class_<OpRecord>(m, "OpRecord", "One copy or sum that a call made.")
      .def_readonly("is_sum", &OpRecord::is_sum)
      .def_property_readonly("sources", [](const OpRecord& self) { return numbers_of(self.sources); })
      .def_property_readonly("targets", [](const OpRecord& self) { return numbers_of(self.targets); })
      .def_readonly("nbytes", &OpRecord::nbytes)
      .def_readonly("call", &OpRecord::call)
      .def_readonly("stream", &OpRecord::stream)
      .def_readonly("begin_ns", &OpRecord::begin_ns)
      .def_readonly("end_ns", &OpRecord::end_ns);
  m.def("open_op_log", &open_op_log, "Log this thread's copies and sums from now on.");
  m.def("close_op_log", &close_op_log, "Return the records since then, in order, and log no more.");
}

}  // namespace mgpu::bindings
