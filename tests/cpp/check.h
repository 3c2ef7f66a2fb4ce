// CHECK and CHECK_THROWS: they stay in release builds, and count.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

inline std::atomic<int> checks{0};  // also counted inside parallel tasks

#define CHECK(condition)                                                   \
  do {                                                                     \
    ++checks;                                                              \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

#define CHECK_THROWS(type, part, expression)                                                     \
  do {                                                                                           \
    ++checks;                                                                                    \
    std::string message = "(nothing was thrown)";                                                \
    try {                                                                                        \
      (void)(expression);                                                                        \
    } catch (const type& error) {                                                                \
      message = error.what();                                                                    \
    }                                                                                            \
    if (message.find(part) == std::string::npos) {                                               \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expression, message.c_str()); \
      std::exit(1);                                                                              \
    }                                                                                            \
  } while (0)

inline int passed() {
  std::printf("%d checks passed\n", checks.load());
  return 0;
}
