#include "runtime_plan.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

PlannerGraph GraphAt(const Metadata& metadata, const CostModel& cost,
                     const std::vector<int64_t>& values, int64_t alignment) {
  PlannerGraph graph;
  const size_t count = metadata.tensors.size();
  graph.bytes.assign(count, 0);
  graph.resident.assign(count, 0);
  graph.is_output.assign(count, 0);
  std::vector<int32_t> given(metadata.given_count, -1);
  for (size_t i = 0; i < count; ++i) {
    const TensorEntry& tensor = metadata.tensors[i];
    if (tensor.storage == Storage::kArena) graph.bytes[i] = RoundUp(values[tensor.bytes], alignment);
    if (tensor.storage == Storage::kGiven) {
      graph.resident[i] = 1;
      given[tensor.given] = static_cast<int32_t>(i);
    }
    // Escaping tensors lie outside the arena, whole, from entry on: they take nothing here.
    if (tensor.storage == Storage::kEscaping || tensor.storage == Storage::kOverwrite) {
      graph.is_output[i] = 1;
    }
  }
  graph.ops.resize(metadata.kernels.size());
  for (size_t k = 0; k < metadata.kernels.size(); ++k) {
    const KernelEntry& kernel = metadata.kernels[k];
    PlannerOp& op = graph.ops[k];
    op.time_ns = cost.Time(k, values[kernel.flops], values[kernel.moved_bytes]);
    op.inputs = kernel.inputs;
    op.outputs = kernel.outputs;
    op.inplace = kernel.inplace;
    op.recomputable = kernel.recomputable;
    for (int32_t tensor : kernel.outputs) {
      const TensorEntry& entry = metadata.tensors[tensor];
      if (entry.storage == Storage::kOverwrite) op.inplace.emplace_back(given[entry.given], tensor);
    }
  }
  return graph;
}

/*! \brief Turns the planner's answer into the arguments of every execution. */
class Builder {
 public:
  Builder(const Metadata& metadata, Plan* plan, int64_t alignment)
      : metadata_(metadata), plan_(*plan), alignment_(alignment) {
    const size_t views = metadata.views.size();
    offset_.assign(metadata.tensors.size(), 0);
    arena_view_.assign(views, {0, -1});
    own_view_.assign(views, -1);
    escaping_.assign(metadata.tensors.size(), -1);
  }

  void Build() {
    const std::vector<int32_t>& sequence = plan_.arena.sequence;
    const std::vector<Version>& versions = plan_.arena.versions;
    plan_.first_position.assign(metadata_.kernels.size(), -1);
    size_t next = 0;
    for (size_t i = 0; i < sequence.size(); ++i) {
      const int32_t position = static_cast<int32_t>(i);
      const KernelEntry& kernel = metadata_.kernels[sequence[i]];
      Step step{sequence[i], Count(plan_.arguments), Count(plan_.copies), 0};
      // No kernel reads a tensor that it makes, so its new versions can be known at once.
      for (; next < versions.size() && versions[next].created == position; ++next) {
        if (versions[next].tensor >= 0) offset_[versions[next].tensor] = versions[next].offset;
      }
      arena_end_ = 0;
      for (const auto& [from, to] : kernel.copies) {
        plan_.copies.push_back(SourceOf(from));
        plan_.copies.push_back(SourceOf(to));
      }
      for (const Argument& argument : kernel.arguments) Add(argument);
      step.arena_end = arena_end_;
      plan_.steps.push_back(step);
      if (plan_.first_position[sequence[i]] < 0) plan_.first_position[sequence[i]] = position;
    }
    plan_.steps.push_back({-1, Count(plan_.arguments), Count(plan_.copies), 0});
    for (int32_t view : metadata_.outputs) plan_.outputs.push_back(SourceOf(view));
  }

 private:
  template <typename T>
  static int32_t Count(const std::vector<T>& list) {
    return static_cast<int32_t>(list.size());
  }

