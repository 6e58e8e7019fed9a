// The planners as global functions: a graph as lists in, named figures out; see planner.py.
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <vector>

#include "planner/front_search.h"
#include "planner/offsets/offsets.h"
#include "planner/planner.h"
#include "planner/remainder.h"
#include "runtime/lists.h"
#include "runtime/plan_numbers.h"

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

int64_t BudgetOf(int64_t bytes) { return bytes < 0 ? kUnlimited : bytes; }

// sizes, resident, is_output; of each op: time, rerun, workspace, recomputable, inputs, outputs,
// in-place pairs.
PlannerGraph ReadGraph(const List& parts) {
  PlannerGraph graph;
  graph.bytes = Integers<int64_t>(parts[0]);
  graph.resident = Integers<char>(parts[1]);
  graph.is_output = Integers<char>(parts[2]);
  const size_t count = graph.bytes.size();
  TVM_FFI_CHECK(graph.resident.size() == count && graph.is_output.size() == count, ValueError)
      << "a graph has " << count << " sizes, " << graph.resident.size() << " and "
      << graph.is_output.size() << " flags";
  for (const ffi::Any& item : ListOf(parts[3])) {
    const List row = ListOf(item);
    PlannerOp op;
    op.time_ns = row[0].cast<int64_t>();
    op.rerun_ns = row[1].cast<int64_t>();
    op.workspace = row[2].cast<int64_t>();
    op.recomputable = row[3].cast<int64_t>() != 0;
    op.inputs = Integers(row[4]);
    op.outputs = Integers(row[5]);
    op.inplace = Pairs(row[6]);
    for (const std::vector<int32_t>* tensors : {&op.inputs, &op.outputs}) {
      for (int32_t tensor : *tensors) {
        TVM_FFI_CHECK(0 <= tensor && tensor < static_cast<int64_t>(count), ValueError)
            << "op " << graph.ops.size() << " has tensor " << tensor << " of " << count;
      }
    }
    graph.ops.push_back(std::move(op));
  }
  return graph;
}

Facts PlanRematerializationFacts(const List& graph, int64_t budget, int64_t effort) {
  const Program program =
      PlanRematerialization(ReadGraph(graph), BudgetOf(budget), static_cast<int>(effort));
  return {{"feasible", program.feasible},
          {"sequence", Numbers(program.sequence)},
          {"peak_bytes", program.peak_bytes},
          {"time_ns", program.time_ns},
          {"least_bytes", program.least_bytes},
          {"lower_bound_bytes", program.lower_bound_bytes}};
}

// `tier`: none, or bytes per ns written and read, ns of each transfer, least bytes of a tensor,
// requests that may wait, whether kernels run again, bytes beside the arena.
Facts PlanArenaFacts(const List& graph, int64_t budget, int64_t alignment, int64_t effort,
                     const List& tier) {
  TierModel model;
  if (!tier.empty()) {
    model = {tier[0].cast<double>(),  tier[1].cast<double>(),  tier[2].cast<int64_t>(),
             tier[3].cast<int64_t>(), tier[4].cast<int64_t>(), tier[5].cast<bool>(),
             tier[6].cast<int64_t>()};
  }
  const ArenaPlan plan = PlanArena(ReadGraph(graph), BudgetOf(budget), alignment,
                                   static_cast<int>(effort), tier.empty() ? nullptr : &model);
  return {{"feasible", plan.feasible},
          {"sequence", Numbers(plan.sequence)},
          {"versions", VersionNumbers(plan)},
          {"transfers", TransferNumbers(plan)},
          {"tier_bytes", plan.tier_bytes},
          {"stall_ns", plan.stall_ns},
          {"arena_bytes", plan.arena_bytes},
          {"live_peak_bytes", plan.live_peak_bytes},
          {"time_ns", plan.time_ns},
          {"least_bytes", plan.least_bytes},
          {"lower_bound_bytes", plan.lower_bound_bytes}};
}

// Of a plan without transfers: sequence, versions, arena bytes.
Facts PlanRemainderFacts(const List& graph, const List& sequence, const List& versions,
                         int64_t arena_bytes, int64_t position) {
  ArenaPlan plan;
  plan.feasible = true;
  plan.sequence = Integers(sequence);
  for (const ffi::Any& item : versions) {
    const std::vector<int64_t> numbers = Integers<int64_t>(item);
    plan.versions.push_back({static_cast<int32_t>(numbers.at(0)),
                             static_cast<int32_t>(numbers.at(1)),
                             static_cast<int32_t>(numbers.at(2)), numbers.at(3)});
  }
  plan.arena_bytes = arena_bytes;
  const ArenaPlan rest = PlanRemainder(ReadGraph(graph), plan, static_cast<int32_t>(position));
  return {{"sequence", Numbers(rest.sequence)},
          {"versions", VersionNumbers(rest)},
          {"transfers", TransferNumbers(rest)},
          {"arena_bytes", rest.arena_bytes},
          {"time_ns", rest.time_ns}};
}

ffi::Shape PlanOffsetsList(const List& lower, const List& upper, const List& size,
                           int64_t capacity) {
  std::vector<int64_t> offsets;
  const int64_t height = PlanOffsets(Integers<int64_t>(lower), Integers<int64_t>(upper),
                                     Integers<int64_t>(size), capacity, &offsets);
  offsets.push_back(height);
  return ffi::Shape(offsets);
}

// For tests: one of the two searches alone; empty where it finds nothing within the work.
ffi::Shape SearchOffsetsList(const List& lower, const List& upper, const List& size,
                             int64_t height, int64_t work, bool fills_tight) {
  const OffsetProblem problem(Integers<int64_t>(lower), Integers<int64_t>(upper),
                              Integers<int64_t>(size));
  std::vector<int64_t> offsets;
  if (!SearchOffsetsAlone(problem, height, fills_tight, work, &offsets)) return ffi::Shape();
  return ffi::Shape(offsets);
}

// For tests: no program within the budget takes less time; 0 where that is not known.
int64_t LeastTime(const List& graph, int64_t budget) {
  const Model model(ReadGraph(graph));
  return FrontSearch(model, kEffortNormal, budget - model.resident_bytes).bound();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def("relax_disc.plan_rematerialization", PlanRematerializationFacts)
      .def("relax_disc.plan_arena", PlanArenaFacts)
      .def("relax_disc.plan_remainder", PlanRemainderFacts)
      .def("relax_disc.plan_offsets", PlanOffsetsList)
      .def("relax_disc.search_offsets", SearchOffsetsList)
      .def("relax_disc.least_time_ns", LeastTime);
}

}  // namespace relax_disc
