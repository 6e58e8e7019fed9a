// Depth-first search over canonical placements, after MiniMalloc (Moffitt, ASPLOS 2024).
//
// Buffers are placed from the bottom up, each on top of another one or on the floor.  A branch is
// left when, in some section, the lowest offset that is still possible plus everything yet to be
// placed exceeds the height; when a buffer is skipped that would fit wholly below the one placed
// next; and a buffer that failed at an offset must later rest on one that is not placed yet.  Parts
// of the time line that no unplaced buffer connects any more are solved apart.
//
// Runs are short and many: each starts over with another preference among buffers, mixing a fixed
// order, how often a buffer took part in failures (as constraint solvers weigh variables by their
// failures) and noise.
//
// Two searches take turns.  The second, which joins late, branches at a section without slack where
// there is one: some buffer that is alive there must lie at its floor, so that nothing else need be
// tried (as exact cover branches on the item with the fewest options).  Each solves problems that the
// other does not.
#include <algorithm>

#include "planner/offsets/offsets.h"
#include "planner/offsets/random.h"

namespace relax_disc {

namespace {

class OffsetSearch {
 public:
  OffsetSearch(const OffsetProblem& problem, int64_t height, bool fills_tight);

  // One run with the given preferences (larger first) and number of nodes.
  bool Run(const std::vector<int64_t>& preference, int64_t nodes);

  std::vector<int64_t> offsets;   // per buffer, -1 while not placed
  std::vector<int64_t> failures;  // per buffer: its share in failures
  int64_t work = 0;

 private:
  struct Level {
    std::vector<int> buffers;        // not yet placed in this part
    std::vector<int64_t> low;        // their lowest possible offsets
    std::vector<char> floating;      // whether nothing supports that offset yet
    std::vector<int> candidates;     // positions in `buffers`
    std::vector<int64_t> saved;      // lowest_ before a placement
    std::vector<std::pair<int, int64_t>> raised;  // barred_ before this level
  };

  bool Solve(std::size_t depth, int64_t bottom);
  bool Bound(Level* level, int64_t bottom, int64_t* ceiling);
  bool SolveParts(std::size_t depth, int placed, int64_t bottom);
  void Blame(const Level& level, int section);
  void KeepFillers(Level* level);

