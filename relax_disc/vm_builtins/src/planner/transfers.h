// When tensors are written to a tier and read back while kernels run.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_TRANSFERS_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_TRANSFERS_H_

#include <cstdint>
#include <vector>

#include "planner/planner.h"
#include "planner/versions.h"

namespace relax_disc {

struct TransferPlan {
  Buffers buffers;                  // lives drawn out to the ends of their transfers
  std::vector<Transfer> transfers;  // without slots, in the order of their requests
  int64_t time_ns = 0, stall_ns = 0;
};

// A tensor that is reloaded is written when it is first made.  Where the live bytes stay within
// `limit`, its memory is kept until that is done, and a reload begins so early that it ends when it
// is needed; else kernels wait.
TransferPlan PlanTransfers(const Model& model, const Timeline& timeline, const TierModel& tier,
                           int64_t limit);

// Give each written tensor a place in the tier, a multiple of `alignment`; the highest end.
int64_t PlanSlots(const Model& model, const std::vector<Version>& versions, int64_t alignment,
                  std::vector<Transfer>* transfers);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_TRANSFERS_H_
