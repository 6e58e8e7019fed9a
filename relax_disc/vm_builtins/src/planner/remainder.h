// PlanRemainder: the rest of a plan, once sizes are known of which it was made with the bounds.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_REMAINDER_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_REMAINDER_H_

#include <cstdint>

#include "planner/planner.h"

namespace relax_disc {

// Leave out kernels that a plan runs again, behind a position, as far as what they make can stay
// instead: tensors that live there are smaller than planned.  All up to the position has happened;
// what lives there keeps its place, the rest is placed anew, in the same arena.
//
// `graph` has the sizes that are known now, rounded to the alignment, none larger than those that
// `plan` was made for; `plan` has no transfers.  The result has the plan's `arena_bytes`, which it
// may not use up, and where nothing can be left out it is the plan.
ArenaPlan PlanRemainder(const PlannerGraph& graph, const ArenaPlan& plan, int32_t position);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_REMAINDER_H_
