// PlanArena: the fastest program, among the rungs of some chains, that an arena of the budget can
// hold.  How much arena a rung needs does not depend on the budget, so time is monotone in it.
#include <algorithm>

#include "offsets.h"
#include "planner.h"
#include "planner_versions.h"
#include "rematerialization_chain.h"

namespace relax_disc {

namespace {

// Greedy placement, repaired where it is not within a percent of the live bytes; no search.
constexpr OffsetEffort kPlacementEffort{0, 100};

PlannerGraph Rounded(const PlannerGraph& graph, int64_t alignment) {
  PlannerGraph result = graph;
  const auto round = [&](int64_t* bytes) {
    *bytes = (*bytes + alignment - 1) / alignment * alignment;
  };
  for (int64_t& bytes : result.bytes) round(&bytes);
  for (PlannerOp& op : result.ops) round(&op.workspace);
  return result;
}

// Give a plan the timeline's program and its tensors their places.
void Place(const Model& model, const Timeline& timeline, ArenaPlan* plan) {
  Buffers buffers = CollectBuffers(model, timeline);
  std::vector<int64_t> offsets;
  plan->arena_bytes = PlanOffsetsWithin(buffers.lower, buffers.upper, buffers.size, -1,
                                        kPlacementEffort, &offsets);
  plan->versions = std::move(buffers.versions);
  for (std::size_t i = 0; i < plan->versions.size(); ++i) {
    plan->versions[i].offset = offsets[buffers.buffer[i]];
  }
  plan->sequence = timeline.Sequence();
  plan->live_peak_bytes = std::max<int64_t>(0, timeline.Peak());
  plan->time_ns = timeline.time();
  plan->feasible = true;
}

}  // namespace

ArenaPlan PlanArena(const PlannerGraph& graph, int64_t arena_budget, int64_t alignment,
                    int effort) {
  Model model(Rounded(graph, alignment));
  model.resident_bytes = 0;
  const int64_t bound = LowerBound(model);
  ArenaPlan best, tried;
  int64_t least = INT64_MAX;
  for (const ChainStyle& style : ChainStyles(model, effort)) {
    // A chain's time only grows: one that is already slower cannot win.
    const auto hopeless = [&](int64_t time) { return best.feasible && time >= best.time_ns; };
    if (hopeless(model.base_time)) break;
    Chain chain(model, style, bound);
    const Timeline& timeline = chain.search.timeline;
    bool more = true;
    for (; more && !hopeless(chain.time()); more = chain.Descend()) {
      if (timeline.Peak() > arena_budget) continue;
      if (tried.feasible && tried.sequence == timeline.Sequence()) continue;
      Place(model, timeline, &tried);
      least = std::min(least, tried.arena_bytes);
      if (tried.arena_bytes > arena_budget) continue;
      best = tried;
      break;
    }
    if (more || best.feasible) continue;
    Place(model, timeline, &tried);  // the last rung, for the report
    least = std::min(least, tried.arena_bytes);
  }
  if (!best.feasible) best.least_bytes = least;
  best.lower_bound_bytes = bound;
  return best;
}

}  // namespace relax_disc
