#include "backends.h"

#include "backends/cpu/cpu.h"
#include "backends/cuda/cuda.h"
#include "backends/nccl/nccl.h"
#include "core/error.h"
#include "core/op_log.h"
#include "core/peer_collectives.h"

namespace mgpu {
namespace {

// Nothing here is ever destroyed: a thread may still use it while the process ends.

// The interfaces of one backend.  Transfers also copy on the host.
struct Interfaces {
  explicit Interfaces(const Backend& backend)
      : ops(backend.device_ops()),
        host(cpu::backend().device_ops()),
        collectives(ops, backend.reach),
        transfer(ops, host, backend.reach) {}
  LoggingDeviceOps ops;
  LoggingDeviceOps host;
  PeerCollectives collectives;
  Transfer transfer;
};

// Made at first use.
template <const Backend& (*backend)()>
Interfaces& interfaces() {
  static auto* made = new Interfaces(backend());
  return *made;
}

struct Row {
  const Backend& (*backend)();
  Interfaces& (*interfaces)();
};
template <const Backend& (*backend)()>
constexpr Row row() {
  return {backend, interfaces<backend>};
}

// In the order of BackendId.
constexpr Row kRows[] = {row<cpu::backend>(), row<cuda::backend>()};

const Row& row_of(BackendId id) {
  const auto index = static_cast<size_t>(id);
  require(index < std::size(kRows), "there is no backend number " + std::to_string(static_cast<int>(id)));
  return kRows[index];
}

void require_one_backend(const Stream& one, const Stream& other) {
  if (one.backend == other.backend) return;
  throw InvalidArgument("the streams of one call are of one backend, not of " +
                        std::string(backend_of(one.backend).name) + " and " + backend_of(other.backend).name);
}

Interfaces& interfaces_of(const Streams& streams) {
  require(!streams.empty(), "a team has at least one rank");
  for (const Stream& stream : streams) require_one_backend(streams[0], stream);
  return row_of(streams[0].backend).interfaces();
}

}  // namespace

std::vector<BackendDetail> backend_details() {
  std::vector<BackendDetail> result;
  for (const Row& row : kRows) result.push_back({row.backend().name, row.backend().built, row.backend().detail()});
  result.push_back({"nccl", true, nccl::detail()});
  return result;
}

BackendId backend_from(const std::string& name) {
  std::string all;
  for (size_t index = 0; index < std::size(kRows); ++index) {
    const char* each = kRows[index].backend().name;
    if (name == each) return static_cast<BackendId>(index);
    all += std::string(index ? ", " : "") + each;
  }
  throw InvalidArgument("backend must be one of " + all + ", not '" + name + "'");
}

const Backend& backend_of(BackendId id) { return row_of(id).backend(); }
DeviceOps& device_ops_of(const Stream& stream) { return row_of(stream.backend).interfaces().ops; }
Collectives& collectives_of(const Streams& streams) { return interfaces_of(streams).collectives; }

Collectives& collectives_of(const Streams& streams, const Stream& root) {
  Interfaces& found = interfaces_of(streams);
  require_one_backend(streams[0], root);
  return found.collectives;
}

Transfer& transfer_of(const Streams& streams, const Stream& end) {
  Interfaces& found = interfaces_of(streams);
  if (!end.on_host()) require_one_backend(streams[0], end);
  return found.transfer;
}

int host_threads() { return cpu::num_threads(); }
void set_host_threads(int threads) { cpu::set_num_threads(threads); }

}  // namespace mgpu
