// Which libnccl is taken, when, and what is said where none can be.  Each case is a child process, because a process
// opens one library for good.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "backends/nccl/nccl.h"
#include "backends/nccl/nccl_library.h"
#include "check.h"
#include "core/error.h"

using namespace mgpu;

static void in_child(const std::function<void()>& test) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    unsetenv("MGPU_CORE_NCCL");
    test();
    std::exit(0);  // with destructors and exit handlers, as a program ends
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void nothing_is_opened_before_it_is_asked_for() {
  setenv("MGPU_CORE_NCCL", FAKE_NCCL, 1);
  CHECK(nccl::detail() == "opened at first use" && nccl::version() == 0);
  CHECK(dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD) == nullptr);
  CHECK(nccl::open({}) == 23007 && nccl::version() == 23007);
  CHECK(nccl::detail() == std::string("NCCL 2.30.7, ") + FAKE_NCCL);
}

static void the_variable_is_the_only_path() {
  setenv("MGPU_CORE_NCCL", "/nowhere/libnccl.so.2", 1);
  CHECK_THROWS(BackendUnavailable, "MGPU_CORE_NCCL: /nowhere/libnccl.so.2", nccl::open({FAKE_NCCL}));
  CHECK(nccl::detail().find("/nowhere/libnccl.so.2") != std::string::npos && nccl::version() == 0);
}

static void what_is_loaded_comes_first() {
  CHECK(dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL) != nullptr);
  CHECK(nccl::open({HALF_NCCL}) == 23007);
  CHECK(nccl::detail().find(FAKE_NCCL) != std::string::npos);
}

static void candidates_come_in_their_order() {
  CHECK(nccl::open({"/nowhere/libnccl.so.2", HALF_NCCL, FAKE_NCCL}) == 23007);
  CHECK(nccl::open({HALF_NCCL}) == 23007);  // one is open
}

static void missing_functions_are_named() {
  setenv("MGPU_CORE_NCCL", HALF_NCCL, 1);
  CHECK_THROWS(BackendUnavailable, "NCCL 2.30.7 without ncclGetErrorString", nccl::open({}));
}

static void an_old_one_is_refused_by_version() {
  setenv("MGPU_CORE_NCCL", FAKE_NCCL, 1);
  setenv("FAKE_NCCL_VERSION", "21705", 1);
  CHECK_THROWS(BackendUnavailable, "it is NCCL 2.17.5, but at least 2.18.0 is wanted", nccl::open({}));
}

static void a_failure_is_remembered_until_there_are_new_candidates() {
  setenv("FAKE_NCCL_VERSION", "2804", 1);
  CHECK_THROWS(BackendUnavailable, "2.8.4", nccl::open({FAKE_NCCL}));
  unsetenv("FAKE_NCCL_VERSION");
  CHECK_THROWS(BackendUnavailable, "2.8.4", nccl::open({}));
  CHECK_THROWS(BackendUnavailable, "2.8.4", nccl::unique_id());
  CHECK(nccl::open({"/nowhere", FAKE_NCCL}) == 23007);
}

static void a_child_opens_its_own() {
  setenv("MGPU_CORE_NCCL", FAKE_NCCL, 1);
  CHECK(nccl::open({}) == 23007);
  in_child([] {
    setenv("MGPU_CORE_NCCL", FAKE_NCCL, 1);
    CHECK(nccl::version() == 0 && nccl::open({}) == 23007);
    const nccl::UniqueId one = nccl::unique_id(), other = nccl::unique_id();
    CHECK(std::string(one.internal, 128) != std::string(other.internal, 128));
  });
}

int main() {
  CHECK(nccl::version_text(23007) == "2.30.7" && nccl::version_text(2804) == "2.8.4");
  for (const auto& test :
       {nothing_is_opened_before_it_is_asked_for, the_variable_is_the_only_path, what_is_loaded_comes_first,
        candidates_come_in_their_order, missing_functions_are_named, an_old_one_is_refused_by_version,
        a_failure_is_remembered_until_there_are_new_candidates, a_child_opens_its_own})
    in_child(test);
  return passed();
}
