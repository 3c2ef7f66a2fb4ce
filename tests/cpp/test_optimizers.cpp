// The CPU's optimizers where each segment's gradient lies in memory of its own: the bits that a flat buffer gives.
#include <cstring>
#include <functional>
#include <random>

#include "backends/cpu/cpu.h"
#include "check.h"
#include "core/error.h"

using namespace mgpu;

using Bytes = std::vector<unsigned char>;
constexpr DType kFloating[] = {DType::f16, DType::bf16, DType::f32, DType::f64};
constexpr int64_t kGap = 3;  // elements between two segments

static DeviceOps& host() { return cpu::device_ops(); }

static Bytes normal(int64_t count, DType dtype, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> next;
  std::vector<float> wide(count);
  for (float& each : wide) each = next(generator);
  Bytes bytes(count * itemsize(dtype));
  host().scale_cast({wide.data(), DType::f32, bytes.data(), dtype, count, 1.0}, {});
  return bytes;
}

// Parameters, state and tables; the third segment is not active, and the last one is of no group.
struct Training {
  Training(DType dtype, const std::vector<int64_t>& counts) : dtype(dtype) {
    for (size_t i = 0; i < counts.size(); ++i) {
      const int64_t group = i + 1 == counts.size() ? -1 : static_cast<int64_t>(i % 2);
      for (int64_t each : {count, counts[i], group, int64_t{0}, int64_t{i != 2}}) segments.push_back(each);
      count += counts[i] + kGap;
    }
    parameters = normal(count, dtype, 1);
    states.assign(3, Bytes(parameters.size()));
  }

  int64_t rows() const { return static_cast<int64_t>(segments.size()) / kSegmentColumns; }
  int64_t* row(int64_t i) { return segments.data() + i * kSegmentColumns; }
  bool takes_part(int64_t i) { return row(i)[kActive] && row(i)[kGroup] >= 0; }

  FlatBuffer over(const void* flat, const std::vector<const void*>& each) {
    return {parameters.data(), flat,          count, dtype, segments.data(), rows(),
            nullptr,           groups.data(), 2,     &clip, nullptr,         each.empty() ? nullptr : each.data()};
  }

  bool operator==(const Training& other) const {
    return parameters == other.parameters && states == other.states && segments == other.segments;
  }

  DType dtype;
  int64_t count = 0;
  Bytes parameters;
  std::vector<Bytes> states;
  std::vector<int64_t> segments;
  std::vector<double> groups;
  double clip = 0.1875;
};

struct Case {
  std::vector<double> groups;
  std::function<void(Training&, const FlatBuffer&)> step;
};

static const std::vector<Case> kCases = {
    {{0.5, 0, 0, 0.125, 0, 0, 0.25, 0, 0, 0, 0, 1},
     [](Training&, const FlatBuffer& flat) { host().sgd({flat, nullptr}, {}); }},
    {{0.5, 0.9, 0.5, 0, 0, 0, 0.25, 0.5, 0, 0.125, 1, 1},
     [](Training& t, const FlatBuffer& flat) { host().sgd({flat, t.states[0].data()}, {}); }},
    {{0.5, 0.9, 0.999, 1e-8, 0.125, 0, 0.25, 0.5, 0.75, 1e-6, 0, 1},
     [](Training& t, const FlatBuffer& flat) {
       host().adam({flat, t.states[0].data(), t.states[1].data(), nullptr, false}, {});
     }},
    {{0.5, 0.9, 0.999, 1e-8, 0.125, 0, 0.25, 0.5, 0.75, 1e-6, 0, 1},
     [](Training& t, const FlatBuffer& flat) {
       host().adam({flat, t.states[0].data(), t.states[1].data(), t.states[2].data(), true}, {});
     }},
    {{0.5, 0.5, 0.75, 0, 0, 0, 0.25, 0.5, 0.5, 0.5, 1, 0},
     [](Training& t, const FlatBuffer& flat) { host().lion({flat, t.states[0].data()}, {}); }},
};

// Gradients of the segments that take part, each in an allocation of its own behind `offset` elements; else null.
struct OwnGradients {
  OwnGradients(Training& training, const Bytes& flat, int64_t offset) {
    const size_t size = itemsize(training.dtype);
    for (int64_t i = 0; i < training.rows(); ++i) {
      const int64_t* row = training.row(i);
      const unsigned char* from = flat.data() + row[kBegin] * size;
      memory.emplace_back((offset + row[kCount]) * size);
      if (row[kCount]) std::memcpy(memory[i].data() + offset * size, from, row[kCount] * size);
      pointers.push_back(training.takes_part(i) && row[kCount] ? memory[i].data() + offset * size : nullptr);
    }
  }
  std::vector<Bytes> memory;
  std::vector<const void*> pointers;
};

static void same_bits(DType dtype, int64_t offset, const std::vector<int64_t>& counts) {
  for (const Case& each : kCases) {
    Training flat(dtype, counts), own(dtype, counts);
    flat.groups = own.groups = each.groups;
    for (unsigned step = 0; step < 3; ++step) {
      const Bytes gradients = normal(flat.count, dtype, 10 + step), before = own.parameters;
      each.step(flat, flat.over(gradients.data(), {}));
      each.step(own, own.over(nullptr, OwnGradients(own, gradients, offset).pointers));
      CHECK(own == flat);
      CHECK(own.parameters != before);
    }
    for (int64_t i = 0; i < own.rows(); ++i) CHECK(own.row(i)[kStep] == (own.takes_part(i) ? 3 : 0));
  }
}

static void a_missing_gradient_changes_nothing() {
  for (const Case& each : kCases) {
    Training training(DType::f32, {5, 0, 64, 7, 9});
    training.groups = each.groups;
    const Training before = training;
    OwnGradients own(training, normal(training.count, DType::f32, 10), 0);
    own.pointers[3] = nullptr;
    CHECK_THROWS(InvalidArgument, "an active segment has no gradient",
                 (each.step(training, training.over(nullptr, own.pointers)), 0));
    CHECK(training == before);
  }
}

int main() {
  for (DType dtype : kFloating)
    for (int64_t offset : {0, 1}) same_bits(dtype, offset, {5, 0, 64, 1, 301, 7, 33});
  cpu::set_num_threads(3);
  same_bits(DType::f32, 1, {700'001, 0, 64, 1, 31, 200'003, 33});  // shared by threads
  a_missing_gradient_changes_nothing();
  return passed();
}
