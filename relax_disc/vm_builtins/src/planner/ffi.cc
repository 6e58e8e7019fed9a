// The planners as global functions over byte strings of int64 numbers; see planner_codec.py.
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <cstring>
#include <initializer_list>
#include <vector>

#include "planner/planner.h"

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

// Reads numbers off a byte string.
class Reader {
 public:
  explicit Reader(const ffi::Bytes& bytes) : numbers_(bytes.size() / sizeof(int64_t)) {
    std::memcpy(numbers_.data(), bytes.data(), numbers_.size() * sizeof(int64_t));
  }

  int64_t Next() {
    if (at_ >= numbers_.size()) {
      TVM_FFI_THROW(ValueError) << "a planner was given " << numbers_.size() << " numbers, too few";
    }
    return numbers_[at_++];
  }

  template <typename T>
  void List(int64_t count, std::vector<T>* list) {
    for (int64_t i = 0; i < count; ++i) list->push_back(static_cast<T>(Next()));
  }

 private:
  std::vector<int64_t> numbers_;
  std::size_t at_ = 0;
};

PlannerGraph ReadGraph(const ffi::Bytes& bytes) {
  Reader reader(bytes);
  PlannerGraph graph;
  const int64_t tensors = reader.Next(), ops = reader.Next();
  reader.List(tensors, &graph.bytes);
  reader.List(tensors, &graph.resident);
  reader.List(tensors, &graph.is_output);
  for (int64_t k = 0; k < ops; ++k) {
    PlannerOp op;
    op.time_ns = reader.Next();
    op.rerun_ns = reader.Next();
    op.workspace = reader.Next();
    op.recomputable = reader.Next() != 0;
    reader.List(reader.Next(), &op.inputs);
    reader.List(reader.Next(), &op.outputs);
    const int64_t pairs = reader.Next();
    for (int64_t i = 0; i < pairs; ++i) {
      const auto input = static_cast<int32_t>(reader.Next());
      op.inplace.emplace_back(input, static_cast<int32_t>(reader.Next()));
    }
    graph.ops.push_back(std::move(op));
  }
  return graph;
}

ffi::Bytes Write(const std::vector<int64_t>& numbers) {
  return ffi::Bytes(reinterpret_cast<const char*>(numbers.data()),
                    numbers.size() * sizeof(int64_t));
}

ffi::Bytes PlanRematerializationBytes(const ffi::Bytes& graph, int64_t budget, int64_t effort) {
  const Program program =
      PlanRematerialization(ReadGraph(graph), budget, static_cast<int>(effort));
  std::vector<int64_t> result{program.feasible, program.peak_bytes, program.time_ns,
                              program.least_bytes, program.lower_bound_bytes};
  result.insert(result.end(), program.sequence.begin(), program.sequence.end());
  return Write(result);
}

ffi::Bytes PlanArenaBytes(const ffi::Bytes& graph, int64_t budget, int64_t alignment,
                          int64_t effort) {
  const ArenaPlan plan =
      PlanArena(ReadGraph(graph), budget, alignment, static_cast<int>(effort));
  std::vector<int64_t> result{plan.feasible, plan.arena_bytes, plan.live_peak_bytes, plan.time_ns,
                              plan.least_bytes, plan.lower_bound_bytes,
                              static_cast<int64_t>(plan.sequence.size())};
  result.insert(result.end(), plan.sequence.begin(), plan.sequence.end());
  for (const Version& version : plan.versions) {
    result.insert(result.end(),
                  {version.tensor, version.created, version.last_use, version.offset});
  }
  return Write(result);
}

ffi::Bytes PlanOffsetsBytes(const ffi::Bytes& buffers, int64_t capacity) {
  Reader reader(buffers);
  const int64_t count = reader.Next();
  std::vector<int64_t> lower, upper, size, offsets;
  reader.List(count, &lower);
  reader.List(count, &upper);
  reader.List(count, &size);
  std::vector<int64_t> result{PlanOffsets(lower, upper, size, capacity, &offsets)};
  result.insert(result.end(), offsets.begin(), offsets.end());
  return Write(result);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("relax_disc.plan_rematerialization", PlanRematerializationBytes)
      .def("relax_disc.plan_arena", PlanArenaBytes)
      .def("relax_disc.plan_offsets", PlanOffsetsBytes);
}

}  // namespace relax_disc