  ArgumentSource SourceOf(int32_t view) {
    const int32_t tensor = metadata_.views[view].tensor;
    const TensorEntry& entry = metadata_.tensors[tensor];
    if (entry.storage == Storage::kArena) {
      const int64_t offset = offset_[tensor];
      arena_end_ =
          std::max(arena_end_, offset + RoundUp(plan_.values[entry.bytes], alignment_));
      auto& [known_offset, index] = arena_view_[view];
      if (index < 0 || known_offset != offset) {
        known_offset = offset;
        index = Count(plan_.arena_views);
        plan_.arena_views.push_back({view, offset});
      }
      return {ArgumentSource::kArenaView, index};
    }
    const bool escapes = entry.storage == Storage::kEscaping;
    std::vector<OwnView>& list = escapes ? plan_.escaping_views : plan_.given_views;
    if (own_view_[view] < 0) {
      own_view_[view] = Count(list);
      if (escapes && escaping_[tensor] < 0) escaping_[tensor] = plan_.escaping_count++;
      list.push_back({view, escapes ? escaping_[tensor] : entry.given,
                      ShapeAt(metadata_.views[view].shape, plan_.values)});
    }
    return {escapes ? ArgumentSource::kEscapingView : ArgumentSource::kGivenView, own_view_[view]};
  }

  void Add(const Argument& argument) {
    switch (argument.kind) {
      case ArgumentKind::kView:
        plan_.arguments.push_back(SourceOf(argument.index));
        return;
      case ArgumentKind::kInteger:
        plan_.arguments.push_back({ArgumentSource::kInteger, plan_.values[argument.index]});
        return;
      case ArgumentKind::kConstant:
        AddConstant(argument.constant);
        return;
      case ArgumentKind::kShape:
        AddConstant(ffi::Shape(ShapeAt(argument.items, plan_.values)));
        return;
    }
  }

  void AddConstant(ffi::Any value) {
    plan_.arguments.push_back({ArgumentSource::kConstant, Count(plan_.constants)});
    plan_.constants.push_back(std::move(value));
  }

  const Metadata& metadata_;
  Plan& plan_;
  int64_t alignment_, arena_end_ = 0;
  std::vector<int64_t> offset_;                          // of each tensor's current version
  std::vector<std::pair<int64_t, int32_t>> arena_view_;  // per view: last offset and its index
  std::vector<int32_t> own_view_;                        // per view outside the arena: its index
  std::vector<int32_t> escaping_;                        // per tensor: which escaping one it is
};

}  // namespace

int64_t CostModel::Time(size_t kernel, int64_t flops, int64_t moved_bytes) const {
  double work = std::max(static_cast<double>(flops) / flops_per_ns,
                         static_cast<double>(moved_bytes) / bytes_per_ns);
  double factor = kernel < factors.size() ? factors[kernel] : 1.0;
  double fixed = kernel < fixed_ns.size() ? fixed_ns[kernel] : overhead_ns;
  return static_cast<int64_t>(work * factor + fixed) + 1;
}

std::vector<int64_t> ShapeAt(const std::vector<int32_t>& programs,
                             const std::vector<int64_t>& values) {
  std::vector<int64_t> shape;
  shape.reserve(programs.size());
  for (int32_t program : programs) shape.push_back(values[program]);
  return shape;
}

PlanPtr MakePlan(const Metadata& metadata, const CostModel& cost, const PlanRequest& request) {
  auto start = std::chrono::steady_clock::now();
  auto plan = std::make_shared<Plan>();
  plan->dims = request.dims;
  plan->budget_bytes = request.budget_bytes;
  plan->values = metadata.Evaluate(request.dims);
  for (size_t i = 0; i < metadata.tensors.size(); ++i) {
    const TensorEntry& tensor = metadata.tensors[i];
    const int64_t bytes = plan->values[tensor.bytes];
    if (tensor.storage == Storage::kGiven) plan->resident_bytes += bytes;
    if (tensor.storage == Storage::kEscaping) {
      plan->escaping_bytes += RoundUp(bytes, request.alignment);
    }
  }
  int64_t room = kUnlimited;
  if (request.budget_bytes >= 0) {
    room = request.budget_bytes - plan->resident_bytes - plan->escaping_bytes;
  }
  PlannerGraph graph = GraphAt(metadata, cost, plan->values, request.alignment);
  for (const PlannerOp& op : graph.ops) plan->base_time_ns += op.time_ns;
  plan->arena = PlanArena(graph, std::max<int64_t>(room, 0), request.alignment, request.effort);
  plan->feasible = plan->arena.feasible && room >= 0;
  if (plan->feasible) Builder(metadata, plan.get(), request.alignment).Build();
  plan->planning_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::steady_clock::now() - start)
                          .count();
  return plan;
}

}  // namespace relax_disc
