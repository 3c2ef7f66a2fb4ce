// Whether Python objects are still what they were.  It is asked of everything a step depends on, in every step, so
// these are plain C functions over lists: nothing is made, and nothing is converted.
#include "bindings/bindings.h"

namespace mgpu::bindings {
namespace {

// What a visitor says of an object, and a walk of all of them.
enum class Walk { on, end, error };

// The entries of a list, or the keys and values of a dict.
template <class See>
Walk walk_container(PyObject* container, See&& see) {
  const py::scoped_critical_section held{py::handle(container)};
  // Itself first: or what goes from the end of one to the beginning of the next would not be seen.
  if (const Walk walk = see(container); walk != Walk::on) return walk;
  if (PyList_Check(container)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(container); ++i)
      if (const Walk walk = see(PyList_GET_ITEM(container, i)); walk != Walk::on) return walk;
    return Walk::on;
  }
  if (!PyDict_Check(container)) {
    PyErr_SetString(PyExc_TypeError, "what is looked into must be a list or a dict");
    return Walk::error;
  }
  PyObject *key, *value;
  for (Py_ssize_t position = 0; PyDict_Next(container, &position, &key, &value);) {
    if (const Walk walk = see(key); walk != Walk::on) return walk;
    if (const Walk walk = see(value); walk != Walk::on) return walk;
  }
  return Walk::on;
}

template <class See>
Walk walk_made(PyObject* made, See&& see) {
  if (made == nullptr) return Walk::error;
  const auto owned = py::reinterpret_steal<py::object>(made);
  return see(made);
}

// Entries of all containers; then attributes, as pairs of an object and a name; then what calls return.
template <class See>
Walk walk_all(PyObject* containers, PyObject* attributes, PyObject* calls, See&& see) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(containers); ++i)
    if (const Walk walk = walk_container(PyList_GET_ITEM(containers, i), see); walk != Walk::on) return walk;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(attributes); ++i) {
    PyObject* pair = PyList_GET_ITEM(attributes, i);
    PyObject* value = PyObject_GetAttr(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
    if (const Walk walk = walk_made(value, see); walk != Walk::on) return walk;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(calls); ++i)
    if (const Walk walk = walk_made(PyObject_CallNoArgs(PyList_GET_ITEM(calls, i)), see); walk != Walk::on) return walk;
  return Walk::on;
}

// The very same object, or an equal number or tuple of numbers, which are made anew each time.
bool is_same(PyObject* now, PyObject* then) {
  if (now == then) return true;
  if (Py_TYPE(now) != Py_TYPE(then)) return false;
  if (!PyLong_CheckExact(now) && !PyFloat_CheckExact(now) && !PyTuple_Check(now)) return false;
  const auto kept = py::reinterpret_borrow<py::object>(now);  // a tuple's entries may have a comparison of their own
  const int equal = PyObject_RichCompareBool(now, then, Py_EQ);
  if (equal < 0) PyErr_Clear();  // a tuple of what cannot be compared
  return equal == 1;
}

bool check_arguments(PyObject* const* arguments, Py_ssize_t given, Py_ssize_t wanted) {
  bool fits = given == wanted;
  for (Py_ssize_t i = 0; fits && i < wanted; ++i) fits = PyList_Check(arguments[i]);
  if (fits)
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(arguments[1]); ++i) {
      PyObject* pair = PyList_GET_ITEM(arguments[1], i);
      fits = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2;
    }
  if (!fits) PyErr_SetString(PyExc_TypeError, "lists of containers, of (object, name) and of callables");
  return fits;
}

PyObject* look_at(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!check_arguments(arguments, count, 3)) return nullptr;
  PyObject* found = PyList_New(0);
  if (found == nullptr) return nullptr;
  const Walk walk = walk_all(arguments[0], arguments[1], arguments[2], [found](PyObject* each) {
    return PyList_Append(found, each) == 0 ? Walk::on : Walk::error;
  });
  if (walk == Walk::on) return found;
  Py_DECREF(found);
  return nullptr;
}

PyObject* looks_like(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!check_arguments(arguments, count, 4)) return nullptr;
  PyObject* found = arguments[3];
  Py_ssize_t at = 0;
  const Walk walk = walk_all(arguments[0], arguments[1], arguments[2], [found, &at](PyObject* each) {
    if (at >= PyList_GET_SIZE(found) || !is_same(each, PyList_GET_ITEM(found, at))) return Walk::end;
    ++at;
    return Walk::on;
  });
  if (walk == Walk::error) return nullptr;
  return PyBool_FromLong(walk == Walk::on && at == PyList_GET_SIZE(found));
}

PyMethodDef kLook{"look_at", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(look_at)), METH_FASTCALL,
                  "look_at(containers: list, attributes: list, calls: list) -> list"};
PyMethodDef kCompare{"looks_like", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(looks_like)),
                     METH_FASTCALL, "looks_like(containers: list, attributes: list, calls: list, found: list) -> bool"};

}  // namespace

void bind_look(py::module_& m) {
  for (PyMethodDef* method : {&kLook, &kCompare})
    m.attr(method->ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(method, nullptr));
}

}  // namespace mgpu::bindings
