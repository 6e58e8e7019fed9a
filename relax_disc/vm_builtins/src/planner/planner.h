// The planners: which kernels to run again so that a step fits a byte budget, and where in one arena
// each tensor lies.  Plain C++ over plain data; knows nothing of TVM.
//
// Everything here is a pure function of its arguments: same graph, budget and effort, same plan, on
// any machine, whatever was planned before.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_PLANNER_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_PLANNER_H_

#include <cstdint>
#include <utility>
#include <vector>

namespace relax_disc {

// One kernel of the program.
struct PlannerOp {
  int64_t time_ns = 0;
  // Time of running it again, or -1 for time_ns (more where free views must be made again too).
  int64_t rerun_ns = -1;
  // Scratch bytes that are live while it runs.
  int64_t workspace = 0;
  std::vector<int32_t> inputs, outputs;
  // (input, output) pairs.  Input resident: the output is its new value in its own buffer, takes no
  // memory, and from then on no kernel that reads the old value is run again.  Else the output
  // takes the input's place wherever the input dies here and both have the same size.
  std::vector<std::pair<int32_t, int32_t>> inplace;
  bool recomputable = true;
};

// A program in execution order over sized tensors.
struct PlannerGraph {
  std::vector<int64_t> bytes;   // per tensor
  std::vector<char> resident;   // per tensor: lives outside the arena, at all times
  std::vector<char> is_output;  // per tensor: must be there at the end
  std::vector<PlannerOp> ops;
};

// A place beside the device's memory that tensors are written to and read back from, one transfer at
// a time in the order of their requests, while kernels run.
struct TierModel {
  double write_bytes_per_ns = 1, read_bytes_per_ns = 1;
  int64_t latency_ns = 0;   // of each transfer
  int64_t least_bytes = 1;  // smaller tensors stay
  int64_t queue = 64;       // requests that may wait; the next one is made when one of them is done
  bool recompute = true;    // whether kernels may run again, too
  int64_t buffer_bytes = 0;  // that transfers need beside the arena, in the same budget

  int64_t Time(int64_t bytes, bool is_read) const {
    const double speed = is_read ? read_bytes_per_ns : write_bytes_per_ns;
    return latency_ns + static_cast<int64_t>(static_cast<double>(bytes) / speed);
  }
};

// How hard to search.  A higher effort is never slower in the plan that it finds.
enum PlannerEffort : int { kEffortNormal = 0, kEffortHigh = 1 };

// Result of PlanRematerialization.
struct Program {
  bool feasible = false;
  std::vector<int32_t> sequence;  // kernel indices; a repeat is a recomputation
  int64_t peak_bytes = 0;         // most live bytes, resident tensors counted
  int64_t time_ns = 0;
  int64_t least_bytes = 0;        // least budget found feasible (only where infeasible, else 0)
  int64_t lower_bound_bytes = 0;  // no order-preserving program needs less
};

// Positions in the sequence, both inclusive, during which one version of a tensor occupies
// [offset, offset + bytes); last_use is sequence.size() for a tensor that is there at the end.
// The workspace of kernel k is a version with tensor == -1 - k.
struct Version {
  int32_t tensor, created, last_use;
  int64_t offset;
};

// A version that is written out after position `start`, or read back from before position `start`
// on; before position `wait` it must be done.  A version lies in the arena from the start of its
// reading to the end of its writing.
struct Transfer {
  int32_t version;
  bool is_read;
  int32_t start, wait;
  int64_t slot = 0;                 // offset in the tier, in bytes
  int64_t begin_ns = 0, end_ns = 0;  // modelled, from the start of the program
};

// Result of PlanArena; resident tensors are neither counted nor placed.
struct ArenaPlan {
  bool feasible = false;
  std::vector<int32_t> sequence;
  std::vector<Version> versions;  // by created, then by the order of the kernel's outputs
  std::vector<Transfer> transfers;  // in the order of their requests
  int64_t tier_bytes = 0;           // highest end of a slot
  int64_t stall_ns = 0;             // part of the time in which a kernel waits for a transfer
  int64_t arena_bytes = 0;        // highest end of a version, a multiple of the alignment
  int64_t live_peak_bytes = 0;
  int64_t time_ns = 0;
  // Least arena found feasible; 0 where the plan is, or where the least was not asked for.
  int64_t least_bytes = 0;
  int64_t lower_bound_bytes = 0;  // no plan can do with less
};

// A budget that nothing exceeds: no recomputation.
constexpr int64_t kUnlimited = INT64_MAX / 4;

// The fastest program found whose live bytes, resident tensors counted, stay within the budget.
// Time is monotone: a larger budget never gives a slower program.
Program PlanRematerialization(const PlannerGraph& graph, int64_t budget, int effort);

// Offsets for buffers live in [lower, upper) (half-open), none overlapping in space and time.
// Returns the height used.  With capacity >= 0 stops at the first placement within it; a result
// above the capacity means that none was found.  With capacity < 0 makes the height small.
int64_t PlanOffsets(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                    const std::vector<int64_t>& size, int64_t capacity,
                    std::vector<int64_t>* offsets);

// A program and the place of every tensor, workspace included, within the budget.  Sizes are
// rounded up to the alignment here; zero-size tensors are placed at 0 and take nothing.  With a tier
// (else null), what is not kept is computed again or read back, whichever makes the faster program.
// Where nothing fits, the least arena takes several times the time of finding that out: without
// needs_least it is not searched for.
ArenaPlan PlanArena(const PlannerGraph& graph, int64_t arena_budget, int64_t alignment, int effort,
                    const TierModel* tier = nullptr, bool needs_least = true);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_PLANNER_H_
