// What only tests ask of the fake CUDA runtime.
#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"

// Starts again with so many devices and none of what was; streams and memory of before must not be used any more.
// Devices see each other's memory where `peers` says that the machine can.
void fakeCudaReset(int devices, uint64_t seed, bool peers = true);
// The next call of this function, by name, returns the code; `after` counts calls that still succeed.
extern "C" __attribute__((visibility("default"))) void fakeCudaFail(const char* function, cudaError_t code,
                                                                    int after = 0);
// While on, streams are being captured into a graph, and other threads may ask for events only where they have said
// that they have no part in it (a relaxed capture mode).
void fakeCudaCapture(bool on);
// Contexts that were made: a device counts when something made it current.
int fakeCudaContexts();
// Kernels that were started since the reset.
int fakeCudaLaunches();
// Calls of cudaPointerGetAttributes since the reset.  Python tests find it by its name in the module.
extern "C" __attribute__((visibility("default"))) int fakeCudaPointerLooks();
// Called inside each cudaHostAlloc; null: nothing is.
void fakeCudaOnHostAlloc(void (*inside)());
// Waits of the host and frees of pinned memory while streams were being captured, in whatever mode.
int fakeCudaWaitsInCaptures();
// Bytes of pinned memory of the process, of all resets: now, and the most since `fakeCudaForgetPeak`.
int64_t fakeCudaPinned();
int64_t fakeCudaPeakPinned();
void fakeCudaForgetPeak();
// Whether memory of devices is mapped for their peers from now on.  The driver does so with cudaMalloc's, but virtual
// memory (torch's expandable segments) is mapped only where it is said; the PTX machine sees who touches it all the
// same.
void fakeCudaMapForPeers(bool on);
// While on, work ends without being done and memory has no contents: to count what sizes beyond the host's memory need.
void fakeCudaCountOnly(bool on);
