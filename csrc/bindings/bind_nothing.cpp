// The two ends of a `with` block that does nothing, for spans with recording off.  A step has dozens of them, so they
// are as short as the interpreter can make them: plain C functions, which it calls without making a bound method first.
#include "bindings/bindings.h"

namespace mgpu::bindings {
namespace {

PyObject* enter(PyObject*, PyObject*) { Py_RETURN_NONE; }
PyObject* leave(PyObject*, PyObject* const*, Py_ssize_t) { Py_RETURN_NONE; }

PyMethodDef kEnter{"enter_nothing", enter, METH_NOARGS, "enter_nothing() -> None"};
PyMethodDef kLeave{"leave_nothing", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(leave)), METH_FASTCALL,
                   "leave_nothing(kind: object, error: object, traceback: object) -> None"};

}  // namespace

void bind_nothing(py::module_& m) {
  for (PyMethodDef* method : {&kEnter, &kLeave})
    m.attr(method->ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(method, nullptr));
}

}  // namespace mgpu::bindings