  const OffsetProblem& problem_;
  const std::vector<std::vector<int>> overlaps_;
  const int64_t height_;
  const bool fills_tight_;
  const std::vector<int64_t>* preference_ = nullptr;
  std::vector<int64_t> lowest_;  // per buffer: highest end of a placed buffer that overlaps it
  std::vector<int64_t> barred_;  // per buffer: offsets below this have failed
  std::vector<int64_t> first_;   // per buffer: low of the current level
  std::vector<int> crossing_;    // per section: unplaced buffers alive across its start
  std::vector<int> twin_;        // per buffer: an identical earlier one, -1 if none
  std::vector<int64_t> floor_, rest_;  // per section
  std::vector<int> fillers_;  // per section: candidates for its floor, -1 if that may stay free
  std::vector<Level> levels_;
  int64_t nodes_left_ = 0;
};

constexpr int64_t kBlame = 5040;  // divisible by most small counts

OffsetSearch::OffsetSearch(const OffsetProblem& problem, int64_t height, bool fills_tight)
    : failures(problem.count(), 0),
      problem_(problem),
      overlaps_(FindOverlaps(problem)),
      height_(height),
      fills_tight_(fills_tight),
      first_(problem.count(), 0),
      twin_(problem.count(), -1),
      floor_(problem.load.size(), 0),
      rest_(problem.load.size(), 0),
      fillers_(problem.load.size(), -1),
      levels_(problem.count() + 2) {
  for (int i = 0; i < problem.count(); ++i) {
    for (int j = i - 1; j >= 0 && twin_[i] < 0; --j) {
      const bool same = problem.first[i] == problem.first[j] &&
                        problem.last[i] == problem.last[j] && problem.size[i] == problem.size[j];
      if (same) twin_[i] = j;
    }
  }
}

bool OffsetSearch::Run(const std::vector<int64_t>& preference, int64_t nodes) {
  const int count = problem_.count();
  preference_ = &preference;
  nodes_left_ = nodes;
  offsets.assign(count, -1);
  lowest_.assign(count, 0);
  barred_.assign(count, 0);
  crossing_.assign(problem_.load.size() + 1, 0);
  for (int i = 0; i < count; ++i) {
    for (int t = problem_.first[i] + 1; t < problem_.last[i]; ++t) ++crossing_[t];
  }
  levels_[0].buffers.resize(count);
  for (int i = 0; i < count; ++i) levels_[0].buffers[i] = i;
  return SolveParts(0, -1, 0);
}

void OffsetSearch::Blame(const Level& level, int section) {
  int count = 0;
  const auto alive = [&](int i) {
    return problem_.first[i] <= section && section < problem_.last[i];
  };
  for (int i : level.buffers) count += alive(i);
  for (int i : level.buffers) {
    if (alive(i)) failures[i] += kBlame / count;
  }
}

// Lowest offsets of a level's buffers, none below `bottom`; false if they cannot all fit.  Buffers
// at or above `ceiling` need not be tried next.
bool OffsetSearch::Bound(Level* level, int64_t bottom, int64_t* ceiling) {
  const std::vector<int>& buffers = level->buffers;
  const std::size_t count = buffers.size();
  level->low.resize(count);
  level->floating.resize(count);
  int begin = problem_.last[buffers[0]], end = 0;
  for (std::size_t a = 0; a < count; ++a) {
    const int i = buffers[a];
    const int64_t least = std::max(bottom, barred_[i]);
    level->floating[a] = lowest_[i] < least;
    level->low[a] = first_[i] = std::max(lowest_[i], least);
    begin = std::min(begin, problem_.first[i]);
    end = std::max(end, problem_.last[i]);
  }
  std::fill(floor_.begin() + begin, floor_.begin() + end, INT64_MAX);
  std::fill(rest_.begin() + begin, rest_.begin() + end, 0);
  *ceiling = INT64_MAX;
  for (std::size_t a = 0; a < count; ++a) {
    const int i = buffers[a];
    int64_t low = level->low[a];
    if (level->floating[a]) {
      int64_t support = INT64_MAX;
      for (int j : overlaps_[i]) {
        if (offsets[j] < 0) support = std::min(support, first_[j] + problem_.size[j]);
      }
      if (support == INT64_MAX) return false;
      level->low[a] = low = std::max(low, support);
    }
    const int64_t size = problem_.size[i];
    if (low + size > height_) {
      failures[i] += kBlame;
      return false;
    }
    *ceiling = std::min(*ceiling, low + size);
    for (int t = problem_.first[i]; t < problem_.last[i]; ++t) {
      floor_[t] = std::min(floor_[t], low);
      rest_[t] += size;
    }
  }
  for (int t = begin; t < end; ++t) {
    if (rest_[t] > 0 && floor_[t] + rest_[t] > height_) {
      Blame(*level, t);
      return false;
    }
  }
  return true;
}

// Where a section at the lowest floor has no slack, keep the candidates that can fill it; of several
// such sections take the one with the fewest.
void OffsetSearch::KeepFillers(Level* level) {
  int64_t least = INT64_MAX;
  int begin = static_cast<int>(problem_.load.size()), end = 0;
  for (std::size_t a = 0; a < level->buffers.size(); ++a) {
    least = std::min(least, level->low[a]);
    begin = std::min(begin, problem_.first[level->buffers[a]]);
    end = std::max(end, problem_.last[level->buffers[a]]);
  }
  for (int t = begin; t < end; ++t) {
    const bool tight = rest_[t] > 0 && floor_[t] == least && floor_[t] + rest_[t] == height_;
    fillers_[t] = tight ? 0 : -1;
  }
  for (int a : level->candidates) {
    if (level->low[a] != least) continue;
    const int i = level->buffers[a];
    for (int t = problem_.first[i]; t < problem_.last[i]; ++t) fillers_[t] += fillers_[t] >= 0;
  }
  int section = -1;
  for (int t = begin; t < end; ++t) {
    if (fillers_[t] >= 0 && (section < 0 || fillers_[t] < fillers_[section])) section = t;
  }
  if (section < 0) return;
  const auto idle = [&](int a) {
    const int i = level->buffers[a];
    return level->low[a] != least || section < problem_.first[i] || problem_.last[i] <= section;
  };
  std::vector<int>& candidates = level->candidates;
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), idle), candidates.end());
}

