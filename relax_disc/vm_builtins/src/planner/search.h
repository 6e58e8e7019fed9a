// Search for windows: evict greedily until a limit holds, and take back what was not needed.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_SEARCH_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_SEARCH_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "planner/timeline.h"

namespace relax_disc {

// How candidates are ranked, and how much is tried for real.
struct SearchStyle {
  // A candidate counts once for each idle block whose peak is above so many percent of the limit.
  int ahead_percent;
  // The best so many candidates are tried, and the one with most relief per time is kept.
  int trials;
  // Whether Relax tries what the quick test advises against.
  bool thorough;
  // Whether Shrink soon gives up.
  bool brief = false;
};

class Search {
 public:
  explicit Search(const Model& model, int grace = 0);

  // Evict until the peak is within the limit; false where that fails.  Passes only through valid
  // states that take at least `floor` time, and shows each to `seen`.
  bool Shrink(int64_t limit, int64_t floor, const SearchStyle& style);
  // Take back or shorten evictions while the peak stays within the limit and time falls, but not
  // below `floor`.  One pass over the gaps of everything that runs again.
  bool Relax(int64_t limit, int64_t floor, bool thorough);

  Timeline timeline;
  std::function<void()> seen = [] {};

 private:
  struct Candidate {
    double score;
    int gap;
    Window window;
  };
  struct Idle {  // a copy that nobody reads for a while
    int gap;
    Window window;
    int from, need;  // last block that reads it before, first block that reads it after
  };

  void Consider(int tensor, const Idle& idle, bool reload);
  void Collect(int64_t limit, const SearchStyle& style);
  bool FindIdle(int tensor, int block, int position, Idle* idle) const;
  int64_t Cost(int tensor, int block, bool reload);
  bool MayFit(int tensor, Window old, Window option, int64_t limit) const;
  bool Retreat(int gap, int64_t limit, int64_t floor, bool thorough);

  const Model& model_;
  std::vector<int> mark_;
  int stamp_ = 0;
  int64_t work_ = 0;  // kernels that Cost went through
  std::vector<int> stack_, overfull_;
  std::vector<Candidate> candidates_;  // a heap, best first
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_SEARCH_H_
