// PlanOffsets: a few greedy placements; where they leave a gap to the lower bound, repairs of the
// best one's order; then a search.
#include "planner/offsets/offsets.h"

#include <algorithm>
#include <numeric>

#include "planner/planner.h"
#include "planner/offsets/random.h"

namespace relax_disc {

namespace {

// Bound on the work of PlanOffsets: about a minute where a height is asked for, about a second
// where the height is only to be small.
constexpr int64_t kSearchWork = 2'000'000'000;
constexpr int64_t kMinimizeWork = 30'000'000;
// Heights that are tried between the lower bound and the best height known.
constexpr int kHeights = 4;
// With more buffers than this the first order that is about good enough is taken, not the best.
constexpr int kLarge = 1200;
// Problems with more buffers than this are not searched: a run would not reach its end.
constexpr int kSearchable = 3000;
// With no more buffers than this `work_per_pair` buys a search of some milliseconds.
constexpr int kSmall = 256;

// Rounds of repair, and their number times the square of the buffers: some milliseconds.
constexpr int64_t kRepairs = 120, kRepairWork = 60'000'000;
// Rounds without success before repair starts over with another order.
constexpr int kRepairPatience = 10;

// Place in order again and again, each time moving the buffers that end too high forward by a
// random way ("squeaky wheel optimization", Joslin and Clements, JAIR 10, 1999).  Too high is above
// the target, or a random part of the way from there to the best height.
void Repair(const OffsetProblem& problem, const std::vector<std::vector<int>>& orders,
            int64_t target, int64_t enough, int64_t patience, int64_t* height,
            std::vector<int64_t>* best) {
  const int64_t pairs = static_cast<int64_t>(problem.count()) * problem.count();
  Random random(2);
  std::vector<int> order = orders[0];
  std::vector<int64_t> placed;
  struct Key {
    int64_t key;
    int rank, buffer;
  };
  std::vector<Key> keys;
  int64_t waited = 0;
  int failed = 0;
  const int64_t rounds = std::min(kRepairs, kRepairWork / pairs);
  for (int64_t round = 0; round < rounds && waited < patience; ++round, ++waited) {
    const int64_t reached = PlaceInOrder(problem, order, false, &placed);
    ++failed;
    if (reached < *height) {
      *height = reached;
      *best = placed;
      failed = 0;
      waited = 0;
    }
    if (*height <= enough) return;
    if (failed > kRepairPatience) {
      order = orders[random.Below(static_cast<int>(orders.size()))];
      failed = 0;
      continue;
    }
    const int64_t low = target + (*height - target) / 4 * random.Below(4);
    keys.clear();
    for (int rank = 0; rank < problem.count(); ++rank) {
      const int i = order[rank];
      const int64_t key = 2 * static_cast<int64_t>(rank);
      const bool high = placed[i] + problem.size[i] > low;
      keys.push_back({high ? key * random.Below(100) / 100 - 1 : key, rank, i});
    }
    std::sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
      return a.key != b.key ? a.key < b.key : a.rank < b.rank;
    });
    for (std::size_t rank = 0; rank < order.size(); ++rank) order[rank] = keys[rank].buffer;
  }
}

}  // namespace

OffsetProblem::OffsetProblem(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                             const std::vector<int64_t>& sizes) {
  std::vector<int64_t> moments;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= 0 || lower[i] >= upper[i]) continue;
    index.push_back(static_cast<int>(i));
    size.push_back(sizes[i]);
    moments.push_back(lower[i]);
    moments.push_back(upper[i]);
  }
  std::sort(moments.begin(), moments.end());
  moments.erase(std::unique(moments.begin(), moments.end()), moments.end());
  const auto section = [&](int64_t moment) {
    const auto at = std::lower_bound(moments.begin(), moments.end(), moment);
    return static_cast<int>(at - moments.begin());
  };
  load.assign(moments.empty() ? 0 : moments.size() - 1, 0);
  for (int i = 0; i < count(); ++i) {
    first.push_back(section(lower[index[i]]));
    last.push_back(section(upper[index[i]]));
    for (int t = first[i]; t < last[i]; ++t) load[t] += size[i];
  }
  for (int64_t bytes : load) lower_bound = std::max(lower_bound, bytes);
}

std::vector<std::vector<int>> FindOverlaps(const OffsetProblem& problem) {
  std::vector<std::vector<int>> overlaps(problem.count());
  std::vector<int> order(problem.count()), alive;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return problem.first[a] < problem.first[b]; });
  for (int i : order) {
    alive.erase(std::remove_if(alive.begin(), alive.end(),
                               [&](int j) { return problem.last[j] <= problem.first[i]; }),
                alive.end());
    for (int j : alive) {
      overlaps[i].push_back(j);
      overlaps[j].push_back(i);
    }
    alive.push_back(i);
  }
  return overlaps;
}

