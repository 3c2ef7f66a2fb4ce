// A fake accelerator: four devices of host memory behind torch's PrivateUse1.
//
// It is as strict as a real one where the package could go wrong without it.  Tensors know their device, and an
// operation on two devices is an error; each device has a current stream and a random generator of its own; a copy to
// the host that does not block leaves garbage there until somebody waits for the device that it comes from.
//
// Where MGPU_TEST_FAKE is `tpu`, a process may use one of the four, as a TPU's plug-in has it: that of its LOCAL_RANK.
//
// devices.cpp is what torch asks of a device; kernels.cpp and fallback.cpp are what it asks of a tensor.  Here is what
// they share.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

namespace at {
class Tensor;
}

namespace fake {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;

// The device that is meant: the given one, or the calling thread's current one where no index says which.
c10::Device meant(std::optional<c10::Device> given = std::nullopt);

// Memory on the calling thread's current device.
at::Allocator& allocator();

// The random numbers of a device (of the default generator, if none is given), as a generator that CPU kernels take.
at::Generator cpu_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);

// Writes a device's value to a contiguous host tensor when somebody waits for that device; until then there is garbage.
void copy_later(c10::DeviceIndex source, const at::Tensor& host, const at::Tensor& value);
void arrive(c10::DeviceIndex source);

// Notes that the host had to wait for a device, and for what; and a copy from one device to another.
void host_waits(const char* what);
void copied_directly(c10::Device source, c10::Device target);

// Whoever frees the memory waits for the stream: nobody has to here, and tests ask for whom it was said.
void record_stream(at::Tensor& tensor, c10::Stream stream);

// The same memory as a CPU tensor and as a tensor of ours, which keep it alive; others are passed on.
at::Tensor on_cpu(const at::Tensor& ours);
at::Tensor on_device(const at::Tensor& cpu, c10::Device device);

}  // namespace fake
