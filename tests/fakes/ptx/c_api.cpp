// The machine for ctypes: `tests/fakes/ptx/__init__.py` calls these.
#include <cstdio>
#include <cstring>
#include <exception>

#include "fakes/ptx/machine.h"

namespace {

thread_local std::string error;

template <class Work>
int without_throwing(Work&& work) {
  try {
    return work();
  } catch (const std::exception& thrown) {
    error = thrown.what();
    return -1;
  }
}

}  // namespace

// A function returns -1 where it threw; ptx_error() says why.
extern "C" {

const char* ptx_error() { return error.c_str(); }
ptx::Machine* ptx_new() { return new ptx::Machine; }
void ptx_delete(ptx::Machine* machine) { delete machine; }

int ptx_load(ptx::Machine* machine, const char* text) {
  return without_throwing([&] { return machine->load(text), 0; });
}

void ptx_add(ptx::Machine* machine, uint64_t begin, size_t nbytes, int initialized, const char* name) {
  machine->add({begin, nbytes, name, std::vector<uint8_t>(initialized ? 0 : nbytes)});
}
void ptx_allow_unknown_memory(ptx::Machine* machine) { machine->allow_unknown_memory = true; }

// Bytes of the parameters into `sizes`; returns how many there are.
int ptx_parameters(ptx::Machine* machine, const char* kernel, size_t* sizes, size_t most) {
  return without_throwing([&] {
    const auto all = machine->parameters(kernel);
    for (size_t i = 0; i < all.size() && i < most; ++i) sizes[i] = all[i];
    return static_cast<int>(all.size());
  });
}

// 1: the kernel ended, 0: a fault stopped it.
int ptx_launch(ptx::Machine* machine, const char* kernel, uint32_t blocks, uint32_t threads, const void** arguments,
               const size_t* sizes, size_t count, uint64_t seed) {
  return without_throwing([&] {
    ptx::Launch launch{kernel, blocks, threads, {}, {}, seed, 0};
    for (size_t i = 0; i < count; ++i) launch.arguments.emplace_back(arguments[i], sizes[i]);
    return machine->launch(launch) ? 1 : 0;
  });
}

// The kernels' names, one a line.
void ptx_kernels(ptx::Machine* machine, char* text, size_t nbytes) {
  std::string all;
  for (const std::string& name : machine->kernels()) all += name + "\n";
  std::snprintf(text, nbytes, "%s", all.c_str());
}

// The faults since the last call, one a line.
void ptx_take_faults(ptx::Machine* machine, char* text, size_t nbytes) {
  std::string all;
  for (const std::string& fault : machine->faults) all += fault + "\n";
  std::snprintf(text, nbytes, "%s", all.c_str());
  machine->faults.clear();
}
}
