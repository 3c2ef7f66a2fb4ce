// The kernels, over pointers.  Python checks shapes and devices, this file alignment, and each backend the dtypes.
#include <optional>

#include "backends.h"
#include "bindings/bindings.h"
#include "core/error.h"

namespace mgpu::bindings {
namespace {

using PieceTuples = std::vector<std::tuple<Pointer, int64_t, int64_t>>;  // pointer, begin, count

template <class T>
T* pointer_to(Pointer pointer) {
  return static_cast<T*>(pointer_of(pointer, sizeof(T)));
}

std::vector<Piece> pieces_of(const PieceTuples& tuples, DType dtype) {
  std::vector<Piece> pieces;
  for (const auto& [pointer, begin, count] : tuples)
    if (count) pieces.push_back({pointer_of(pointer, itemsize(dtype)), begin, count});
  return pieces;
}

void bind_gather_rows(const std::tuple<Pointer, int64_t, int64_t>& rows, const std::pair<Pointer, int64_t>& index,
                      float scale, float shift, Pointer out, const std::string& out_dtype, const Stream& stream) {
  const DType dtype = dtype_from(out_dtype);
  const auto& [rows_pointer, rows_count, row_count] = rows;
  const GatherRows call{pointer_to<const uint8_t>(rows_pointer),
                        rows_count,
                        row_count,
                        pointer_to<const int64_t>(index.first),
                        index.second,
                        scale,
                        shift,
                        pointer_of(out, itemsize(dtype)),
                        dtype};
  without_gil([&] { device_ops_of(stream).gather_rows(call, stream); });
}

Packing packing_of(const PieceTuples& pieces, const std::string& dtype, Pointer flat, const std::string& flat_dtype,
                   double scale) {
  const DType own = dtype_from(dtype), wanted = dtype_from(flat_dtype);
  return {pieces_of(pieces, own), own, pointer_of(flat, itemsize(wanted)), wanted, scale};
}

void bind_pack(const PieceTuples& pieces, const std::string& dtype, Pointer flat, const std::string& flat_dtype,
               double scale, const Stream& stream) {
  const Packing call = packing_of(pieces, dtype, flat, flat_dtype, scale);
  without_gil([&] { device_ops_of(stream).pack(call, stream); });
}

void bind_unpack(const PieceTuples& pieces, const std::string& dtype, Pointer flat, const std::string& flat_dtype,
                 double scale, const Stream& stream) {
  const Packing call = packing_of(pieces, dtype, flat, flat_dtype, scale);
  without_gil([&] { device_ops_of(stream).unpack(call, stream); });
}

void bind_sum_ranks(const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype,
                    const std::string& op, const Stream& stream) {
  require(!in.empty() && !out.empty(), "sum_ranks needs at least one input and one output");
  const ReduceOp kind = reduce_op_from(op);
  SumRanks call{{}, {}, count, dtype_from(dtype), kind, kind == ReduceOp::avg ? static_cast<int>(in.size()) : 1};
  for (Pointer pointer : in) call.in.push_back(pointer_of(pointer, itemsize(call.dtype)));
  for (Pointer pointer : out) call.out.push_back(pointer_of(pointer, itemsize(call.dtype)));
  without_gil([&] { device_ops_of(stream).sum_ranks({call}, stream); });
}

void bind_scale_cast(Pointer in, const std::string& in_dtype, Pointer out, const std::string& out_dtype, int64_t count,
                     double scale, const Stream& stream) {
  const DType from = dtype_from(in_dtype), to = dtype_from(out_dtype);
  const ScaleCast call{pointer_of(in, itemsize(from)), from, pointer_of(out, itemsize(to)), to, count, scale};
  without_gil([&] { device_ops_of(stream).scale_cast(call, stream); });
}

void bind_l2_norm(const PieceTuples& pieces, const std::string& dtype, Pointer partials, Pointer out,
                  const std::string& out_dtype, const Stream& stream) {
  const DType own = dtype_from(dtype), wide = dtype_from(out_dtype);
  const L2Norm call{pieces_of(pieces, own), own, pointer_to<double>(partials), pointer_of(out, itemsize(wide)), wide};
  without_gil([&] { device_ops_of(stream).l2_norm(call, stream); });
}

// The gradients of the segments, each in memory of its own; empty: they lie in the flat buffer.
std::vector<const void*> addresses_of(const std::optional<Pointers>& gradients, const FlatBuffer& flat,
                                      const Stream& stream) {
  std::vector<const void*> addresses;
  if (!gradients) return addresses;
  require(stream.on_host(), "gradients in memory of their own are for the CPU");
  require(static_cast<int64_t>(gradients->size()) == flat.segment_count,
          "each segment needs the address of its gradient");
  for (Pointer pointer : *gradients) addresses.push_back(pointer_of(pointer, itemsize(flat.dtype)));
  return addresses;
}

// Calls step(flat), where `flat` knows the gradients that lie in memory of their own.
template <class Step>
void with_gradients(FlatBuffer flat, const std::optional<Pointers>& gradients, const Stream& stream, Step&& step) {
  const auto addresses = addresses_of(gradients, flat, stream);
  if (gradients) flat.gradient_of = addresses.data();
  without_gil([&] { step(flat); });
}

void bind_sgd(const FlatBuffer& flat, const std::optional<Pointers>& gradients, Pointer momentum,
              const Stream& stream) {
  with_gradients(flat, gradients, stream, [&](const FlatBuffer& buffer) {
    device_ops_of(stream).sgd({buffer, pointer_of(momentum, itemsize(flat.dtype))}, stream);
  });
}

void bind_adam(const FlatBuffer& flat, const std::optional<Pointers>& gradients, Pointer exp_avg, Pointer exp_avg_sq,
               Pointer max_exp_avg_sq, bool decoupled, const Stream& stream) {
  const size_t size = itemsize(flat.dtype);
  with_gradients(flat, gradients, stream, [&](const FlatBuffer& buffer) {
    const Adam call{buffer, pointer_of(exp_avg, size), pointer_of(exp_avg_sq, size), pointer_of(max_exp_avg_sq, size),
                    decoupled};
    device_ops_of(stream).adam(call, stream);
  });
}

void bind_lion(const FlatBuffer& flat, const std::optional<Pointers>& gradients, Pointer exp_avg,
               const Stream& stream) {
  with_gradients(flat, gradients, stream, [&](const FlatBuffer& buffer) {
    device_ops_of(stream).lion({buffer, pointer_of(exp_avg, itemsize(flat.dtype))}, stream);
  });
}

FlatBuffer flat_buffer(Pointer parameters, Pointer gradients, int64_t count, const std::string& dtype, Pointer segments,
                       int64_t segment_count, Pointer constants, Pointer groups, int64_t group_count, Pointer clip,
                       Pointer found_inf) {
  const DType own = dtype_from(dtype);
  return {pointer_of(parameters, itemsize(own)),
          pointer_of(gradients, itemsize(own)),
          count,
          own,
          pointer_to<int64_t>(segments),
          segment_count,
          pointer_to<double>(constants),
          pointer_to<const double>(groups),
          group_count,
          pointer_to<const double>(clip),
          pointer_to<const float>(found_inf)};
}

void bind_optimizers(py::module_& m) {
  m.def(
      "optimizer_constants", [] { return kOptimizerConstants; },
      "Return how many float64 numbers a device keeps per segment during a step.");
  py::class_<FlatBuffer>(m, "FlatBuffer", "Addresses and tables of an optimizer's step: csrc/core/kernel_calls.h.")
      .def(py::init(&flat_buffer), py::kw_only(), py::arg("parameters"), py::arg("gradients"), py::arg("count"),
           py::arg("dtype"), py::arg("segments"), py::arg("segment_count"), py::arg("constants"), py::arg("groups"),
           py::arg("group_count"), py::arg("clip"), py::arg("found_inf"));
  m.def("sgd", &bind_sgd, py::arg("flat"), py::arg("gradients"), py::arg("momentum"), py::arg("stream"),
        "Make one step of SGD.  An address of 0: not there.  Gradients: None where they lie in the flat buffer, or on "
        "the CPU the address of each segment's.");
  m.def("adam", &bind_adam, py::arg("flat"), py::arg("gradients"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
        py::arg("max_exp_avg_sq"), py::arg("decoupled"), py::arg("stream"),
        "Make one step of Adam, or of AdamW where the decay is decoupled.");
  m.def("lion", &bind_lion, py::arg("flat"), py::arg("gradients"), py::arg("exp_avg"), py::arg("stream"),
        "Make one step of Lion.");
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("gather_rows", &bind_gather_rows, py::arg("rows"), py::arg("index"), py::arg("scale"), py::arg("shift"),
        py::arg("out"), py::arg("out_dtype"), py::arg("stream"),
        "out[i] = rows[index[i]] * scale + shift; rows: (pointer, how many, elements of one), uint8; index: (pointer, "
        "count), int64.");
  m.def("pack", &bind_pack, py::arg("pieces"), py::arg("dtype"), py::arg("flat"), py::arg("flat_dtype"),
        py::arg("scale"), py::arg("stream"), "flat[begin + i] = piece[i] * scale; pieces: (pointer, begin, count).");
  m.def("unpack", &bind_unpack, py::arg("pieces"), py::arg("dtype"), py::arg("flat"), py::arg("flat_dtype"),
        py::arg("scale"), py::arg("stream"), "Compute the inverse of pack: piece[i] = flat[begin + i] * scale.");
  m.def("sum_ranks", &bind_sum_ranks, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op"),
        py::arg("stream"), "All outputs get in_[0] op in_[1] op ...");
  m.def("scale_cast", &bind_scale_cast, py::arg("in_"), py::arg("in_dtype"), py::arg("out"), py::arg("out_dtype"),
        py::arg("count"), py::arg("scale"), py::arg("stream"), "out[i] = in_[i] * scale.");
  m.def(
      "norm_tiles", [](const PieceTuples& pieces) { return norm_tiles(pieces_of(pieces, DType::u8)); },
      py::arg("pieces"), "Return how many partial sums, float64, l2_norm needs room for.");
  m.def("l2_norm", &bind_l2_norm, py::arg("pieces"), py::arg("dtype"), py::arg("partials"), py::arg("out"),
        py::arg("out_dtype"), py::arg("stream"), "Compute the root of the sum of all squares.");
  bind_optimizers(m);
}

}  // namespace mgpu::bindings
