// A `with` block that one caller is inside at a time; a second caller gets an error and does not wait.  Both ends are
// C: Ctrl-C cannot come between an end and the block, which would leave the guard taken for good.
#include <atomic>
#include <stdexcept>

#include "bindings/bindings.h"

namespace mgpu::bindings {
namespace {

class ReentrancyGuard {
 public:
  explicit ReentrancyGuard(std::string refusal) : refusal_(std::move(refusal)) {}

  void enter() {
    if (taken_.exchange(true)) throw std::runtime_error(refusal_);
  }
  void leave() { taken_.store(false); }

 private:
  std::string refusal_;
  std::atomic<bool> taken_{false};
};

}  // namespace

void bind_reentrancy_guard(py::module_& m) {
  py::class_<ReentrancyGuard>(m, "ReentrancyGuard",
                              "with guard: around work that one caller does at a time; RuntimeError for another.")
      .def(py::init<std::string>(), py::arg("refusal"))
      .def("__enter__", &ReentrancyGuard::enter)
      .def(
          "__exit__",
          [](ReentrancyGuard& guard, const py::object&, const py::object&, const py::object&) { guard.leave(); },
          py::arg("kind"), py::arg("error"), py::arg("traceback"));
}

}  // namespace mgpu::bindings
