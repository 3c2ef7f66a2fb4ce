// What the PTX machine found, where it runs the kernels: also faults that stop no kernel, such as races.
#pragma once

#include <cstdio>
#include <cstdlib>

#ifdef MGPU_FAKE_CUDA
#include "fakes/ptx/launches.h"
#endif

inline void no_faults() {
#ifdef MGPU_FAKE_CUDA
  char text[4096];
  if (mgpu_ptx_take_faults(text, sizeof text) == 0) return;
  std::fprintf(stderr, "%s", text);
  std::exit(1);
#endif
}
