#include "backends/nccl/launcher.h"

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

namespace mgpu::nccl {

Launcher::Launcher() {
  try {
    std::thread([shared = shared_] { serve(shared); }).detach();
  } catch (const std::system_error& error) {
    throw Error(std::string("no thread for the calls of NCCL: ") + error.what());
  }
}

Launcher::~Launcher() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->ending = true;
  shared_->changed.notify_all();
}

void Launcher::start(std::function<void()> call) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->call = std::move(call);
  shared_->changed.notify_all();
}

bool Launcher::wait_until(std::chrono::steady_clock::time_point deadline) const {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  return shared_->changed.wait_until(lock, deadline, [this] { return !shared_->call; });
}

std::function<void()> Launcher::waiting() const {
  return [shared = shared_] {
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->changed.wait(lock, [&] { return !shared->call; });
  };
}

void Launcher::serve(const std::shared_ptr<Shared>& shared) {
  std::unique_lock<std::mutex> lock(shared->mutex);
  while (true) {
    shared->changed.wait(lock, [&] { return shared->call || shared->ending; });
    if (!shared->call) return;
    lock.unlock();
    shared->call();
    lock.lock();
    shared->call = nullptr;
    shared->changed.notify_all();
  }
}

}  // namespace mgpu::nccl
