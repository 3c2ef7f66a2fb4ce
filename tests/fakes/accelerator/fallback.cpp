// The kernel of every operator that has none in kernels.cpp: it lends.
//
// The device's memory is host memory, so the CPU's kernel can work on the same bytes, as CPU tensors.  Before, the
// devices of all arguments are looked at; after, the results are taken back.
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "fake.h"

namespace fake {
namespace {

template <typename T>
using Maybe = std::optional<T>;

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

}  // namespace

at::Tensor on_cpu(const at::Tensor& ours) {
  if (!is_ours(ours)) return ours;
  const auto options = ours.options().device(at::kCPU);
  if (ours.is_sparse()) {
    return at::_sparse_coo_tensor_unsafe(on_cpu(ours._indices()), on_cpu(ours._values()), ours.sizes(), options,
                                         ours.is_coalesced());
  }
  if (ours.numel() == 0) return at::empty(ours.sizes(), options);  // may be an output that the kernel gives its size
  const at::Tensor cpu = at::from_blob(ours.data_ptr(), ours.sizes(), ours.strides(), [ours](void*) {}, options);
  cpu._set_conj(ours.is_conj());
  cpu._set_neg(ours.is_neg());
  return cpu;
}

at::Tensor on_device(const at::Tensor& cpu, c10::Device device) {
  if (!cpu.defined() || !cpu.is_cpu()) return cpu;
  const auto options = cpu.options().device(device);
  if (cpu.is_sparse()) {
    return at::_sparse_coo_tensor_unsafe(on_device(cpu._indices(), device), on_device(cpu._values(), device),
                                         cpu.sizes(), options, cpu.is_coalesced());
  }
  return at::for_blob(cpu.data_ptr(), cpu.sizes())
      .strides(cpu.strides())
      .context(new at::Tensor(cpu), [](void* held) { delete static_cast<at::Tensor*>(held); })
      .target_device(device)
      .options(options)
      .make_tensor();
}

namespace {

// One call of an operator: its arguments become CPU tensors, its results ours.
class Call {
 public:
  explicit Call(const c10::FunctionSchema& schema) : schema_(schema) {
    for (const auto& result : schema.returns()) {
      const bool view = result.alias_info() && !result.alias_info()->isWrite();
      TORCH_CHECK(!view, schema.name(), " makes a view and needs a kernel of its own");
    }
  }

  void lend(c10::IValue& argument) {
    if (argument.isDevice() && argument.toDevice().type() == kType) {
      asked_ = argument.toDevice();
      argument = c10::Device(c10::kCPU);
    }
    each_tensor(argument, [this](const at::Tensor& tensor) { return lend(tensor); });
  }

  // Where the operator draws random numbers: from its device's generator, as on any accelerator.
  void lend_generator(const c10::Argument& formal, c10::IValue& argument) {
    if (formal.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      argument = cpu_generator(argument.toOptional<at::Generator>(), home().index());
    }
  }

  void take_back(c10::IValue& result) {
    each_tensor(result, [this](const at::Tensor& tensor) { return take_back(tensor); });
  }

  c10::DispatchKeySet keys() const {
    const c10::DispatchKeySet dense(c10::DispatchKey::CPU);
    return sparse_ ? dense | c10::DispatchKeySet(c10::DispatchKey::SparseCPU) : dense;
  }

 private:
  c10::Device home() const { return asked_ ? meant(asked_) : meant(seen_); }

  template <typename Function>
  static void each_tensor(c10::IValue& value, const Function& change) {
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> changed;
      for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
      value = std::move(changed);
    } else if (value.isOptionalTensorList()) {
      c10::List<Maybe<at::Tensor>> changed;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        changed.push_back(tensor ? Maybe<at::Tensor>(change(*tensor)) : std::nullopt);
      }
      value = std::move(changed);
    }
  }

  at::Tensor lend(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      // As on any accelerator, a number may come from the CPU, and so may the rows to pick.
      const bool picks = schema_.name().find("index") != std::string::npos;
      TORCH_CHECK(tensor.dim() == 0 || picks, "Expected all tensors to be on the same device, but found one on ",
                  tensor.device(), " in ", schema_.name());
      return tensor;
    }
    TORCH_CHECK(!seen_ || *seen_ == tensor.device(), "Expected all tensors to be on the same device, but found ",
                *seen_, " and ", tensor.device(), " in ", schema_.name());
    seen_ = tensor.device();
    sparse_ = sparse_ || tensor.is_sparse();
    return lent_.emplace_back(tensor, on_cpu(tensor)).second;
  }

  at::Tensor take_back(const at::Tensor& result) const {
    for (const auto& [ours, cpu] : lent_) {
      if (!cpu.is_same(result)) continue;
      if (cpu.is_sparse()) {  // an in-place operator gave it other indices and values
        auto* sparse = static_cast<at::SparseTensorImpl*>(ours.unsafeGetTensorImpl());
        sparse->set_indices_and_values_unsafe(on_device(cpu._indices(), ours.device()),
                                              on_device(cpu._values(), ours.device()));
        sparse->set_coalesced(cpu.is_coalesced());
      } else if (ours.sizes() != cpu.sizes()) {  // an output that the kernel gave its size
        ours.unsafeGetTensorImpl()->set_storage_keep_dtype(on_device(cpu, ours.device()).storage());
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), 0);
      }
      return ours;
    }
    return on_device(result, home());
  }

  const c10::FunctionSchema& schema_;
  Maybe<c10::Device> asked_, seen_;
  bool sparse_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> lent_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(schema);
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) call.lend((*stack)[first + i]);
  for (size_t i = 0; i < arguments.size(); ++i) call.lend_generator(schema.arguments()[i], (*stack)[first + i]);
  op.redispatchBoxed(call.keys(), stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) call.take_back((*stack)[i]);
}

}  // namespace
}  // namespace fake

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::run_on_cpu>()); }
// Composed of views otherwise, which ask for memory in order where no device's own kernel does.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fake::run_on_cpu>());
  m.impl("native_group_norm_backward", torch::CppFunction::makeFromBoxedFunction<&fake::run_on_cpu>());
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::run_on_cpu>());
}
