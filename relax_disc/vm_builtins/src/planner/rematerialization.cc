// PlanRematerialization: the fastest program within a budget that some searches pass by.
#include <algorithm>

#include "planner/planner.h"
#include "planner/chain.h"
#include "planner/front_search.h"

namespace relax_disc {

Program PlanRematerialization(const PlannerGraph& graph, int64_t budget, int effort) {
  const Model model(graph);
  const int64_t bound = LowerBound(model);
  const int64_t limit = budget - model.resident_bytes;
  std::vector<Window> best;
  int64_t best_time = INT64_MAX, best_peak = 0, least = INT64_MAX;
  const auto record = [&](const Timeline& timeline) {
    const int64_t peak = timeline.Peak(), time = timeline.time();
    least = std::min(least, peak);
    if (peak > limit || time > best_time || (time == best_time && peak >= best_peak)) return;
    best = timeline.windows();
    best_time = time;
    best_peak = peak;
  };
  const Timeline base(model);
  record(base);
  if (best_time == INT64_MAX) {
    FrontSearch front(model, effort, limit);
    front.found = front.search.seen = [&] { record(front.search.timeline); };
    if (front.NextTime() < best_time) front.Next();
    for (const ChainStyle& style : ChainStyles(model, effort)) {
      if (best_time <= front.bound()) break;
      Chain chain(model, style, bound);
      chain.search.seen = [&] { record(chain.search.timeline); };
      // A chain's time only grows: one that is already slower cannot win.
      while (chain.limit() > limit && chain.time() < best_time && chain.Descend()) {
      }
    }
    while (front.NextTime() < best_time) front.Next();
    if (best_time == INT64_MAX) {  // for the report
      front.found = front.search.seen = [&] {
        least = std::min(least, std::max(front.shown_limit(), front.search.timeline.Peak()));
      };
      front.ShowRest();
    }
  }
  Program program;
  program.feasible = best_time < INT64_MAX;
  program.lower_bound_bytes = bound + model.resident_bytes;
  if (!program.feasible) {
    program.least_bytes = least + model.resident_bytes;
    return program;
  }
  Timeline timeline(model);
  timeline.Assign(best);
  program.sequence = timeline.Sequence();
  program.peak_bytes = best_peak + model.resident_bytes;
  program.time_ns = best_time;
  return program;
}

}  // namespace relax_disc
