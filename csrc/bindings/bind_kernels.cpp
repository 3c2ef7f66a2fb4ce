// The kernels, over pointers.  Python checks shapes and devices, this file alignment, and each backend the dtypes.
#include <variant>

#include "backends.h"
#include "bindings/bindings.h"
#include "core/error.h"

namespace mgpu::bindings {
namespace {

using PieceTuples = std::vector<std::tuple<Pointer, int64_t, int64_t>>;  // pointer, begin, count
// A flat buffer, or on the CPU the tensor of each segment.
using Gradients = std::variant<Pointer, Pointers>;
// parameters, gradients, count, dtype, segments, how many, constants, groups, how many, clip, loss_scale, found_inf
using FlatTuple = std::tuple<Pointer, Gradients, int64_t, std::string, Pointer, int64_t, Pointer, Pointer, int64_t,
                             Pointer, Pointer, Pointer>;

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
                      float scale, float shift, Pointer out, const std::string& out_dtype, const StreamTuple& stream) {
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
  const Stream on = stream_of(stream);
  without_gil([&] { device_ops_of(on).gather_rows(call, on); });
}

Packing packing_of(const PieceTuples& pieces, const std::string& dtype, Pointer flat, const std::string& flat_dtype,
                   double scale) {
  const DType own = dtype_from(dtype), wanted = dtype_from(flat_dtype);
  return {pieces_of(pieces, own), own, pointer_of(flat, itemsize(wanted)), wanted, scale};
}

void bind_pack(const PieceTuples& pieces, const std::string& dtype, Pointer flat, const std::string& flat_dtype,
               double scale, const StreamTuple& stream) {
  const Packing call = packing_of(pieces, dtype, flat, flat_dtype, scale);
  const Stream on = stream_of(stream);
  without_gil([&] { device_ops_of(on).pack(call, on); });
}

void bind_unpack(const PieceTuples& pieces, const std::string& dtype, Pointer flat, const std::string& flat_dtype,
                 double scale, const StreamTuple& stream) {
  const Packing call = packing_of(pieces, dtype, flat, flat_dtype, scale);
  const Stream on = stream_of(stream);
  without_gil([&] { device_ops_of(on).unpack(call, on); });
}

void bind_sum_ranks(const Pointers& in, const Pointers& out, int64_t count, const std::string& dtype,
                    const std::string& op, const StreamTuple& stream) {
  require(!in.empty() && !out.empty(), "sum_ranks needs at least one input and one output");
  const ReduceOp kind = reduce_op_from(op);
  SumRanks call{{}, {}, count, dtype_from(dtype), kind, kind == ReduceOp::avg ? static_cast<int>(in.size()) : 1};
  for (Pointer pointer : in) call.in.push_back(pointer_of(pointer, itemsize(call.dtype)));
  for (Pointer pointer : out) call.out.push_back(pointer_of(pointer, itemsize(call.dtype)));
  const Stream on = stream_of(stream);
  without_gil([&] { device_ops_of(on).sum_ranks({call}, on); });
}

void bind_scale_cast(Pointer in, const std::string& in_dtype, Pointer out, const std::string& out_dtype, int64_t count,
                     double scale, const StreamTuple& stream) {
  const DType from = dtype_from(in_dtype), to = dtype_from(out_dtype);
  const ScaleCast call{pointer_of(in, itemsize(from)), from, pointer_of(out, itemsize(to)), to, count, scale};
  const Stream on = stream_of(stream);
  without_gil([&] { device_ops_of(on).scale_cast(call, on); });
}

void bind_l2_norm(const PieceTuples& pieces, const std::string& dtype, Pointer partials, Pointer out,
                  const std::string& out_dtype, const StreamTuple& stream) {
  const DType own = dtype_from(dtype), wide = dtype_from(out_dtype);
  const L2Norm call{pieces_of(pieces, own), own, pointer_to<double>(partials), pointer_of(out, itemsize(wide)), wide};
  const Stream on = stream_of(stream);
  without_gil([&] { device_ops_of(on).l2_norm(call, on); });
}

// `each` gets the gradients that lie in memory of their own, and must live as long as what is returned.
FlatParameters flat_of(const FlatTuple& tuple, const Stream& on, std::vector<const void*>& each) {
  const auto& [parameters, gradients, count, dtype, segments, segment_count, constants, groups, group_count, clip,
               loss_scale, found_inf] = tuple;
  const DType own = dtype_from(dtype);
  const auto* flat = std::get_if<Pointer>(&gradients);
  if (!flat) {
    for (Pointer pointer : std::get<Pointers>(gradients)) each.push_back(pointer_of(pointer, itemsize(own)));
    require(on.device == kHost, "gradients in memory of their own are for the CPU");
    require(static_cast<int64_t>(each.size()) == segment_count, "each segment needs the address of its gradient");
  }
  return {pointer_of(parameters, itemsize(own)),
          flat ? pointer_of(*flat, itemsize(own)) : nullptr,
          count,
          own,
          pointer_to<int64_t>(segments),
          segment_count,
          pointer_to<double>(constants),
          pointer_to<const double>(groups),
          group_count,
          pointer_to<const double>(clip),
          pointer_to<const float>(loss_scale),
          pointer_to<const float>(found_inf),
          flat ? nullptr : each.data()};
}

void bind_sgd(const FlatTuple& flat, Pointer momentum, const StreamTuple& stream) {
  const Stream on = stream_of(stream);
  std::vector<const void*> gradients;
  const FlatParameters parameters = flat_of(flat, on, gradients);
  const Sgd call{parameters, pointer_of(momentum, itemsize(parameters.dtype))};
  without_gil([&] { device_ops_of(on).sgd(call, on); });
}

void bind_adam(const FlatTuple& flat, Pointer exp_avg, Pointer exp_avg_sq, Pointer max_exp_avg_sq, bool decoupled,
               const StreamTuple& stream) {
  const Stream on = stream_of(stream);
  std::vector<const void*> gradients;
  const FlatParameters parameters = flat_of(flat, on, gradients);
  const auto state = [&](Pointer pointer) { return pointer_of(pointer, itemsize(parameters.dtype)); };
  const Adam call{parameters, state(exp_avg), state(exp_avg_sq), state(max_exp_avg_sq), decoupled};
  without_gil([&] { device_ops_of(on).adam(call, on); });
}

void bind_lion(const FlatTuple& flat, Pointer exp_avg, const StreamTuple& stream) {
  const Stream on = stream_of(stream);
  std::vector<const void*> gradients;
  const FlatParameters parameters = flat_of(flat, on, gradients);
  const Lion call{parameters, pointer_of(exp_avg, itemsize(parameters.dtype))};
  without_gil([&] { device_ops_of(on).lion(call, on); });
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
        py::arg("scale"), py::arg("stream"), "The way back: piece[i] = flat[begin + i] * scale.");
  m.def("sum_ranks", &bind_sum_ranks, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op"),
        py::arg("stream"), "All outputs get in_[0] op in_[1] op ...");
  m.def("scale_cast", &bind_scale_cast, py::arg("in_"), py::arg("in_dtype"), py::arg("out"), py::arg("out_dtype"),
        py::arg("count"), py::arg("scale"), py::arg("stream"), "out[i] = in_[i] * scale.");
  m.def(
      "norm_tiles", [](const PieceTuples& pieces) { return norm_tiles(pieces_of(pieces, DType::u8)); },
      py::arg("pieces"), "How many partial sums, float64, l2_norm needs room for.");
  m.def("l2_norm", &bind_l2_norm, py::arg("pieces"), py::arg("dtype"), py::arg("partials"), py::arg("out"),
        py::arg("out_dtype"), py::arg("stream"), "The root of the sum of all squares.");
  m.def(
      "optimizer_constants", [] { return kOptimizerConstants; },
      "Numbers, float64, that a device keeps per segment during a step.");
  m.def(
      "sgd", &bind_sgd, py::arg("flat"), py::arg("momentum"), py::arg("stream"),
      "One step; see csrc/core/kernel_calls.h for the tables.  A pointer of 0: not there.  Gradients: flat, or on the "
      "CPU a list with the address of each segment's.");
  m.def("adam", &bind_adam, py::arg("flat"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("max_exp_avg_sq"),
        py::arg("decoupled"), py::arg("stream"), "One step of Adam, or of AdamW where the decay is decoupled.");
  m.def("lion", &bind_lion, py::arg("flat"), py::arg("exp_avg"), py::arg("stream"), "One step of Lion.");
}

}  // namespace mgpu::bindings
