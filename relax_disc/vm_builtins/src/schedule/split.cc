// The search: seeds, then splits at minimum cuts; see analysis/schedule/split.py.
#include <algorithm>
#include <set>

#include "schedule/schedule.h"

namespace relax_disc {
namespace {

constexpr int kMaxDepth = 12;       // of nested splits
constexpr int kMaxRounds = 12;      // splits of one part, one after the other
constexpr int kDeep = 3;            // depth from which a split is tried once only
constexpr int kTries = 8;           // splits tried at one op above that
constexpr int kFirstReach = 8;      // steps of the first window on either side of the peak
constexpr int kProofRounds = 6;     // of finding edges
constexpr int64_t kFirstShare = 8;  // part of the work that splitting alone may use at first
constexpr int64_t kBoundShare = 8;  // part of the work left that raising the bound may use
constexpr int64_t kProofShare = 4;  // part of the work left that a proof may use
constexpr int64_t kSplitShare = 4;  // part of the work left that one split of the whole may use

// How hard a window is searched: part of the work left that it may use, and as at which depth.
struct Effort {
  int64_t share;
  int depth;
};
constexpr Effort kEfforts[] = {{64, 3}, {16, 2}};

using Force = std::vector<std::pair<int32_t, Side>>;
using Order = std::vector<int32_t>;

class SplitSearcher {
 public:
  explicit SplitSearcher(SearchLimit* limit) : limit_(limit) {}

  Schedule Solve(const ScheduleProblem& problem, const std::vector<Order>* starts, int64_t target,
                 int depth) {
    Schedule result;
    result.bound = *std::max_element(problem.base.begin(), problem.base.end());
    result.peak = result.bound;
    for (int32_t op = 0; op < problem.ops; ++op) result.order.push_back(op);
    if (problem.ops == 0) return result;
    Peak peak = Measure(problem, result.order);
    Seed(problem, starts, target, depth, &peak, &result.order);
    if (depth == 0) {
      const int64_t saved = limit_->Grant(kFirstShare);
      SplitRepeatedly(problem, target, depth, &peak, &result);
      limit_->work_left += saved;
      RaiseBound(problem, target, peak, &result);
      for (const Effort& effort : kEfforts) Polish(problem, target, effort, &peak, &result);
      RaiseBound(problem, target, peak, &result);
      Prove(problem, target, &peak, &result);
    } else {
      SplitRepeatedly(problem, target, depth, &peak, &result);
    }
    result.peak = peak.bytes;
    result.peak_op = peak.op;
    return result;
  }

 private:
  Peak Measure(const ScheduleProblem& problem, const Order& order) {
    limit_->work_left -= int64_t{problem.points} * (problem.ops + problem.buffers) +
                         problem.touch.begin.back();
    return PeakOf(problem, order);
  }

  void Seed(const ScheduleProblem& problem, const std::vector<Order>* starts, int64_t target,
            int depth, Peak* peak, Order* order) {
    auto consider = [&](Order candidate) {
      const Peak found = Measure(problem, candidate);
      if (found.bytes < peak->bytes) {
        *peak = found;
        *order = std::move(candidate);
      }
      return peak->bytes <= target;
    };
    if (starts) {
      for (const Order& start : *starts) {
        if (consider(start)) return;
      }
    }
    if (problem.ops == 1) return;
    const int64_t cost = 8 * int64_t{problem.touch.begin.back()} + problem.ops;
    for (int32_t point = 0; point < problem.points; ++point) {
      if (peak->bytes <= target || limit_->Exhausted()) return;
      limit_->work_left -= 3 * cost;
      if (consider(ListOrder(problem, point, false))) return;
      if (consider(ListOrder(problem, point, true))) return;
      if (consider(DepthFirstOrder(problem, point))) return;
    }
    if (depth == 0) consider(LevelOrder(problem));
  }

  // Split at the peak as long as it helps.
  void SplitRepeatedly(const ScheduleProblem& problem, int64_t target, int depth, Peak* peak,
                       Schedule* result) {
    std::set<std::pair<int32_t, int32_t>> tried;
    for (int round = 0; round < kMaxRounds && peak->bytes > target && depth <= kMaxDepth; ++round) {
      if (!tried.insert({peak->op, peak->point}).second) break;
      if (!Improve(problem, target, depth, peak, result)) break;
    }
  }

