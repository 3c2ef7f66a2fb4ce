// What only tests ask of the fake CUDA runtime.
#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"

// Starts again with so many devices and none of what was; streams and memory of before must not be used any more.
// Devices see each other's memory where `peers` says that the machine can.
void fakeCudaReset(int devices, uint64_t seed, bool peers = true);
// The next call of this function, by name, returns the code; `after` counts calls that still succeed.
void fakeCudaFail(const char* function, cudaError_t code, int after = 0);
// While on, streams are being captured into a graph, and other threads may ask for events only where they have said
// that they have no part in it (a relaxed capture mode).
void fakeCudaCapture(bool on);
// Contexts that were made: a device counts when something made it current.
int fakeCudaContexts();
// Kernels that were started since the reset.
int fakeCudaLaunches();
