// Every collective and transfer of ranks in host memory, on 1, 2, 3 and 8 of them; small, and large enough to be shared
// by threads; and what the checks refuse.
#include "backends.h"
#include "conformance.h"
#include "core/checks.h"
#include "core/error.h"

using namespace mgpu;

using Numbers = std::vector<std::vector<int32_t>>;

static Buffers buffers(Numbers& memory, int64_t count) {
  Buffers result;
  for (auto& each : memory) result.push_back({each.data(), count, DType::i32});
  return result;
}

static void refusals() {
  Numbers memory(2, std::vector<int32_t>(5));
  auto good = buffers(memory, 5), shorter = good;
  shorter[1].count = 4;
  CHECK_THROWS(InvalidArgument, "rank 1: expected 5 elements, got 4", (check_all_reduce(shorter, good), 0));
  auto mixed = good;
  mixed[1].dtype = DType::f32;
  CHECK_THROWS(InvalidArgument, "float32", (check_all_reduce(mixed, good), 0));
  auto absent = good;
  absent[0].pointer = nullptr;
  CHECK_THROWS(InvalidArgument, "no memory", (check_all_reduce(absent, good), 0));
  CHECK_THROWS(InvalidArgument, "at least one rank", (check_all_reduce({}, {}), 0));
  CHECK_THROWS(InvalidArgument, "2 inputs, 1 outputs", (check_all_reduce(good, {good[0]}), 0));
  CHECK_THROWS(InvalidArgument, "expected 10", (check_reduce_scatter(good, good), 0));
  CHECK_THROWS(InvalidArgument, "expected 10", (check_all_gather(good, good), 0));
  CHECK_THROWS(InvalidArgument, "rank 1", (check_broadcast({{good[0], shorter}}), 0));
  CHECK_THROWS(InvalidArgument, "at least one rank", (check_reduce({{{}, good[0]}}), 0));
}

static void streams_are_of_one_backend() {
  CHECK_THROWS(InvalidArgument, "at least one rank", (collectives_of({}), 0));
  const Stream gpu{BackendId::cuda, 0, nullptr};
  CHECK_THROWS(InvalidArgument, "of one backend, not of cpu and cuda", (collectives_of({Stream{}, gpu}), 0));
  CHECK_THROWS(InvalidArgument, "of one backend, not of cpu and cuda", (collectives_of({Stream{}}, gpu), 0));
  CHECK_THROWS(InvalidArgument, "of one backend, not of cpu and cuda", (transfer_of({Stream{}}, gpu), 0));
  CHECK(&device_ops_of(Stream{}) == &device_ops_of(Stream{}) && backend_from("cuda") == BackendId::cuda);
  CHECK_THROWS(InvalidArgument, "backend must be one of cpu, cuda, not 'nccl'", backend_from("nccl"));
  CHECK_THROWS(InvalidArgument, "there is no backend number 7", (backend_of(static_cast<BackendId>(7)), 0));
  CHECK(backend_of(BackendId::cpu).device_count() == 1 && works_on_host(BackendId::cpu));
  Numbers memory(1, std::vector<int32_t>(5));
  CHECK_THROWS(
      BackendUnavailable, "nccl",
      (collectives_of({Stream{}})
           .all_reduce(buffers(memory, 5), buffers(memory, 5), ReduceOp::sum, Algorithm::nccl, {{Stream{}}, true}),
       0));
}

int main() {
  set_host_threads(4);
  for (int ranks : {1, 2, 3, 8}) {
    const auto make = [&] { return std::make_unique<HostWorld>(ranks); };
    conformance::collectives(make, {0, 1, 7, 300'001});
    conformance::transfers(make);
  }
  conformance::there_and_back(*std::make_unique<HostWorld>(3), 2, {1000, 1001, 999}, 128, 0);
  refusals();
  streams_are_of_one_backend();
  return passed();
}
