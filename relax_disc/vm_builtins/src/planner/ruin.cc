// The part of Search that tears up and redoes ("ruin and recreate", Schrimpf et al., Journal of
// Computational Physics 159, 2000).
#include <algorithm>

#include "planner/search.h"

namespace relax_disc {

// Keep again what one to four recomputations that follow one another bring back.
void Search::TakeBackSome(Random* random) {
  std::vector<std::pair<int, int>> again;  // (block, kernel)
  for (int k = 0; k <= model_.ops; ++k) {
    const std::vector<int>& executions = timeline.executions(k);
    for (std::size_t i = 0; i + 1 < executions.size(); ++i) again.emplace_back(k, executions[i]);
  }
  if (again.empty()) return;
  const int count = static_cast<int>(again.size());
  int at = random->Below(count);
  for (int left = 1 + random->Below(4); left > 0 && at < count; --left) {
    const auto [block, op] = again[at];
    for (int i = model_.outputs.begin[op]; i < model_.outputs.begin[op + 1]; ++i) {
      const int tensor = model_.outputs.values[i];
      const int gap = model_.GapBefore(tensor, block);
      if (gap < model_.points.begin[tensor] || timeline.windows()[gap].empty()) continue;
      const int point = model_.points.values[gap];
      Apply(gap, {point, point});
      banned_[gap] = 1;
    }
    at += 1 + random->Below(3);
  }
}

void Search::Ruin(int64_t limit, int64_t floor, const SearchStyle& style, int iterations) {
  Random random(static_cast<uint64_t>(model_.ops));
  for (int iteration = 0; iteration < iterations; ++iteration) {
    ruin_time_ = timeline.time();
    journal_.clear();
    TakeBackSome(&random);
    noise_ = &random;
    const bool good = timeline.valid() && Shrink(limit, 0, style);
    noise_ = nullptr;
    std::fill(banned_.begin(), banned_.end(), 0);
    if (good) Relax(limit, floor, style.thorough);
    if (good && timeline.time() < ruin_time_ && timeline.time() >= floor) {
      seen();
      continue;
    }
    while (!journal_.empty()) {
      timeline.Set(journal_.back().first, journal_.back().second);
      journal_.pop_back();
    }
  }
}

}  // namespace relax_disc
