// Placing buffers with fixed lifetimes at offsets, none overlapping in both.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_OFFSETS_OFFSETS_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_OFFSETS_OFFSETS_H_

#include <cstdint>
#include <vector>

namespace relax_disc {

// Buffers with non-zero size.  Time is cut into *sections*, the
// stretches between moments at which some buffer comes or goes.
struct OffsetProblem {
  OffsetProblem(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                const std::vector<int64_t>& size);

  int count() const { return static_cast<int>(size.size()); }

  std::vector<int> index;                   // per buffer: its number in the caller's lists
  std::vector<int> first, last;             // per buffer: sections [first, last)
  std::vector<int64_t> size;                // per buffer
  std::vector<int64_t> load;                // per section: bytes alive
  int64_t lower_bound = 0;                  // largest load
};

// What orders of buffers go by, each per buffer: length of its life, that times its size, and the
// largest load during it.
struct OffsetMeasures {
  explicit OffsetMeasures(const OffsetProblem& problem);

  std::vector<int64_t> width, area, crowd;
};

// Per buffer: the others that are alive at the same time.
std::vector<std::vector<int>> FindOverlaps(const OffsetProblem& problem);

// Height of the placement that puts each buffer, in the given order, into the lowest gap that
// holds it, or into the smallest one.  Buffers that `pinned` has an offset for lie there; they come
// first in the order.
int64_t PlaceInOrder(const OffsetProblem& problem, const std::vector<int>& order, bool smallest,
                     std::vector<int64_t>* offsets, const std::vector<int64_t>& pinned = {});

// The orders that PlaceInOrder is tried with, most promising first.
std::vector<std::vector<int>> PlacementOrders(const OffsetProblem& problem);

// Depth-first search for a placement within a height; see search.cc.  `work` bounds what
// it does, counted in buffers looked at, and is lowered by what it did.
bool SearchOffsets(const OffsetProblem& problem, int64_t height, int64_t* work,
                   std::vector<int64_t>* offsets);
// One of its two searches alone, with so much work.
bool SearchOffsetsAlone(const OffsetProblem& problem, int64_t height, bool fills_tight,
                        int64_t work, std::vector<int64_t>* offsets);

// How hard to try: the work of searches, how far above the lower bound (as the bound divided by
// this; 0 means not at all) a height needs no search, rounds without success before repair ends, a
// height that needs none, and, for few buffers, the work of a search for the tolerated height, times
// the square of their number; what that one finds does not depend on `enough`.
struct OffsetEffort {
  int64_t work;
  int64_t tolerance;
  int64_t patience = 120;
  int64_t enough = 0;
  int64_t work_per_pair = 0;
};

// PlanOffsets with a given effort.
int64_t PlanOffsetsWithin(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                          const std::vector<int64_t>& size, int64_t capacity, OffsetEffort effort,
                          std::vector<int64_t>* offsets);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_OFFSETS_OFFSETS_H_