// Place all buffers of a level, which are one connected part.
bool OffsetSearch::Solve(std::size_t depth, int64_t bottom) {
  Level& level = levels_[depth];
  if (--nodes_left_ < 0) return false;
  work += static_cast<int64_t>(level.buffers.size());
  int64_t ceiling;
  if (!Bound(&level, bottom, &ceiling)) return false;
  level.candidates.clear();
  for (std::size_t a = 0; a < level.buffers.size(); ++a) {
    const int i = level.buffers[a];
    const bool waits = twin_[i] >= 0 && offsets[twin_[i]] < 0;
    if (!level.floating[a] && level.low[a] < ceiling && !waits) {
      level.candidates.push_back(static_cast<int>(a));
    }
  }
  if (fills_tight_) KeepFillers(&level);
  std::sort(level.candidates.begin(), level.candidates.end(), [&](int a, int b) {
    if (level.low[a] != level.low[b]) return level.low[a] < level.low[b];
    const int64_t x = (*preference_)[level.buffers[a]], y = (*preference_)[level.buffers[b]];
    return x != y ? x > y : a < b;
  });
  level.raised.clear();
  level.saved.resize(level.buffers.size());
  for (std::size_t a = 0; a < level.buffers.size(); ++a) {
    level.saved[a] = lowest_[level.buffers[a]];
  }
  bool solved = false;
  for (int a : level.candidates) {
    const int i = level.buffers[a];
    const int64_t at = level.low[a], top = at + problem_.size[i];
    offsets[i] = at;
    bool lonely = true;
    for (int j : overlaps_[i]) {
      if (offsets[j] >= 0) continue;
      lowest_[j] = std::max(lowest_[j], top);
      lonely = false;
    }
    for (int t = problem_.first[i] + 1; t < problem_.last[i]; ++t) --crossing_[t];
    solved = SolveParts(depth, a, at);
    if (solved) break;
    for (int t = problem_.first[i] + 1; t < problem_.last[i]; ++t) ++crossing_[t];
    for (std::size_t b = 0; b < level.buffers.size(); ++b) {
      lowest_[level.buffers[b]] = level.saved[b];
    }
    offsets[i] = -1;
    if (nodes_left_ < 0 || lonely) break;
    // Placed here the buffer fails: later it must rest on one that is not placed yet.
    level.raised.emplace_back(i, barred_[i]);
    barred_[i] = std::max(barred_[i], at + 1);
  }
  for (std::size_t r = level.raised.size(); r-- > 0;) {
    barred_[level.raised[r].first] = level.raised[r].second;
  }
  return solved;
}

// Solve what is left of a level without the buffer at position `placed`, part by part.
bool OffsetSearch::SolveParts(std::size_t depth, int placed, int64_t bottom) {
  const std::vector<int>& buffers = levels_[depth].buffers;
  Level& next = levels_[depth + 1];
  std::vector<int>& rest = next.buffers;
  rest.clear();
  int begin = static_cast<int>(problem_.load.size()), end = 0;
  for (std::size_t a = 0; a < buffers.size(); ++a) {
    if (static_cast<int>(a) == placed) continue;
    rest.push_back(buffers[a]);
    begin = std::min(begin, problem_.first[buffers[a]]);
    end = std::max(end, problem_.last[buffers[a]]);
  }
  if (rest.empty()) return true;
  const auto cut = std::find(crossing_.begin() + begin + 1, crossing_.begin() + end, 0);
  if (cut == crossing_.begin() + end) return Solve(depth + 1, bottom);

  std::vector<int> cuts{begin};
  for (int t = begin + 1; t < end; ++t) {
    if (crossing_[t] == 0) cuts.push_back(t);
  }
  std::vector<std::vector<int>> parts(cuts.size());
  for (int i : rest) {
    const auto after = std::upper_bound(cuts.begin(), cuts.end(), problem_.first[i]);
    parts[after - cuts.begin() - 1].push_back(i);
  }
  std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) {
    return a.size() < b.size();
  });
  std::size_t done = 0;
  for (; done < parts.size(); ++done) {
    if (parts[done].empty()) continue;
    next.buffers = parts[done];
    if (!Solve(depth + 1, bottom)) break;
  }
  if (done == parts.size()) return true;
  for (std::size_t p = 0; p < done; ++p) {
    for (int i : parts[p]) {
      offsets[i] = -1;
      for (int t = problem_.first[i] + 1; t < problem_.last[i]; ++t) ++crossing_[t];
    }
  }
  return false;
}

