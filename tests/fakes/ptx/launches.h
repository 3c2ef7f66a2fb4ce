// Lets the fake CUDA runtime run kernels from the PTX that nvcc made of them, instead of the host compiler's code.
//
//   MGPU_TEST_PTX=75            which architecture's PTX; unset: the host compiler's code
//   MGPU_TEST_PTX_SEED=7        blocks and warps in a random order; unset: in order
//   MGPU_TEST_PTX_COVERAGE=F    at the end of the process, F.75.PID lists the instructions that never ran
//
// The PTX lies in MGPU_PTX_FOLDER/ARCHITECTURE, where the build target ptx_ARCHITECTURE puts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace ptx {

bool is_wanted();

// Memory that kernels may access: exactly these bytes, not yet written.  Before the first region is added, and while
// `allow_unknown` says so, kernels may access any memory.
void add_memory(void* begin, size_t nbytes, int device, bool mapped_for_peers);
void remove_memory(void* begin);
void mark_written(const void* begin, size_t nbytes);
void allow_unknown_memory(bool allow);

// Returns a function that goes on with a kernel, which is found by the symbol of its host function, and returns whether
// it has ended.  Faults are collected; a fault that a GPU would trap on also ends the kernel.
std::function<bool()> start_grid(const void* kernel, unsigned blocks, unsigned threads, int device,
                                 const std::vector<std::pair<const void*, size_t>>& arguments);

// The next launches run these blocks only; none: all of them.
void run_only(const std::vector<uint32_t>& blocks);

}  // namespace ptx

extern "C" {
// Copies the faults found since the last call, one a line, and returns their number.  Tests call it after each test.
__attribute__((visibility("default"))) int mgpu_ptx_take_faults(char* text, size_t nbytes);
}
