#include "runtime/plan.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "kernels/workspace.h"

namespace relax_disc {

PlannerGraph GraphAt(const Metadata& metadata, const CostModel& cost,
                     const std::vector<int64_t>& values, int threads, int64_t* library_bytes) {
  PlannerGraph graph;
  const size_t count = metadata.tensors.size();
  graph.bytes.assign(count, 0);
  graph.resident.assign(count, 0);
  graph.is_output.assign(count, 0);
  std::vector<int32_t> given(metadata.given_count, -1);
  for (size_t i = 0; i < count; ++i) {
    const TensorEntry& tensor = metadata.tensors[i];
    if (tensor.storage == Storage::kArena) graph.bytes[i] = RoundUp(values[tensor.bytes], metadata.machine.alignment);
    if (tensor.storage == Storage::kGiven) {
      graph.resident[i] = 1;
      if (!tensor.is_part()) given[tensor.given] = static_cast<int32_t>(i);
    }
    // Escaping tensors lie outside the arena, whole, from entry on: they take nothing here.
    if (tensor.storage == Storage::kEscaping || tensor.storage == Storage::kOverwrite) {
      graph.is_output[i] = 1;
    }
  }
  graph.ops.resize(metadata.kernels.size());
  // What is counted meanwhile is planned with its bound: a smaller product may go to a library.
  const bool or_smaller = std::any_of(metadata.kernels.begin(), metadata.kernels.end(),
                                      [](const KernelEntry& kernel) { return kernel.counts >= 0; });
  for (size_t k = 0; k < metadata.kernels.size(); ++k) {
    const KernelEntry& kernel = metadata.kernels[k];
    PlannerOp& op = graph.ops[k];
    op.time_ns = cost.Time(k, values[kernel.flops], values[kernel.moved_bytes]);
    op.inputs = kernel.inputs;
    op.outputs = kernel.outputs;
    op.inplace = kernel.inplace;
    op.recomputable = kernel.recomputable;
    if (!kernel.workspace.empty()) {
      const std::vector<int64_t> numbers = ShapeAt(kernel.workspace_numbers, values);
      const bool lends = metadata.machine.lends_memory;
      if (lends) {
        op.workspace = RoundUp(WorkspaceBytes(kernel.workspace, numbers, threads),
                               metadata.machine.alignment);
      }
      if (library_bytes != nullptr) {
        const int64_t bytes =
            lends ? LibraryBytes(kernel.workspace, numbers, or_smaller, threads) : numbers.at(1);
        *library_bytes = std::max(*library_bytes, bytes);
      }
    }
    for (int32_t tensor : kernel.outputs) {
      const TensorEntry& entry = metadata.tensors[tensor];
      if (entry.storage != Storage::kOverwrite) continue;
      op.inplace.emplace_back(given[entry.given], tensor);
      for (int32_t input : kernel.inputs) {  // what reads the same part is not run again either
        const TensorEntry& old = metadata.tensors[input];
        const bool same = old.storage == Storage::kGiven && old.given == entry.given;
        if (same && old.is_part()) op.inplace.emplace_back(input, tensor);
      }
    }
  }
  return graph;
}

double CostModel::Work(int64_t flops, int64_t moved_bytes) const {
  return std::max(static_cast<double>(flops) / flops_per_ns,
                  static_cast<double>(moved_bytes) / bytes_per_ns);
}

int64_t CostModel::Time(size_t kernel, int64_t flops, int64_t moved_bytes) const {
  double factor = kernel < factors.size() ? factors[kernel] : 1.0;
  double fixed = kernel < fixed_ns.size() ? fixed_ns[kernel] : overhead_ns;
  return static_cast<int64_t>(Work(flops, moved_bytes) * factor + fixed) + 1;
}

std::vector<int64_t> ShapeAt(const std::vector<int32_t>& programs,
                             const std::vector<int64_t>& values) {
  std::vector<int64_t> shape;
  shape.reserve(programs.size());
  for (int32_t program : programs) shape.push_back(values[program]);
  return shape;
}

int64_t Plan::TransferredBytes(const Metadata& metadata, bool is_read) const {
  int64_t bytes = 0;
  for (const Transfer& transfer : arena.transfers) {
    if (transfer.is_read != is_read) continue;
    bytes += values[metadata.tensors[arena.versions[transfer.version].tensor].bytes];
  }
  return bytes;
}

namespace {
// On one thread some 10 microseconds, a few times what it takes to wake another.
constexpr int64_t kSmallFlops = 1 << 17, kSmallBytes = 1 << 17;
}  // namespace

PlanPtr MakePlan(const Metadata& metadata, const CostModel& cost, const std::vector<int64_t>& dims,
                 int64_t budget_bytes, int threads, const TierModel* tier, const StateModel* state,
                 bool needs_least) {
  auto start = std::chrono::steady_clock::now();
  auto plan = std::make_shared<Plan>();
  plan->dims = dims;
  plan->budget_bytes = budget_bytes;
  plan->values = metadata.Evaluate(dims);
  for (size_t i = 0; i < metadata.tensors.size(); ++i) {
    const TensorEntry& tensor = metadata.tensors[i];
    const int64_t bytes = plan->values[tensor.bytes];
    const bool in_file = state != nullptr && tensor.given >= 0 && state->in_file[tensor.given];
    if (tensor.storage == Storage::kGiven && !tensor.is_part() && !in_file) {
      plan->resident_bytes += bytes;
    }
    if (tensor.storage == Storage::kEscaping) {
      plan->escaping_bytes += RoundUp(bytes, metadata.machine.alignment);
    }
  }
  PlannerGraph graph = GraphAt(metadata, cost, plan->values, threads, &plan->library_bytes);
  if (state != nullptr) {
    // The most at once is what one kernel has, in any sequence.
    std::vector<int32_t> sequence(metadata.kernels.size());
    std::iota(sequence.begin(), sequence.end(), 0);
    plan->state = PlanStateWindows(metadata, plan->values, sequence, graph, *state);
  }
  for (const KernelEntry& kernel : metadata.kernels) {
    plan->is_small.push_back(plan->values[kernel.flops] <= kSmallFlops &&
                             plan->values[kernel.moved_bytes] <= kSmallBytes);
  }
  plan->library_bytes += metadata.machine.library_bytes;
  int64_t room = kUnlimited;
  if (budget_bytes >= 0) room = budget_bytes - plan->outside_bytes();
  for (const PlannerOp& op : graph.ops) {
    plan->base_time_ns += op.time_ns;
    plan->workspace_bytes = std::max(plan->workspace_bytes, op.workspace);
    plan->workspaces.push_back(op.workspace);
  }
  // More effort costs a new shape many times the time and wins 0.1 %.
  plan->arena = PlanArena(graph, std::max<int64_t>(room, 0), metadata.machine.alignment,
                          kEffortNormal, tier, needs_least);
  plan->has_least = plan->arena.feasible || needs_least;
  // A search with a limit may find what the one for the least missed: so that what is named as the
  // least is the least, it is lowered as long as a byte less is enough.
  while (!plan->arena.feasible && needs_least) {
    const ArenaPlan better = PlanArena(graph, plan->arena.least_bytes - 1,
                                       metadata.machine.alignment, kEffortNormal, tier);
    if (!better.feasible) break;
    plan->arena.least_bytes =
        better.arena_bytes + (better.transfers.empty() ? 0 : tier->buffer_bytes);
  }
  if (state != nullptr && plan->arena.feasible) {
    plan->state = PlanStateWindows(metadata, plan->values, plan->arena.sequence, graph, *state);
  }
  if (!plan->arena.transfers.empty()) plan->buffer_bytes = tier->buffer_bytes;
  plan->feasible = plan->arena.feasible && room >= 0;
  plan->planning_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::steady_clock::now() - start)
                          .count();
  return plan;
}

}  // namespace relax_disc
