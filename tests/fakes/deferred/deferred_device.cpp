#include "fakes/deferred/deferred_device.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace mgpu::fakes {

struct DeferredDevice::Step {
  std::function<bool()> run;
  std::shared_ptr<Mark> waits_for;  // null: work
};

struct DeferredDevice::Queue {
  int device;
  std::vector<Step> steps;
  size_t done = 0;
};

struct DeferredDevice::Mark {
  Queue* queue;
  size_t position;  // reached when that many steps are done
};

DeferredDevice::DeferredDevice(uint64_t seed, DeviceOps& host, Reach reach)
    : host_(host), reach_(std::move(reach)), random_(seed), eagerness_(seed % 4 * 0.3) {}

DeferredDevice::~DeferredDevice() = default;

Stream DeferredDevice::new_stream(int device) {
  queues_.push_back(std::make_unique<Queue>(Queue{device, {}, 0}));
  return {BackendId::cuda, device, queues_.back().get()};
}

void* DeferredDevice::allocate(int device, int64_t nbytes) {
  memory_.push_back(std::make_unique<char[]>(nbytes + 1));
  char* start = memory_.back().get();
  std::memset(start, kPoison, nbytes);
  owners_[start] = {nbytes + 1, device};
  return start;
}

DeferredDevice::Queue& DeferredDevice::queue_of(Stream on) {
  if (on.handle == nullptr) throw std::logic_error("a stream of the host has no queue");
  return *static_cast<Queue*>(on.handle);
}

void DeferredDevice::submit(Stream on, std::function<bool()> step) {
  queue_of(on).steps.push_back({std::move(step), nullptr});
}

void DeferredDevice::run(Stream on, std::function<void()> work) {
  submit(on, [work = std::move(work)] {
    work();
    return true;
  });
}

bool DeferredDevice::idle() const {
  for (const auto& queue : queues_)
    if (queue->done < queue->steps.size()) return false;
  for (const auto& [start, staged] : *staged_)
    if (staged.alive) return false;
  return true;
}

// One step of a queue, if it can be made now.
bool DeferredDevice::try_step(Queue& queue) {
  if (queue.done == queue.steps.size()) return false;
  Step& step = queue.steps[queue.done];
  const bool finished = step.waits_for ? step.waits_for->queue->done >= step.waits_for->position : step.run();
  if (!finished) return false;
  queue.steps[queue.done++] = {};  // lets go of what it held
  return true;
}

void DeferredDevice::let_others_run(const Queue& forced) {
  while (std::uniform_real_distribution<>()(random_) < eagerness_) {
    Queue& other = *queues_[random_() % queues_.size()];
    if (&other != &forced) try_step(other);
  }
}

// Runs `queue` up to its step `until`, and of the others what it waits for, and no more than chance adds.
void DeferredDevice::force(Queue& queue, size_t until) {
  for (int tries = 0; queue.done < until;) {
    let_others_run(queue);
    if (queue.done >= until) return;
    if (const auto mark = queue.steps[queue.done].waits_for) force(*mark->queue, mark->position);
    if (try_step(queue)) {
      tries = 0;
      continue;
    }
    // A step that is not finished waits for something that is no event (a peer of a collective): all may go on.
    for (auto& other : queues_) try_step(*other);
    if (++tries > 1'000'000) throw std::logic_error("a deferred stream waits for something that never comes");
  }
}

// Steps that are not finished may wait for each other, so that one round in which none ends is not the last.
void DeferredDevice::run_all() {
  for (int rounds = 0; rounds < 64 && !idle(); ++rounds)
    for (auto& queue : queues_)
      while (try_step(*queue)) rounds = 0;
}

Event DeferredDevice::record(Stream on) {
  if (on.on_host()) return nullptr;
  Queue& queue = queue_of(on);
  return std::make_shared<Mark>(Mark{&queue, queue.steps.size()});
}

void DeferredDevice::wait(Stream on, const Event& event) {
  if (!event) return;
  const auto mark = std::static_pointer_cast<Mark>(event);
  if (on.on_host()) return force(*mark->queue, mark->position);
  queue_of(on).steps.push_back({nullptr, mark});
}