int64_t PlaceInOrder(const OffsetProblem& problem, const std::vector<int>& order, bool smallest,
                     std::vector<int64_t>* offsets, const std::vector<int64_t>& pinned) {
  struct Placed {
    int first, last;
    int64_t begin, end;
  };
  std::vector<Placed> stack;  // by offset
  stack.reserve(problem.count());
  offsets->assign(problem.count(), -1);
  int64_t height = 0;
  for (int i : order) {
    const int first = problem.first[i], last = problem.last[i];
    const int64_t size = problem.size[i];
    int64_t end = 0, best = -1, best_gap = INT64_MAX;
    for (const Placed& other : stack) {
      if (other.first >= last || first >= other.last) continue;
      const int64_t gap = other.begin - end;
      if (gap >= size && gap < best_gap) {
        best = end;
        best_gap = gap;
        if (!smallest) break;
      }
      end = std::max(end, other.end);
    }
    int64_t at = best >= 0 ? best : end;
    if (!pinned.empty() && pinned[i] >= 0) at = pinned[i];
    (*offsets)[i] = at;
    height = std::max(height, at + size);
    const auto above = std::upper_bound(stack.begin(), stack.end(), at,
                                        [](int64_t b, const Placed& p) { return b < p.begin; });
    stack.insert(above, {first, last, at, at + size});
  }
  return height;
}

OffsetMeasures::OffsetMeasures(const OffsetProblem& problem)
    : width(problem.count()), area(problem.count()), crowd(problem.count(), 0) {
  for (int i = 0; i < problem.count(); ++i) {
    width[i] = problem.last[i] - problem.first[i];
    area[i] = problem.size[i] * width[i];
    for (int t = problem.first[i]; t < problem.last[i]; ++t) {
      crowd[i] = std::max(crowd[i], problem.load[t]);
    }
  }
}

std::vector<std::vector<int>> PlacementOrders(const OffsetProblem& problem) {
  const OffsetMeasures measures(problem);
  std::vector<std::vector<int>> orders;
  const auto add = [&](const std::vector<int64_t>& major) {
    std::vector<int> order(problem.count());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return major[a] != major[b] ? major[a] > major[b] : problem.size[a] > problem.size[b];
    });
    orders.push_back(std::move(order));
  };
  add(measures.width);
  add(measures.area);
  add(problem.size);
  add(measures.crowd);
  return orders;
}

int64_t PlanOffsetsWithin(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                          const std::vector<int64_t>& size, int64_t capacity, OffsetEffort effort,
                          std::vector<int64_t>* offsets) {
  const OffsetProblem problem(lower, upper, size);
  std::vector<int64_t> best, placed;
  int64_t height = INT64_MAX;
  const int64_t bound = problem.lower_bound;
  const int64_t spare = effort.tolerance && capacity < 0 ? bound / effort.tolerance : 0;
  const int64_t enough = std::max({capacity, bound + spare, effort.enough});
  const int64_t sufficient =
      problem.count() > kLarge ? std::max(capacity, bound + spare / 4) : std::max(capacity, bound);
  const std::vector<std::vector<int>> orders = PlacementOrders(problem);
  for (const std::vector<int>& order : orders) {
    for (const bool smallest : {false, true}) {
      if (height <= sufficient) break;
      const int64_t reached = PlaceInOrder(problem, order, smallest, &placed);
      if (reached < height) {
        height = reached;
        best = placed;
      }
    }
  }
  const bool hopeless = capacity >= 0 && capacity < bound;
  if (height > enough && !hopeless && effort.patience > 0) {
    Repair(problem, orders, std::max(capacity, bound), enough, effort.patience, &height, &best);
  }
  const auto found = [&](int64_t target, int64_t* work) {
    if (!SearchOffsets(problem, target, work, &placed)) return false;
    best = placed;
    height = 0;
    for (int i = 0; i < problem.count(); ++i) {
      height = std::max(height, placed[i] + problem.size[i]);
    }
    return true;
  };
  if (height > enough && problem.count() <= kSmall) {
    int64_t work = effort.work_per_pair * problem.count() * problem.count();
    if (work > 0) found(bound + spare, &work);
  }
  if (height > enough && !hopeless && effort.work > 0 && problem.count() <= kSearchable) {
    // Heights between the bound and the best are tried from below, each with a share of the work.
    int64_t target = enough, work = effort.work;
    for (int left = capacity >= 0 ? 1 : kHeights; left > 0 && target < height; --left) {
      int64_t share = work / left;
      work -= share;
      if (found(target, &share)) break;
      work += share;
      target += std::max<int64_t>(1, (height - target) / 2);
    }
  }
  offsets->assign(size.size(), 0);
  for (int i = 0; i < problem.count(); ++i) (*offsets)[problem.index[i]] = best[i];
  return problem.count() ? height : 0;
}

int64_t PlanOffsets(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                    const std::vector<int64_t>& size, int64_t capacity,
                    std::vector<int64_t>* offsets) {
  const OffsetEffort effort{capacity >= 0 ? kSearchWork : kMinimizeWork, 0};
  return PlanOffsetsWithin(lower, upper, size, capacity, effort, offsets);
}

}  // namespace relax_disc
