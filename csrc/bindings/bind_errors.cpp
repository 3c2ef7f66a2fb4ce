// The C++ errors as Python classes of the same names.  CudaError and NcclError carry the library's number in `.code`.
#include "bindings/bindings.h"
#include "core/error.h"

namespace mgpu::bindings {
namespace {

// Owned by the module for as long as the process lives; the translator below is a plain function and needs them.
py::handle cuda_error, nccl_error;

py::handle new_class(py::module_& m, const char* name, py::handle base, const char* doc) {
  py::object made = py::reinterpret_steal<py::object>(
      PyErr_NewExceptionWithDoc((std::string("mgpu_core.") + name).c_str(), doc, base.ptr(), nullptr));
  m.add_object(name, made);
  return made.release();
}

void raise_coded(py::handle type, const CodedError& error) {
  py::object value = type(error.what());
  value.attr("code") = error.code;
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace

void bind_errors(py::module_& m) {
  static py::handle base, unavailable;
  base = new_class(m, "Error", PyExc_RuntimeError, "The machine's failure: a device, a driver, a library.");
  unavailable = new_class(m, "BackendUnavailable", base, "A backend that this build or this machine does not have.");
  cuda_error = new_class(m, "CudaError", base, "A CUDA call failed; `code` is CUDA's number.");
  nccl_error = new_class(m, "NcclError", base, "An NCCL call failed; `code` is NCCL's number.");
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const CudaError& error) {
      raise_coded(cuda_error, error);
    } catch (const NcclError& error) {
      raise_coded(nccl_error, error);
    } catch (const BackendUnavailable& error) {
      PyErr_SetString(unavailable.ptr(), error.what());
    } catch (const Error& error) {
      PyErr_SetString(base.ptr(), error.what());
    }
  });
}

}  // namespace mgpu::bindings