bool DeferredDevice::reached(const Event& event) {
  if (!event) return true;
  const auto mark = std::static_pointer_cast<Mark>(event);
  return mark->queue->done >= mark->position;
}

void DeferredDevice::synchronize(Stream on) {
  if (!on.on_host()) force(queue_of(on), queue_of(on).steps.size());
}

std::shared_ptr<void> DeferredDevice::make_current(int device) {
  const int before = std::exchange(current_, device);
  return {nullptr, [this, before](void*) { current_ = before; }};
}

std::shared_ptr<void> DeferredDevice::staging(int64_t nbytes, const Streams&) {
  auto memory = std::make_unique<char[]>(nbytes);
  char* start = memory.get();
  std::memset(start, kPoison, nbytes);
  const auto staged = staged_;
  (*staged)[start] = {std::move(memory), nbytes, true};
  return {start, [staged, start](void*) {
            Staged& freed = staged->at(start);
            std::memset(start, kPoison, freed.nbytes);
            freed.alive = false;
          }};
}

void DeferredDevice::keep(Stream on, std::shared_ptr<void> memory) {
  if (!on.on_host()) run(on, [memory = std::move(memory)] {});
}

void DeferredDevice::require_reach(Stream on, const void* pointer) const {
  const auto* start = static_cast<const char*>(pointer);
  auto owner = owners_.upper_bound(start);
  if (owner == owners_.begin()) return;
  --owner;
  if (start >= owner->first + owner->second.first) return;  // host memory: everybody reaches it
  const int device = owner->second.second;
  if (device != on.device && !reach_(on.device, device))
    throw std::logic_error("work on device " + std::to_string(on.device) + " touches memory of device " +
                           std::to_string(device) + ", which it does not reach");
}

void DeferredDevice::require_alive(const void* pointer) const {
  const auto* start = static_cast<const char*>(pointer);
  auto staged = staged_->upper_bound(start);
  if (staged == staged_->begin()) return;
  --staged;
  if (start < staged->first + staged->second.nbytes && !staged->second.alive)
    throw std::logic_error("work touches staging memory that was given back");
}

void DeferredDevice::run_on(Stream on, std::vector<const void*> touched, std::function<void()> work) {
  for (const void* each : touched) require_reach(on, each);
  run(on, [this, touched = std::move(touched), work = std::move(work)] {
    for (const void* each : touched) require_alive(each);
    work();
  });
}

void DeferredDevice::copy(const std::vector<CopyBlock>& blocks, Stream on) {
  std::vector<const void*> touched;
  for (const CopyBlock& block : blocks) touched.insert(touched.end(), {block.to, block.from});
  run_on(on, touched, [this, blocks] { host_.copy(blocks, {}); });
}

void DeferredDevice::sum_ranks(const std::vector<SumRanks>& calls, Stream on) {
  std::vector<const void*> touched;
  for (const SumRanks& call : calls) {
    touched.insert(touched.end(), call.in.begin(), call.in.end());
    touched.insert(touched.end(), call.out.begin(), call.out.end());
  }
  run_on(on, touched, [this, calls] { host_.sum_ranks(calls, {}); });
}

void DeferredDevice::gather_rows(const GatherRows& call, Stream on) {
  run(on, [this, call] { host_.gather_rows(call, {}); });
}
void DeferredDevice::pack(const Packing& call, Stream on) {
  run(on, [this, call] { host_.pack(call, {}); });
}
void DeferredDevice::unpack(const Packing& call, Stream on) {
  run(on, [this, call] { host_.unpack(call, {}); });
}
void DeferredDevice::scale_cast(const ScaleCast& call, Stream on) {
  run(on, [this, call] { host_.scale_cast(call, {}); });
}
void DeferredDevice::l2_norm(const L2Norm& call, Stream on) {
  run(on, [this, call] { host_.l2_norm(call, {}); });
}
void DeferredDevice::sgd(const Sgd& call, Stream on) {
  run(on, [this, call] { host_.sgd(call, {}); });
}
void DeferredDevice::adam(const Adam& call, Stream on) {
  run(on, [this, call] { host_.adam(call, {}); });
}
void DeferredDevice::lion(const Lion& call, Stream on) {
  run(on, [this, call] { host_.lion(call, {}); });
}

}  // namespace mgpu::fakes
