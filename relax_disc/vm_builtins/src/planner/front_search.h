// Programs that follow from the choices of a Front: as they are, and repaired at the rungs of
// ladders.  What a choice or a rung gives does not depend on the limit that is asked for, which
// only says where to begin; so more memory is never slower.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_FRONT_SEARCH_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_FRONT_SEARCH_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "planner/chain.h"
#include "planner/front.h"

namespace relax_disc {

class FrontSearch {
 public:
  // `limit` is the live bytes that programs may need.
  FrontSearch(const Model& model, int effort, int64_t limit);

  // No plan within the limit takes less time; 0 where that is not known.
  int64_t bound() const { return bound_; }
  // No program that is still to come takes less time; INT64_MAX if none is.
  int64_t NextTime() const;
  // Show the plan of a choice, or of a rung: the plan of its fastest choice brought below it, and
  // the first plan of a choice that is below it without that.
  void Next();
  // Where nothing fits: show what rungs above the limit give, and the plans of all choices.
  void ShowRest();

  Search search;
  // Told of each program, the state of `search`; `search.seen` is told of those on the way to it.
  std::function<void()> found = [] {};
  // The limit of the choice or the rung that is shown: with less memory than that the program is not
  // looked for, even where it needs less.
  int64_t shown_limit() const { return shown_limit_; }
  // Whether a rung is shown, not the plan of a choice as it is.
  bool shows_rung() const { return shows_rung_; }

 private:
  struct Ladder {
    ChainStyle style;
    int rung;            // the next one
    int64_t limit;       // its bytes
    std::size_t choice;  // the fastest choice within them
  };

  bool Take(std::size_t choice);
  void Lower(Ladder* ladder) const;
  void ShowChoice(std::size_t choice);
  void ShowRung(const Ladder& ladder);
  int64_t Time(std::size_t choice) const;

  const Model& model_;
  const int64_t base_peak_;
  const Front front_;
  const int64_t limit_;
  std::size_t choice_;
  int64_t bound_, shown_limit_ = 0;
  bool shows_rung_ = false;
  std::vector<Ladder> ladders_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_FRONT_SEARCH_H_
