/*!
 * \file plan.h
 * \brief What one shape under one budget runs: the sequence of kernels, and where each tensor is.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_PLAN_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "planner/planner.h"
#include "runtime/memory.h"
#include "runtime/metadata.h"
#include "runtime/state_windows.h"

namespace relax_disc {

/*! \brief Model of a kernel's time, used for choices only. */
struct CostModel {
  explicit CostModel(const Machine& machine = Machine())
      : flops_per_ns(machine.flops_per_ns),
        bytes_per_ns(machine.bytes_per_ns),
        overhead_ns(machine.overhead_ns) {}
  double flops_per_ns, bytes_per_ns, overhead_ns;  // calibration replaces all of these
  // Per kernel, as measured: time = work * factor + fixed.  Empty: 1 and overhead_ns.
  std::vector<double> factors, fixed_ns;

  double Work(int64_t flops, int64_t moved_bytes) const;
  int64_t Time(size_t kernel, int64_t flops, int64_t moved_bytes) const;
};

/*! \brief Small, since many are remembered: what a call needs beside it is in a Binding. */
struct Plan {
  std::vector<int64_t> dims, values;  // values: of the metadata's programs
  int64_t budget_bytes = 0;
  bool feasible = true;
  bool has_least = true;  // or the plan is infeasible, and how much would be enough was not asked
  ArenaPlan arena;
  int64_t resident_bytes = 0, escaping_bytes = 0;
  std::vector<int64_t> workspaces;  // of each kernel, in the arena while it runs
  std::vector<char> is_small;       // of each kernel: it runs on one thread
  int64_t workspace_bytes = 0;      // the largest of them
  int64_t library_bytes = 0;        // what libraries keep, and the most that one takes in any kernel
  int64_t planning_ns = 0;
  int64_t base_time_ns = 0;  // modelled, without recomputations
  int64_t buffer_bytes = 0;  // of the tier, where something is transferred
  StateWindows state;        // of the optimizer, as far as it lies in a file

  /*! \brief What is there beside the arena, whatever is planned. */
  int64_t outside_bytes() const {
    return resident_bytes + escaping_bytes + library_bytes + buffer_bytes + state.peak_bytes;
  }
  /*! \brief Modelled, with all waiting. */
  int64_t time_ns() const { return arena.time_ns + state.stall_ns; }
  int64_t stall_ns() const { return arena.stall_ns + state.stall_ns; }
  /*! \brief Bytes that a call writes to the tier, or reads back from it. */
  int64_t TransferredBytes(const Metadata& metadata, bool is_read) const;
  int64_t peak_bytes() const { return outside_bytes() + arena.arena_bytes; }
  /*! \brief The least budget that was found to be enough; of a plan that `has_least`. */
  int64_t least_bytes() const {
    return outside_bytes() + (arena.feasible ? arena.arena_bytes : arena.least_bytes);
  }
};

using PlanPtr = std::shared_ptr<const Plan>;

/*!
 * \brief What the planner sees at some values of the programs: outside the arena nothing counts.
 * \param threads That will run it: the workspaces depend on them.
 * \param library_bytes Raised to the most that a library takes by itself in any kernel; may be null.
 */
PlannerGraph GraphAt(const Metadata& metadata, const CostModel& cost,
                     const std::vector<int64_t>& values, int threads,
                     int64_t* library_bytes = nullptr);

/*!
 * \brief Make the plan of a shape; `feasible` says whether it is inside the budget.
 * \param budget_bytes Of `peak_bytes`; negative: none.
 * \param tier Where tensors may be kept meanwhile; null: nowhere.
 * \param state What of the optimizer's state lies in a file; null: nothing.
 * \param needs_least Whether to search for the least budget where nothing fits, which takes longest.
 */
PlanPtr MakePlan(const Metadata& metadata, const CostModel& cost, const std::vector<int64_t>& dims,
                 int64_t budget_bytes, int threads, const TierModel* tier, const StateModel* state,
                 bool needs_least);

/*! \brief Shape of a view at the plan's dims. */
std::vector<int64_t> ShapeAt(const std::vector<int32_t>& programs, const std::vector<int64_t>& values);

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_PLAN_H_
