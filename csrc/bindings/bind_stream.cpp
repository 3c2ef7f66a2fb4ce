#include "backends.h"
#include "bindings/bindings.h"

namespace mgpu::bindings {

void bind_stream(py::module_& m) {
  py::class_<Stream>(m, "Stream", "A queue of work on a device of a backend; all work of the backend cpu is on one.")
      .def(py::init([](const std::string& backend, int device, Pointer handle) {
             return Stream{backend_from(backend), device, reinterpret_cast<void*>(handle)};
           }),
           py::arg("backend"), py::arg("device"), py::arg("handle"))
      .def_property_readonly("backend", [](const Stream& self) { return backend_of(self.backend).name; })
      .def_readonly("device", &Stream::device)
      .def_property_readonly("handle", [](const Stream& self) { return reinterpret_cast<Pointer>(self.handle); })
      .def_property_readonly("is_captured", [](const Stream& self) { return device_ops_of(self).is_captured(self); })
      .def(
          "__eq__", [](const Stream& self, const Stream& other) { return self == other; }, py::is_operator(),
          py::arg("other"))
      .def("__hash__",
           [](const Stream& self) {
             return py::hash(
                 py::make_tuple(static_cast<int>(self.backend), self.device, reinterpret_cast<Pointer>(self.handle)));
           })
      .def("__repr__", [](const Stream& self) {
        return "Stream(" + std::string(backend_of(self.backend).name) + ", device " + std::to_string(self.device) +
               ", handle " + std::to_string(reinterpret_cast<Pointer>(self.handle)) + ")";
      });
}

}  // namespace mgpu::bindings
