// PlanRematerialization: the fastest program within a budget that some chains pass by.
#include <algorithm>

#include "planner.h"
#include "rematerialization_chain.h"

namespace relax_disc {

Program PlanRematerialization(const PlannerGraph& graph, int64_t budget, int effort) {
  const Model model(graph);
  const int64_t bound = LowerBound(model);
  const int64_t limit = budget - model.resident_bytes;
  std::vector<Window> best;
  int64_t best_time = INT64_MAX, best_peak = 0, least = INT64_MAX;
  for (const ChainStyle& style : ChainStyles(model, effort)) {
    Chain chain(model, style, bound);
    Timeline& timeline = chain.search.timeline;
    const auto record = [&] {
      const int64_t peak = timeline.Peak(), time = timeline.time();
      least = std::min(least, peak);
      if (peak > limit || time > best_time || (time == best_time && peak >= best_peak)) return;
      best = timeline.windows();
      best_time = time;
      best_peak = peak;
    };
    chain.search.seen = record;
    record();
    // A chain's time only grows: one that is already slower cannot win.
    while (chain.limit() > limit && chain.time() < best_time && chain.Descend()) {
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
