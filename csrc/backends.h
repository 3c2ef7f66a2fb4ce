// The registry: the only file that knows which backends there are.  A new backend of devices is a value of BackendId, a
// row in backends.cpp, and a folder.
#pragma once

#include <string>
#include <vector>

#include "backends/nccl/nccl.h"
#include "core/backend.h"
#include "core/collectives.h"
#include "core/transfer.h"

namespace mgpu {

// The backends of devices, in the order of BackendId, and NCCL, which is a backend of collectives alone.
struct BackendDetail {
  std::string name;
  bool built;
  std::string detail;
};
std::vector<BackendDetail> backend_details();

// They throw InvalidArgument for a name or an id that no backend of devices has.
BackendId backend_from(const std::string& name);
const Backend& backend_of(BackendId id);

// They throw BackendUnavailable where the streams' backend is not built, and InvalidArgument for streams of several
// backends; `end`, where the whole tensor of a scatter or gather lies, may also be the host.
DeviceOps& device_ops_of(const Stream& stream);
Collectives& collectives_of(const Streams& streams);
Collectives& collectives_of(const Streams& streams, const Stream& root);
Transfer& transfer_of(const Streams& streams, const Stream& end);

// Threads that share one call on host memory.
int host_threads();
void set_host_threads(int threads);

}  // namespace mgpu
