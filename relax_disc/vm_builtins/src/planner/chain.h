// A chain goes down a ladder of budgets, each rung's program grown from the last one's.
//
// A chain looks at the graph alone, never at the budget that is asked for, and its programs never
// get faster on the way down: what would be faster than the rung above is left alone.  So the
// fastest program within a budget, over the part of some chains down to that budget, is a function
// of graph and budget in which more memory is never slower.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_CHAIN_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_CHAIN_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "planner/search.h"

namespace relax_disc {

// Grace (see Timeline::BaseWindows) of the searches that look for speed: half the activations of a
// Llama step cost 5.5 % instead of 5.9 %.  The others have none, and get to tighter budgets.
constexpr int kGrace = 4;

struct ChainStyle {
  int divisions;  // rungs are multiples of this part of the peak without recomputation
  SearchStyle search;
  int grace = 0;  // see Timeline::BaseWindows
};

// The chains of an effort, in the order to run them; a higher effort has all of a lower one's.
std::vector<ChainStyle> ChainStyles(const Model& model, int effort);

// The ladders of FrontSearch at an effort.
std::vector<ChainStyle> FrontStyles(int effort);

// Live bytes that a rung allows: so many parts of the peak without recomputation.
int64_t RungLimit(const Model& model, int64_t base_peak, int divisions, int rung);

// No program that runs the kernels first in this order, each at least once, needs fewer live bytes
// (tracked tensors and workspace).
int64_t LowerBound(const Model& model);

class Chain {
 public:
  Chain(const Model& model, const ChainStyle& style, int64_t lower_bound);

  // Go down to the next rung; false, and nothing changed, if it cannot be reached or there is none.
  bool Descend();
  // Live bytes that the current rung allows, and the time of its program.
  int64_t limit() const { return limit_; }
  int64_t time() const { return floor_; }

  Search search;

 private:
  bool StartAgain();

  const Model& model_;
  const ChainStyle style_;
  const int64_t lower_bound_;
  int64_t base_peak_, limit_, floor_;
  int rung_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_CHAIN_H_
