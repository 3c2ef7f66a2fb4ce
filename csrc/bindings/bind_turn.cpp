// A `with` block that one caller is inside at a time; nobody waits.  Both ends are C: Ctrl-C cannot come between an end
// and the block, which would leave the turn taken for good.
#include <atomic>
#include <stdexcept>

#include "bindings/bindings.h"

namespace mgpu::bindings {
namespace {

class Turn {
 public:
  explicit Turn(std::string refusal) : refusal_(std::move(refusal)) {}

  void enter() {
    if (taken_.exchange(true)) throw std::runtime_error(refusal_);
  }
  void leave() { taken_.store(false); }

 private:
  std::string refusal_;
  std::atomic<bool> taken_{false};
};

}  // namespace

void bind_turn(py::module_& m) {
  py::class_<Turn>(m, "Turn", "with turn: is around work that one caller does at a time; RuntimeError for another.")
      .def(py::init<std::string>(), py::arg("refusal"))
      .def("__enter__", &Turn::enter)
      .def(
          "__exit__", [](Turn& turn, const py::object&, const py::object&, const py::object&) { turn.leave(); },
          py::arg("kind"), py::arg("error"), py::arg("traceback"));
}

}  // namespace mgpu::bindings