// Ranks of the buffers by the three given measures, the largest first.
std::vector<int64_t> Ranks(const std::vector<std::vector<int64_t>>& measures) {
  const int count = static_cast<int>(measures[0].size());
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    for (const std::vector<int64_t>& measure : measures) {
      if (measure[a] != measure[b]) return measure[a] < measure[b];
    }
    return false;
  });
  std::vector<int64_t> ranks(count);
  for (int r = 0; r < count; ++r) ranks[order[r]] = r;
  return ranks;
}

// Runs with changing preferences.  They get kNodes nodes times 1 + the square of the round's number
// modulo `period`: mostly short, now and then long.
class Restarts {
 public:
  Restarts(const OffsetProblem& problem, int64_t height, int period, bool fills_tight)
      : search_(problem, height, fills_tight), period_(period) {}

  int64_t work() const { return search_.work; }
  const std::vector<int64_t>& offsets() const { return search_.offsets; }

  // The next run, with one of the orders in turn.
  bool Run(const std::vector<std::vector<int64_t>>& orders) {
    const std::vector<int64_t>& ranks = orders[turn_];
    const int count = static_cast<int>(ranks.size());
    int64_t most = 1;
    for (int64_t f : search_.failures) most = std::max(most, f);
    const int64_t blame = round_ ? random_.Below(5) : 0, noise = round_ ? random_.Below(4) : 0;
    std::vector<int64_t> preference(count);
    for (int i = 0; i < count; ++i) {
      preference[i] = ranks[i] * 4096 / count + blame * 1024 * search_.failures[i] / most;
      if (noise) preference[i] += noise * (random_.Below(83) - 41);
    }
    const int64_t stage = round_ % period_;
    if (search_.Run(preference, (1 + stage * stage) * kNodes)) return true;
    if (++turn_ == orders.size()) {
      turn_ = 0;
      ++round_;
      for (int64_t& f : search_.failures) f = f * 4 / 5;
    }
    return false;
  }

 private:
  static constexpr int64_t kNodes = 100;

  OffsetSearch search_;
  Random random_{1};
  const int64_t period_;
  int64_t round_ = 0;
  std::size_t turn_ = 0;
};

// By mean time over seeds on the MiniMalloc problems A to F; the second solves problem K.
constexpr int kPeriod = 6, kTightPeriod = 20;
// What the first search does before the second joins, times the square of the number of buffers.
constexpr int64_t kAlone = 1200;

// The orders that searches begin with.
std::vector<std::vector<int64_t>> StartingRanks(const OffsetProblem& problem) {
  const OffsetMeasures measures(problem);
  const auto& [width, area, crowd] = measures;
  const std::vector<int64_t>& size = problem.size;
  return {
      Ranks({width, area, crowd}), Ranks({crowd, area, width}), Ranks({crowd, width, area}),
      Ranks({area, width, crowd}), Ranks({size, width, crowd}), Ranks({width, crowd, size})};
}

}  // namespace

bool SearchOffsetsAlone(const OffsetProblem& problem, int64_t height, bool fills_tight,
                        int64_t work, std::vector<int64_t>* offsets) {
  const std::vector<std::vector<int64_t>> orders = StartingRanks(problem);
  Restarts search(problem, height, fills_tight ? kTightPeriod : kPeriod, fills_tight);
  while (search.work() < work) {
    if (!search.Run(orders)) continue;
    *offsets = search.offsets();
    return true;
  }
  return false;
}

bool SearchOffsets(const OffsetProblem& problem, int64_t height, int64_t* work,
                   std::vector<int64_t>* offsets) {
  const int count = problem.count();
  const std::vector<std::vector<int64_t>> orders = StartingRanks(problem);
  Restarts free(problem, height, kPeriod, false), tight(problem, height, kTightPeriod, true);
  const int64_t alone = kAlone * count * count;
  while (true) {
    Restarts& next = free.work() <= alone + tight.work() ? free : tight;
    const bool found = next.Run(orders);
    const int64_t used = free.work() + tight.work();
    if (found) {
      *offsets = next.offsets();
      *work -= used;
      return true;
    }
    if (used >= *work) {
      *work = 0;
      return false;
    }
  }
}

}  // namespace relax_disc