  // Cut at the ops with the most live bytes: no op's cut is above what is live during it.
  void RaiseBound(const ScheduleProblem& problem, int64_t target, const Peak& peak,
                  Schedule* result) {
    const int64_t saved = limit_->Grant(kBoundShare);
    for (int32_t point = 0; point < problem.points; ++point) {
      const std::vector<int64_t> live = LiveDuring(problem, result->order, point);
      Order steps(problem.ops);
      for (int32_t k = 0; k < problem.ops; ++k) steps[k] = k;
      std::stable_sort(steps.begin(), steps.end(),
                       [&](int32_t a, int32_t b) { return live[a] > live[b]; });
      for (int32_t step : steps) {
        const bool settled = peak.bytes <= std::max(target, result->bound);
        if (settled || live[step] <= result->bound || limit_->Exhausted()) break;
        const Cut cut = CutInPlace(problem, point, result->order[step], false, {});
        result->bound = std::max(result->bound, cut.bytes);
      }
    }
    limit_->work_left += saved;
  }

  // Find edges that every better order has, and search with them, until there is no such order.
  void Prove(const ScheduleProblem& problem, int64_t target, Peak* peak, Schedule* result) {
    const int64_t saved = limit_->Grant(kProofShare);
    ProveWithin(problem, target, peak, result);
    limit_->work_left += saved;
  }

  void ProveWithin(const ScheduleProblem& problem, int64_t target, Peak* peak, Schedule* result) {
    ScheduleProblem tight = problem;
    Order order = result->order;
    for (int round = 0; round < kProofRounds && problem.points == 1; ++round) {
      // Where the bound is far off a proof is out of reach.
      const bool far = result->bound < peak->bytes - peak->bytes / 10;
      if (far || peak->bytes <= std::max(target, result->bound) || limit_->Exhausted()) return;
      int64_t bound = result->bound;
      const auto pairs = ForcedPairs(tight, order, peak->bytes, limit_, &bound);
      result->bound = std::min(bound, peak->bytes);
      if (pairs.empty() || result->bound >= peak->bytes) return;
      tight = Tightened(tight, pairs, order);
      if (tight.ops < problem.ops) {  // a cycle
        result->bound = peak->bytes;
        return;
      }
      const int64_t saved = limit_->Grant(kSplitShare);
      Schedule found = Solve(tight, nullptr, target, 1);
      const Peak top = Measure(tight, found.order);
      RaiseBound(tight, target, top, &found);
      limit_->work_left += saved;
      result->bound = std::max(result->bound, std::min(found.bound, peak->bytes));
      order = found.order;
      if (found.peak >= peak->bytes) continue;
      for (int32_t& op : found.order) op = tight.id[op];
      *peak = Measure(problem, found.order);
      result->order = std::move(found.order);
    }
  }

  // Improve windows around the peak, and where none helps split the whole, as long as it helps.
  void Polish(const ScheduleProblem& problem, int64_t target, const Effort& effort, Peak* peak,
              Schedule* result) {
    while (peak->bytes > target && !limit_->Exhausted()) {
      const Cut cut = CutInPlace(problem, peak->point, peak->op, false, {});
      result->bound = std::max(result->bound, cut.bytes);
      const int64_t goal = std::max(target, result->bound);
      while (peak->bytes > goal && ImproveWindow(problem, goal, effort, peak, &result->order)) {
      }
      const int64_t saved = limit_->Grant(kSplitShare);
      const bool better = Improve(problem, target, 0, peak, result);
      limit_->work_left += saved;
      if (!better) return;
    }
  }

  // Solve a window of steps around the peak anew.  The steps outside are not affected.
  bool ImproveWindow(const ScheduleProblem& problem, int64_t goal, const Effort& effort, Peak* peak,
                     Order* order) {
    const int32_t n = problem.ops;
    const int32_t at =
        static_cast<int32_t>(std::find(order->begin(), order->end(), peak->op) - order->begin());
    for (int64_t reach = kFirstReach; reach < 2 * int64_t{n} && !limit_->Exhausted(); reach *= 2) {
      const int32_t low = static_cast<int32_t>(std::max<int64_t>(0, at - reach));
      const int32_t high = static_cast<int32_t>(std::min<int64_t>(n, at + reach + 1));
      std::vector<char> done(n, 0);
      for (int32_t k = 0; k < low; ++k) done[(*order)[k]] = 1;
      const Order window(order->begin() + low, order->begin() + high);
      limit_->work_left -= 4 * int64_t{problem.touch.begin.back()};
      // Below the peak outside there is nothing to gain.
      const int64_t outside = PeakOf(problem, *order, low, high).bytes;
      const int64_t enough = std::max(goal, std::min(outside, peak->bytes - 1));
      const int64_t saved = limit_->Grant(effort.share);
      const Schedule solved =
          Solve(PartOf(problem, window, done), nullptr, enough, effort.depth);
      limit_->work_left += saved;
      if (solved.peak >= peak->bytes) continue;
      for (int32_t k = low; k < high; ++k) (*order)[k] = window[solved.order[k - low]];
      *peak = Measure(problem, *order);
      return true;
    }
    return false;
  }

