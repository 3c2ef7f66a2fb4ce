#include "backends/nccl/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "core/error.h"
#include "core/per_process.h"

namespace mgpu::nccl {
namespace {

constexpr const char* kVariable = "MGPU_CORE_NCCL";
constexpr const char* kSoname = "libnccl.so.2";

struct State {
  std::mutex mutex;  // held while a library is loaded: two threads that ask at once get the same one
  std::unique_ptr<Library> library;
  std::vector<std::string> tried;
  std::string problem;  // empty: nobody has asked yet
};
State& state() {
  static PerProcess<State> states;
  return states.get();
}

std::string chosen_path() {
  const char* path = std::getenv(kVariable);
  return path ? path : "";
}

// One path to try.
struct Attempt {
  std::string path;
  bool only_if_loaded;
};

std::vector<Attempt> attempts(const std::vector<std::string>& candidates) {
  if (!chosen_path().empty()) return {{chosen_path(), false}};
  std::vector<Attempt> all{{kSoname, true}};
  for (const std::string& path : candidates) all.push_back({path, false});
  all.push_back({kSoname, false});
  return all;
}

// The names of the functions that it lacks.
std::string fill(Api& api, void* handle) {
  std::string missing;
#define MGPU_NCCL_FIND(returns, name, arguments)                                  \
  api.name = reinterpret_cast<returns(*) arguments>(dlsym(handle, "nccl" #name)); \
  if (!api.name) missing += " nccl" #name;
  MGPU_NCCL_FUNCTIONS(MGPU_NCCL_FIND)
#undef MGPU_NCCL_FIND
  return missing;
}

// The file that a function of the library comes from; `path` may be a bare name.
std::string file_of(const Api& api, const std::string& path) {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(api.GetVersion), &info) && info.dli_fname) return info.dli_fname;
  return path;
}

// The version is asked first: it explains why functions are missing.
std::string problem_of(Library& library, void* handle) {
  const std::string missing = fill(library.api, handle);
  if (!library.api.GetVersion) return "it has no ncclGetVersion";
  if (library.api.GetVersion(&library.version) != kSuccess) return "ncclGetVersion failed";
  if (library.version < kMinimumVersion)
    return "it is NCCL " + version_text(library.version) + ", but at least " + version_text(kMinimumVersion) +
           " is wanted";
  return missing.empty() ? "" : "NCCL " + version_text(library.version) + " without" + missing;
}

// Local: torch's NCCL and ours do not see each other's names.  A library that cannot be used is not closed either.
// Empty: `library` is filled.
std::string try_to_open(const std::string& path, int flags, Library& library) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
  if (!handle) {
    const char* reason = dlerror();
    return reason ? reason : path + ": it cannot be loaded";
  }
  const std::string problem = problem_of(library, handle);
  if (!problem.empty()) return path + ": " + problem;
  library.path = file_of(library.api, path);
  return "";
}

// Tries one after the other.  Empty: `library` is filled.
std::string try_all(const std::vector<std::string>& candidates, Library& library) {
  std::string problems;
  for (const Attempt& attempt : attempts(candidates)) {
    const int flags = attempt.only_if_loaded ? RTLD_NOLOAD : 0;
    if (flags && !dlopen(attempt.path.c_str(), RTLD_LAZY | flags)) continue;
    const std::string problem = try_to_open(attempt.path, flags, library);
    if (problem.empty()) return "";
    problems += (problems.empty() ? "" : "; ") + problem;
  }
  return (chosen_path().empty() ? "no usable NCCL: " : std::string(kVariable) + ": ") + problems;
}

}  // namespace

const Library& open_library(const std::vector<std::string>& candidates) {
  State& mine = state();
  const std::lock_guard<std::mutex> lock(mine.mutex);
  if (mine.library) return *mine.library;
  const bool news = !candidates.empty() && candidates != mine.tried;
  if (mine.problem.empty() || news) {
    auto library = std::make_unique<Library>();
    mine.tried = candidates;
    mine.problem = try_all(candidates, *library);
    if (mine.problem.empty()) mine.library = std::move(library);
  }
  if (!mine.library) throw BackendUnavailable(mine.problem);
  return *mine.library;
}

const Library* opened_library() {
  State& mine = state();
  const std::lock_guard<std::mutex> lock(mine.mutex);
  return mine.library.get();
}

std::string library_detail() {
  State& mine = state();
  const std::lock_guard<std::mutex> lock(mine.mutex);
  if (mine.library) return "NCCL " + version_text(mine.library->version) + ", " + mine.library->path;
  return mine.problem.empty() ? "opened at first use" : mine.problem;
}

std::string version_text(int version) {
  const int major = version < 10000 ? 1000 : 10000;
  return std::to_string(version / major) + "." + std::to_string(version % major / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace mgpu::nccl
