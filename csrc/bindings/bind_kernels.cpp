// The kernels, over pointers.  Python checks shapes and devices, this file alignment, and each backend the dtypes.
#include <optional>

#include "backends.h"
#include "bindings/bindings.h"
#include "core/error.h"

namespace mgpu::bindings {
namespace {

// Many tensors of one dtype, which lie end to end in a flat one; those without elements are left out.
struct Pieces {
  DType dtype;
  std::vector<Piece> all;
  int64_t count = 0;  // of their elements
};

// One loop over two lists of numbers: pybind11's own conversions would cost as much as all other work per tensor.
Pieces pieces_from(const py::list& pointers, const py::list& counts, const std::string& dtype) {
  require(pointers.size() == counts.size(), "each tensor has a pointer and a count");
  Pieces made{dtype_from(dtype), {}};
  made.all.reserve(pointers.size());
  for (size_t i = 0; i < pointers.size(); ++i) {
    void* pointer = PyLong_AsVoidPtr(PyList_GET_ITEM(pointers.ptr(), static_cast<Py_ssize_t>(i)));
    const int64_t count = PyLong_AsLongLong(PyList_GET_ITEM(counts.ptr(), static_cast<Py_ssize_t>(i)));
    if (count) made.all.push_back({pointer, made.count, count});
    made.count += count;
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  return made;
}

// Checked where they are used: only then it is certain that a kernel reads them.
const std::vector<Piece>& checked(const Pieces& pieces) {
  for (const Piece& each : pieces.all) pointer_of(reinterpret_cast<Pointer>(each.pointer), itemsize(pieces.dtype));
  return pieces.all;
}

std::pair<Pointer, Pointer> extent_of(const Pieces& pieces, const Piece& piece) {
  const auto begin = reinterpret_cast<Pointer>(piece.pointer);
  return {begin, begin + static_cast<Pointer>(piece.count) * itemsize(pieces.dtype)};
}

// Returns whether a tensor has an address in common with these bytes.
bool touches(const Pieces& pieces, Pointer begin, Pointer nbytes) {
  return std::any_of(pieces.all.begin(), pieces.all.end(), [&](const Piece& each) {
    const auto [first, last] = extent_of(pieces, each);
    return first < begin + nbytes && begin < last;
  });
}

// Returns whether no two tensors have an address in common.
bool are_apart(const Pieces& pieces) {
  std::vector<std::pair<Pointer, Pointer>> extents;
  for (const Piece& each : pieces.all) extents.push_back(extent_of(pieces, each));
  std::sort(extents.begin(), extents.end());
  for (size_t i = 1; i < extents.size(); ++i)
    if (extents[i].first < extents[i - 1].second) return false;
  return true;
}

template <class T>
T* pointer_to(Pointer pointer) {
  return static_cast<T*>(pointer_of(pointer, sizeof(T)));
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

Packing packing_of(const Pieces& pieces, Pointer flat, const std::string& flat_dtype, double scale) {
  const DType wanted = dtype_from(flat_dtype);
  return {checked(pieces), pieces.dtype, pointer_of(flat, itemsize(wanted)), wanted, scale};
}

void bind_pack(const Pieces& pieces, Pointer flat, const std::string& flat_dtype, double scale, const Stream& stream) {
  const Packing call = packing_of(pieces, flat, flat_dtype, scale);
  without_gil([&] { device_ops_of(stream).pack(call, stream); });
}

void bind_unpack(const Pieces& pieces, Pointer flat, const std::string& flat_dtype, double scale,
                 const Stream& stream) {
  const Packing call = packing_of(pieces, flat, flat_dtype, scale);
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

void bind_l2_norm(const Pieces& pieces, Pointer partials, Pointer out, const std::string& out_dtype,
                  const Stream& stream) {
  const DType wide = dtype_from(out_dtype);
  const L2Norm call{checked(pieces), pieces.dtype, pointer_to<double>(partials), pointer_of(out, itemsize(wide)), wide};
  without_gil([&] { device_ops_of(stream).l2_norm(call, stream); });
}

// The gradients of the segments, each in memory of its own; empty: they lie in the flat buffer, or where a table of the
// device says.
std::vector<const void*> addresses_of(const std::optional<Pointers>& gradients, const FlatBuffer& flat,
                                      const Stream& stream) {
  std::vector<const void*> addresses;
  if (!gradients || !stream.on_host()) return addresses;
  require(static_cast<int64_t>(gradients->size()) == flat.segment_count,
          "each segment needs the address of its gradient");
  for (Pointer pointer : *gradients) addresses.push_back(pointer_of(pointer, itemsize(flat.dtype)));
  return addresses;
}

// Calls step(flat), where `flat` knows the gradients that lie in memory of their own.
template <class Step>
void with_gradients(FlatBuffer flat, const std::optional<Pointers>& gradients, const Stream& stream, Step&& step) {
  const auto addresses = addresses_of(gradients, flat, stream);
  if (!gradients) flat.gradient_of = nullptr;
  if (gradients && stream.on_host()) flat.gradient_of = addresses.data();
  require(!gradients || flat.gradient_of || !flat.segment_count, "the device has no table of gradients");
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
                       Pointer found_inf, Pointer gradient_table) {
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
          pointer_to<const float>(found_inf),
          pointer_to<const void*>(gradient_table)};
}

void bind_optimizers(py::module_& m) {
  m.def(
      "optimizer_constants", [] { return kOptimizerConstants; },
      "Return how many float64 numbers a device keeps per segment during a step.");
  py::class_<FlatBuffer>(m, "FlatBuffer", "Addresses and tables of an optimizer's step: csrc/core/kernel_calls.h.")
      .def(py::init(&flat_buffer), py::kw_only(), py::arg("parameters"), py::arg("gradients"), py::arg("count"),
           py::arg("dtype"), py::arg("segments"), py::arg("segment_count"), py::arg("constants"), py::arg("groups"),
           py::arg("group_count"), py::arg("clip"), py::arg("found_inf"), py::arg("gradient_table"));
  m.def("sgd", &bind_sgd, py::arg("flat"), py::arg("gradients"), py::arg("momentum"), py::arg("stream"),
        "Make one step of SGD.  An address of 0: not there.  Gradients: None where they lie in the flat buffer; on the "
        "CPU the address of each segment's; on a device any list where its table has them.");
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
  py::class_<Pieces>(m, "Pieces", "Many tensors of one dtype, which lie end to end in a flat one.")
      .def(py::init(&pieces_from), py::arg("pointers"), py::arg("counts"), py::arg("dtype"))
      .def_readonly("count", &Pieces::count, "Their elements together.")
      .def("touches", &touches, py::arg("begin"), py::arg("nbytes"),
           "Return whether a tensor has an address in common with these bytes.")
      .def("are_apart", &are_apart, "Return whether no two tensors have an address in common.");
  m.def("pack", &bind_pack, py::arg("pieces"), py::arg("flat"), py::arg("flat_dtype"), py::arg("scale"),
        py::arg("stream"), "flat[begin + i] = piece[i] * scale.");
  m.def("unpack", &bind_unpack, py::arg("pieces"), py::arg("flat"), py::arg("flat_dtype"), py::arg("scale"),
        py::arg("stream"), "Compute the inverse of pack: piece[i] = flat[begin + i] * scale.");
  m.def("sum_ranks", &bind_sum_ranks, py::arg("in_"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op"),
        py::arg("stream"), "All outputs get in_[0] op in_[1] op ...");
  m.def("scale_cast", &bind_scale_cast, py::arg("in_"), py::arg("in_dtype"), py::arg("out"), py::arg("out_dtype"),
        py::arg("count"), py::arg("scale"), py::arg("stream"), "out[i] = in_[i] * scale.");
  m.def(
      "norm_tiles", [](const Pieces& pieces) { return norm_tiles(pieces.all); }, py::arg("pieces"),
      "Return how many partial sums, float64, l2_norm needs room for.");
  m.def("l2_norm", &bind_l2_norm, py::arg("pieces"), py::arg("partials"), py::arg("out"), py::arg("out_dtype"),
        py::arg("stream"),
        "Compute the root of the sum of all squares.  partials: norm_tiles of them, at least one, and a zero.");
  bind_optimizers(m);
}

}  // namespace mgpu::bindings
