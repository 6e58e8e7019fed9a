/*!
 * \file runtime_plan.h
 * \brief What one shape under one budget runs: the sequence of kernels, and where each argument is.
 */
#ifndef RELAX_DISC_RUNTIME_PLAN_H_
#define RELAX_DISC_RUNTIME_PLAN_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "planner.h"
#include "runtime_memory.h"
#include "runtime_metadata.h"

namespace relax_disc {

/*! \brief Model of a kernel's time, used for choices only. */
struct CostModel {
  double flops_per_ns = 100.0;  // two cores of a desktop; calibration replaces all of these
  double bytes_per_ns = 10.0;
  double overhead_ns = 3000.0;
  // Per kernel, as measured: time = work * factor + fixed.  Empty: 1 and overhead_ns.
  std::vector<double> factors, fixed_ns;

  int64_t Time(size_t kernel, int64_t flops, int64_t moved_bytes) const;
};

/*! \brief Where an argument of one execution comes from. */
struct ArgumentSource {
  enum Kind : int32_t { kArenaView, kGivenView, kEscapingView, kInteger, kConstant } kind;
  int64_t value;  // index into the lists of the plan; the number itself for kInteger
};

/*! \brief A view whose place is known: bytes at an offset of the arena, or a tensor's own. */
struct PlacedView {
  int32_t view;
  int64_t offset;
};

/*! \brief A view of a tensor outside the arena. */
struct OwnView {
  int32_t view;
  int32_t owner;  // which given tensor, or which escaping one in order of first view
  std::vector<int64_t> shape;
};

/*! \brief One execution of a kernel. */
struct Step {
  int32_t kernel;
  int32_t first_argument;  // of Plan::arguments
  int32_t first_copy;      // of Plan::copies, as pairs (from, to)
  int64_t arena_end;       // highest arena byte that the kernel may touch, plus one
};

struct Plan {
  std::vector<int64_t> dims, values;  // values: of the metadata's programs
  int64_t budget_bytes = 0;
  bool feasible = true;
  ArenaPlan arena;
  int64_t resident_bytes = 0, escaping_bytes = 0;
  int64_t planning_ns = 0;
  int64_t base_time_ns = 0;  // modelled, without recomputations
  std::vector<Step> steps;  // one more at the end, empty
  std::vector<int32_t> first_position;  // of each kernel; executions after it are recomputations
  std::vector<ArgumentSource> arguments, copies;
  std::vector<PlacedView> arena_views;
  std::vector<OwnView> given_views, escaping_views;
  int32_t escaping_count = 0;  // tensors
  std::vector<tvm::ffi::Any> constants;
  std::vector<ArgumentSource> outputs;

  int64_t peak_bytes() const { return resident_bytes + escaping_bytes + arena.arena_bytes; }
  int64_t recomputations() const {
    return static_cast<int64_t>(arena.sequence.size() - first_position.size());
  }
};

using PlanPtr = std::shared_ptr<const Plan>;

/*! \brief Everything that a plan depends on, beside the metadata. */
struct PlanRequest {
  std::vector<int64_t> dims;
  int64_t budget_bytes = -1;  // of peak_bytes; negative: none
  int64_t alignment = 64;
  int effort = kEffortFast;  // more costs a new shape many times the time and wins 0.1 %
};

/*! \brief Make the plan; `feasible` says whether it is inside the budget. */
PlanPtr MakePlan(const Metadata& metadata, const CostModel& cost, const PlanRequest& request);

/*! \brief Shape of a view at the plan's dims. */
std::vector<int64_t> ShapeAt(const std::vector<int32_t>& programs, const std::vector<int64_t>& values);

}  // namespace relax_disc
#endif  // RELAX_DISC_RUNTIME_PLAN_H_
