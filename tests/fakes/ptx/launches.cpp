#include "fakes/ptx/launches.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

#include "backends/cuda/cuda.h"
#include "fakes/ptx/machine.h"

namespace ptx {
namespace {

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "PTX machine: %s\n", why.c_str());
  std::abort();
}

std::string text_of(const std::filesystem::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// One line for each kernel, "kernel executed total", and for each instruction that never ran, "\tline\tsource\ttext".
void write_coverage(const Machine& machine, const std::string& path) {
  std::ofstream file(path + "." + variable("MGPU_TEST_PTX") + "." + std::to_string(getpid()));
  for (const std::string& kernel : machine.kernels()) {
    const Coverage coverage = machine.coverage(kernel);
    file << kernel << " " << coverage.executed << " " << coverage.total << "\n";
    for (const Coverage::Line& each : coverage.never)
      file << "\t" << each.line << "\t" << each.source << "\t" << each.instruction << "\n";
  }
}

struct Emulation {
  Machine machine;
  std::mutex mutex;
  std::vector<uint32_t> only_blocks;
  uint64_t seed = 0;

  Emulation() {
    const std::filesystem::path folder = std::filesystem::path(MGPU_PTX_FOLDER) / variable("MGPU_TEST_PTX");
    if (!std::filesystem::is_directory(folder)) stop("no PTX in " + folder.string() + ": build its target first");
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".ptx") machine.load(text_of(entry.path()));
    if (const char* given = variable("MGPU_TEST_PTX_SEED")) seed = std::strtoull(given, nullptr, 10);
    machine.allow_unknown_memory = true;
    machine.reaches = mgpu::cuda::reach;
  }
};

// Never destroyed: worker threads may launch until the process is gone.
Emulation& emulation() {
  static auto* it = [] {
    auto* made = new Emulation;
    if (variable("MGPU_TEST_PTX_COVERAGE"))
      std::atexit([] { write_coverage(emulation().machine, variable("MGPU_TEST_PTX_COVERAGE")); });
    return made;
  }();
  return *it;
}

std::string symbol_of(const void* function) {
  Dl_info info{};
  if (!dladdr(function, &info) || !info.dli_sname || info.dli_saddr != function)
    stop("a kernel whose symbol is not exported");
  return info.dli_sname;
}

}  // namespace

bool is_wanted() {
  static const bool wanted = variable("MGPU_TEST_PTX") != nullptr;
  return wanted;
}

void add_memory(void* begin, size_t nbytes, int device, bool mapped_for_peers) {
  if (!is_wanted()) return;
  const std::lock_guard<std::mutex> lock(emulation().mutex);
  static int number = 0;
  emulation().machine.add({reinterpret_cast<uint64_t>(begin), nbytes, "allocation " + std::to_string(++number),
                           std::vector<uint8_t>(nbytes), device, mapped_for_peers});
}

void remove_memory(void* begin) {
  if (!is_wanted()) return;
  const std::lock_guard<std::mutex> lock(emulation().mutex);
  emulation().machine.remove(reinterpret_cast<uint64_t>(begin));
}

void mark_written(const void* begin, size_t nbytes) {
  if (!is_wanted()) return;
  const std::lock_guard<std::mutex> lock(emulation().mutex);
  emulation().machine.mark_written(reinterpret_cast<uint64_t>(begin), nbytes);
}

void allow_unknown_memory(bool allow) {
  if (is_wanted()) emulation().machine.allow_unknown_memory = allow;
}

void run_only(const std::vector<uint32_t>& blocks) { emulation().only_blocks = blocks; }

std::function<bool()> start_grid(const void* kernel, unsigned blocks, unsigned threads, int device,
                                 const std::vector<std::pair<const void*, size_t>>& arguments) {
  const auto with_machine = [](auto&& work) {
    Emulation& it = emulation();
    const std::lock_guard<std::mutex> lock(it.mutex);
    try {
      return work(it);
    } catch (const std::exception& error) {  // the fake and the PTX do not agree on a kernel
      stop(error.what());
    }
  };
  return with_machine([&](Emulation& it) {
    Launch launch{symbol_of(kernel), blocks, threads, arguments, it.only_blocks, it.seed, device};
    if (it.seed) ++it.seed;
    return [with_machine, go_on = it.machine.start(std::move(launch))] {
      return with_machine([&](Emulation&) { return go_on(); });
    };
  });
}

}  // namespace ptx

int mgpu_ptx_take_faults(char* text, size_t nbytes) {
  if (!ptx::is_wanted()) return 0;
  ptx::Emulation& it = ptx::emulation();
  const std::lock_guard<std::mutex> lock(it.mutex);
  std::string all;
  for (const std::string& fault : it.machine.faults) all += fault + "\n";
  std::snprintf(text, nbytes, "%s", all.c_str());
  const int count = static_cast<int>(it.machine.faults.size());
  it.machine.faults.clear();
  return count;
}