  // One better order around the op at the peak; false if there is none or none was found.
  bool Improve(const ScheduleProblem& problem, int64_t target, int depth, Peak* peak,
               Schedule* result) {
    const int32_t op = peak->op, point = peak->point;
    for (bool late : {false, true}) {
      Force force;
      const int tries = depth < kDeep ? kTries : 1;
      for (int attempt = 0; attempt < tries; ++attempt) {
        if (limit_->Exhausted()) return false;
        const Cut cut = CutInPlace(problem, point, op, late, force);
        if (!cut.possible) break;
        if (force.empty()) result->bound = std::max(result->bound, cut.bytes);
        if (cut.bytes >= peak->bytes) {
          if (force.empty()) return false;  // the op cannot run in less: optimal
          break;
        }
        const int64_t goal = std::max(target, result->bound);
        const int32_t blocked = Split(problem, op, cut.done, goal, depth, peak, &result->order);
        if (blocked < 0) return true;
        if (blocked == op) break;
        force.emplace_back(blocked, cut.done[blocked] ? kAfter : kBefore);
      }
    }
    return false;
  }

  // Solve the ops before and after `op` apart.  Returns -1 if the whole got better, else the op
  // that keeps its part at the peak, or `op` where only the whole is no better.
  int32_t Split(const ScheduleProblem& problem, int32_t op, const std::vector<char>& done,
                int64_t goal, int depth, Peak* peak, Order* order) {
    Order before, after;
    for (int32_t v : *order) {
      if (v != op) (done[v] ? before : after).push_back(v);
    }
    Order joined;
    const std::vector<char> none(problem.ops, 0);
    for (const Order* side : {&before, &after}) {
      limit_->work_left -= 3 * int64_t{problem.touch.begin.back()};
      const ScheduleProblem part = PartOf(problem, *side, side == &before ? none : done);
      const Schedule solved = Solve(part, nullptr, goal, depth + 1);
      if (solved.peak >= peak->bytes) {
        return solved.peak_op >= 0 ? (*side)[solved.peak_op] : op;
      }
      for (int32_t v : solved.order) joined.push_back((*side)[v]);
      if (side == &before) joined.push_back(op);
    }
    const Peak found = Measure(problem, joined);
    if (found.bytes >= peak->bytes) return op;
    *peak = found;
    *order = std::move(joined);
    return -1;
  }

  // LeastCut with what in-place pairs can save at the op.  The bytes are still a lower bound.
  Cut CutInPlace(const ScheduleProblem& problem, int32_t point, int32_t op, bool late,
                 const Force& force) {
    Cut best = Counted(LeastCut(problem, point, op, late, force));
    Order sources;
    const int64_t saving = SavingAt(problem, point, op, &sources);
    if (!best.possible) return best;
    for (int32_t source : sources) {
      // The output takes the source's place only where all other users of it run before.
      Force last = force;
      for (const int32_t* u = problem.users.from(source); u != problem.users.to(source); ++u) {
        if (*u != op) last.emplace_back(*u, kBefore);
      }
      Cut cut = Counted(LeastCut(problem, point, op, late, last));
      cut.bytes -= saving;
      if (cut.possible && cut.bytes < best.bytes) best = std::move(cut);
    }
    return best;
  }

  Cut Counted(Cut cut) {
    limit_->work_left -= cut.work;
    return cut;
  }

  SearchLimit* limit_;
};

}  // namespace

int64_t SearchLimit::Grant(int64_t share) {
  const int64_t granted = std::max<int64_t>(work_left, 0) / share;
  const int64_t saved = work_left - granted;
  work_left = granted;
  return saved;
}

bool SearchLimit::Exhausted() {
  if (work_left <= 0) return true;
  timed_out = timed_out || std::chrono::steady_clock::now() > deadline;
  return timed_out;
}

Schedule SplitSearch(const ScheduleProblem& problem,
                     const std::vector<std::vector<int32_t>>& starts, int64_t target,
                     SearchLimit* limit) {
  return SplitSearcher(limit).Solve(problem, &starts, target, 0);
}

}  // namespace relax_disc
