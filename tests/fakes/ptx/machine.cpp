#include "fakes/ptx/machine.h"

#include <algorithm>
#include <stdexcept>

#include "fakes/ptx/run.h"

namespace ptx {
namespace {

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

}  // namespace

Machine::Machine() = default;
Machine::~Machine() = default;

void Machine::load(const std::string& text) { modules_.push_back(read_module(text)); }

std::vector<std::string> Machine::kernels() const {
  std::vector<std::string> names;
  for (const auto& module : modules_)
    for (const auto& [name, kernel] : module->kernels) names.push_back(name);
  return names;
}

std::pair<const Module*, const Kernel*> Machine::find(const std::string& name) const {
  for (const auto& module : modules_) {
    const auto found = module->kernels.find(name);
    if (found != module->kernels.end()) return {module.get(), &found->second};
  }
  throw std::runtime_error("no kernel " + name);
}

std::vector<size_t> Machine::parameters(const std::string& name) const {
  std::vector<size_t> sizes;
  for (const Parameter& each : find(name).second->parameters) sizes.push_back(each.nbytes);
  return sizes;
}

void Machine::add(Region region) { regions_[region.begin] = std::move(region); }
void Machine::remove(uint64_t begin) { regions_.erase(begin); }
void Machine::mark_written(uint64_t begin, size_t nbytes) {
  auto found = regions_.upper_bound(begin);
  if (found == regions_.begin()) return;
  Region& region = std::prev(found)->second;
  if (begin + nbytes > region.begin + region.initialized.size()) return;
  std::fill_n(region.initialized.begin() + static_cast<std::ptrdiff_t>(begin - region.begin), nbytes, uint8_t{1});
}

bool Machine::launch(const Launch& launch) {
  const auto [module, kernel] = find(launch.kernel);
  Run run(*this, *module, *kernel, launch);
  try {
    while (!run.go_on()) {
    }
  } catch (const Trap&) {
    return false;
  }
  return true;
}

std::function<bool()> Machine::start(Launch launch) {
  const auto [module, kernel] = find(launch.kernel);
  return [run = std::make_shared<Run>(*this, *module, *kernel, std::move(launch))] {
    try {
      return run->go_on();
    } catch (const Trap&) {
      return true;
    }
  };
}

Coverage Machine::coverage(const std::string& name) const {
  const auto [module, kernel] = find(name);
  Coverage result;
  for (int i = kernel->first; i < kernel->last; ++i) {
    const Instruction& instruction = module->code[static_cast<size_t>(i)];
    ++result.total;
    if (instruction.count) {
      ++result.executed;
      continue;
    }
    const auto file = module->files.find(instruction.source_file);
    const std::string source =
        file == module->files.end() ? "" : base_name(file->second) + ":" + std::to_string(instruction.source_line);
    result.never.push_back({instruction.line, source, instruction.text});
  }
  return result;
}

}  // namespace ptx
