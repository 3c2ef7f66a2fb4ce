// The kernels that a device must have of its own: memory, copies, views, and what torch sends nowhere else.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fake.h"

namespace fake {
namespace {

using c10::SymIntArrayRef;
template <typename T>
using Maybe = std::optional<T>;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(SymIntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<at::Device> device,
                 Maybe<bool>, Maybe<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(meant(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout>,
                         Maybe<at::Device> device, Maybe<bool>) {
  const c10::DeviceGuard guard(meant(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator(),
                                           kKeys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool to_host = target.is_cpu();
  if (to_host && non_blocking && target.is_contiguous()) {
    const at::Tensor value = on_cpu(source).to(target.scalar_type(), false, true).expand(target.sizes()).contiguous();
    copy_later(source.device().index(), target, value);
    return target;
  }
  if (!non_blocking && to_host != source.is_cpu()) host_waits("copy");
  if (!to_host && !source.is_cpu() && source.device() != target.device()) {
    copied_directly(source.device(), target.device());
  }
  on_cpu(target).copy_(on_cpu(source));
  if (to_host) arrive(source.device().index());  // in order: what was copied before it has arrived too
  return target;
}

const at::Tensor& resize(const at::Tensor& ours, SymIntArrayRef size, Maybe<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t wanted = (ours.storage_offset() + c10::multiply_integers(sizes)) * ours.itemsize();
  c10::StorageImpl& storage = *ours.storage().unsafeGetStorageImpl();
  if (storage.nbytes() < wanted) {
    const c10::DeviceGuard guard(ours.device());
    at::DataPtr grown = allocator().allocate(wanted);
    if (storage.nbytes()) std::memcpy(grown.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(wanted);
  }
  ours.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return ours;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& set_storage(at::Tensor& ours, at::Storage storage, c10::SymInt offset, SymIntArrayRef size,
                        SymIntArrayRef stride) {
  c10::TensorImpl* impl = ours.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  return ours;
}

at::Tensor as_strided(const at::Tensor& ours, SymIntArrayRef size, SymIntArrayRef stride, Maybe<c10::SymInt> offset) {
  const auto start = offset ? Maybe<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(ours, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

// Wrapped, because older torches have only those with plain integers.
at::Tensor view(const at::Tensor& ours, SymIntArrayRef size) {
  return at::native::view(ours, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& ours, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(ours, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Scalar local_scalar(const at::Tensor& ours) {
  host_waits("number");
  return on_cpu(ours).item();
}

void check_together(const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK(one.device() == other.device(), "Expected all tensors to be on the same device, but found ", one.device(),
              " and ", other.device(), " in convolution");
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const Maybe<at::Tensor>& bias,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                       SymIntArrayRef output_padding, c10::SymInt groups) {
  check_together(x, weight);
  if (bias && bias->defined()) check_together(x, *bias);
  const at::Tensor none;
  const at::Tensor out = at::convolution_symint(on_cpu(x), on_cpu(weight), on_cpu(bias ? *bias : none), stride, padding,
                                                dilation, transposed, output_padding, std::move(groups));
  return on_device(out, x.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& x,
                                                                    const at::Tensor& weight, SymIntArrayRef stride,
                                                                    SymIntArrayRef padding, SymIntArrayRef dilation,
                                                                    bool transposed, SymIntArrayRef output_padding,
                                                                    c10::SymInt groups, std::array<bool, 3> mask) {
  check_together(x, weight);
  check_together(x, grad);
  const std::vector<c10::SymInt> bias{weight.sym_size(0)};
  const auto [dx, dweight, dbias] =
      at::convolution_backward_symint(on_cpu(grad), on_cpu(x), on_cpu(weight), SymIntArrayRef(bias), stride, padding,
                                      dilation, transposed, output_padding, std::move(groups), mask);
  return {on_device(dx, x.device()), on_device(dweight, x.device()), on_device(dbias, x.device())};
}

// Attention by plain matrix products: the CPU's fused kernel would be asked for with a device's tensors.
int64_t fused_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Maybe<at::Tensor>&, double, bool,
                        Maybe<double>, bool) {
  return 0;
}

// The CPU's kernel takes no generator and would draw from the CPU's default one.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& x, double p, Maybe<bool> train) {
  const double kept = train.value_or(true) ? 1 - p : 1;
  const at::Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kBool)).bernoulli_(kept);
  return {kept > 0 ? x * mask / kept : x * mask, mask};
}

// In plain operators, which autograd takes apart, so that no backward kernel is needed.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& from_input, const at::Tensor& from_hidden,
                                                         const at::Tensor& cell, const Maybe<at::Tensor>& input_bias,
                                                         const Maybe<at::Tensor>& hidden_bias) {
  at::Tensor gates = from_input + from_hidden;
  for (const auto* bias : {&input_bias, &hidden_bias}) {
    if (*bias && (*bias)->defined()) gates = gates + **bias;
  }
  const auto parts = gates.chunk(4, 1);
  const at::Tensor next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates.detach()};
}

// Torch's own kernels for sparse tensors make new ones on the current device, which must be the arguments'.
Maybe<c10::Device> device_in() { return std::nullopt; }
template <typename First, typename... Rest>
Maybe<c10::Device> device_in(const First& first, const Rest&... rest) {
  if constexpr (std::is_same_v<First, Maybe<c10::Device>>) {
    if (first) return first;
  } else if constexpr (std::is_same_v<First, at::Tensor>) {
    return first.device();
  }
  return device_in(rest...);
}

template <auto kKernel>
struct Guarded;

template <typename Result, typename... Arguments, Result (*kKernel)(Arguments...)>
struct Guarded<kKernel> {
  static Result run(Arguments... arguments) {
    const c10::DeviceGuard guard(meant(device_in(arguments...)));
    return kKernel(arguments...);
  }
};

}  // namespace
}  // namespace fake

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", fake::empty);
  m.impl("empty_strided", fake::empty_strided);
  m.impl("resize_", fake::resize);
  m.impl("set_.source_Storage_storage_offset", fake::set_storage);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("_copy_from", fake::copy_from);
  m.impl("_copy_from_and_resize", fake::copy_from_and_resize);
  m.impl("_local_scalar_dense", fake::local_scalar);
  m.impl("as_strided", fake::as_strided);
  m.impl("view", fake::view);
  m.impl("view.dtype", at::native::view_dtype);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", fake::reshape_alias);
  m.impl("convolution_overrideable", fake::convolution);
  m.impl("convolution_backward_overrideable", fake::convolution_backward);
  m.impl("_fused_sdp_choice", fake::fused_attention);
  m.impl("_thnn_fused_lstm_cell", fake::lstm_cell);
  m.impl("native_dropout", fake::dropout);
  m.impl("record_stream", fake::record_stream);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_thnn_fused_lstm_cell", fake::lstm_cell); }

// Conjugate and negative views are carried out by copying, so the copy must see them as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// A sparse tensor is indices and values; torch's own kernels for what holds them know no device.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", fake::Guarded<&at::native::empty_sparse_symint>::run);
  m.impl("_sparse_coo_tensor_with_dims", fake::Guarded<&at::native::new_with_dims_sparse>::run);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         fake::Guarded<&at::native::new_with_dims_and_tensor_sparse_symint>::run);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("clone", fake::Guarded<&at::native::clone_sparse>::run);
  m.impl("copy_sparse_to_sparse_", fake::Guarded<&at::native::copy_sparse_>::run);
  m.impl("copy_", fake::Guarded<&at::native::copy_sparse_wrapper_>::run);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
}
