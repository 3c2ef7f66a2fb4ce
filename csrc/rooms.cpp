#include "rooms.h"

#include "backends/cpu/cpu.h"
#include "backends/cuda/cuda.h"
#include "backends/nccl/nccl.h"

namespace mgpu {

std::vector<Room> rooms() {
  return {{"cpu", true, std::to_string(cpu::num_threads()) + " threads"},
          {"cuda", cuda::built(), cuda::detail()},
          {"nccl", nccl::built(), nccl::detail()}};
}

DeviceOps& host_device_ops() { return cpu::device_ops(); }
Collectives& host_collectives() { return cpu::collectives(); }
int host_threads() { return cpu::num_threads(); }
void set_host_threads(int threads) { cpu::set_num_threads(threads); }

int cuda_device_count() { return cuda::device_count(); }
int cuda_runtime_version() { return cuda::runtime_version(); }
int cuda_driver_version() { return cuda::driver_version(); }

}  // namespace mgpu
