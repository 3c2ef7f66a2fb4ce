// One binary for every x86-64: the compiler makes a copy of the marked function per instruction set and the loader
// picks one.  Only gcc on x86-64 has it, and it crashes before main under the thread sanitizer (g++ 12): there the
// mark is empty and the same source is the plain loop.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(MGPU_SANITIZED)
#define MGPU_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define MGPU_CLONES
#endif
