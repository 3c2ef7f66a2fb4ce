// The door of the nccl room.
#pragma once

#include <string>

namespace mgpu::nccl {

bool built();
std::string detail();

}  // namespace mgpu::nccl
