// Both ends of a `with` block that does nothing, for spans while recording is off.  A step has dozens of them.  They
// are plain C functions, which the interpreter calls without making a bound method first: the cheapest ends there are.
#include "bindings/bindings.h"

namespace mgpu::bindings {
namespace {

PyObject* enter(PyObject*, PyObject*) { Py_RETURN_NONE; }
PyObject* exit(PyObject*, PyObject* const*, Py_ssize_t) { Py_RETURN_NONE; }

PyMethodDef kEnter{"null_enter", enter, METH_NOARGS, "null_enter() -> None"};
PyMethodDef kExit{"null_exit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(exit)), METH_FASTCALL,
                  "null_exit(kind: object, error: object, traceback: object) -> None"};

}  // namespace

void bind_null_context(py::module_& m) {
  for (PyMethodDef* method : {&kEnter, &kExit})
    m.attr(method->ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(method, nullptr));
}

}  // namespace mgpu::bindings
