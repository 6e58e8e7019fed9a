// What every order with a smaller peak has in common.
//
// Force a free op to the side of an op's cut that it is not on.  If the cut is then no less than
// the best peak known, every better order has the two the other way round: a new edge.
#include <algorithm>
#include <functional>
#include <queue>

#include "schedule/schedule.h"

namespace relax_disc {
namespace {

constexpr int32_t kProbedOps = 64;  // at which cuts are made in one round

// A cut with what in-place pairs can save there.
struct Option {
  CutNetwork network;
  int64_t saving;
};

std::vector<Option> OptionsAt(const ScheduleProblem& problem, int32_t op) {
  std::vector<int32_t> sources;
  const int64_t saving = SavingAt(problem, 0, op, &sources);
  std::vector<Option> options;
  options.push_back({CutNetwork(problem, 0, op, {}), 0});
  for (int32_t source : sources) {
    std::vector<std::pair<int32_t, Side>> last;
    for (const int32_t* u = problem.users.from(source); u != problem.users.to(source); ++u) {
      if (*u != op) last.emplace_back(*u, kBefore);
    }
    CutNetwork network(problem, 0, op, last);
    if (network.possible()) options.push_back({std::move(network), saving});
  }
  return options;
}

}  // namespace

std::vector<std::pair<int32_t, int32_t>> ForcedPairs(const ScheduleProblem& problem,
                                                     const std::vector<int32_t>& order,
                                                     int64_t peak, SearchLimit* limit,
                                                     int64_t* bound) {
  std::vector<std::pair<int32_t, int32_t>> pairs;
  const std::vector<int64_t> live = LiveDuring(problem, order, 0);
  std::vector<int32_t> steps(problem.ops);
  for (int32_t k = 0; k < problem.ops; ++k) steps[k] = k;
  std::stable_sort(steps.begin(), steps.end(),
                   [&](int32_t a, int32_t b) { return live[a] > live[b]; });
  steps.resize(std::min(problem.ops, kProbedOps));
  for (int32_t step : steps) {
    const int32_t op = order[step];
    std::vector<Option> options = OptionsAt(problem, op);
    for (const Option& option : options) limit->work_left -= option.network.work();
    Option* least = &options[0];
    for (Option& option : options) {
      if (option.network.bytes() - option.saving < least->network.bytes() - least->saving) {
        least = &option;
      }
    }
    *bound = std::max(*bound, least->network.bytes() - least->saving);
    if (*bound >= peak) return pairs;
    const std::vector<char> done = least->network.Done(false);
    // If an op may stand on the other side, so may all that this entails less of: of the done ops
    // those after it, of the others those before it.
    std::vector<char> may(problem.ops, 0);
    auto probe = [&](int32_t other, const Rows& stronger, Side side) {
      if (other == op || !options[0].network.is_free(other)) return;
      for (const int32_t* j = stronger.from(other); j != stronger.to(other); ++j) {
        if (may[*j]) {
          may[other] = 1;
          return;
        }
      }
      for (Option& option : options) {
        const int64_t before = option.network.work(), enough = peak + option.saving;
        may[other] = option.network.BytesWith(other, side, enough) < enough;
        limit->work_left -= option.network.work() - before;
        if (may[other]) return;
      }
      pairs.emplace_back(side == kAfter ? other : op, side == kAfter ? op : other);
    };
    for (int32_t other = 0; other < problem.ops && !limit->Exhausted(); ++other) {
      if (done[other]) probe(other, problem.need, kAfter);
    }
    for (int32_t other = problem.ops; other-- > 0 && !limit->Exhausted();) {
      if (!done[other]) probe(other, problem.next, kBefore);
    }
    if (limit->Exhausted()) break;
  }
  return pairs;
}

ScheduleProblem Tightened(const ScheduleProblem& problem,
                          const std::vector<std::pair<int32_t, int32_t>>& edges,
                          const std::vector<int32_t>& order) {
  const int32_t n = problem.ops;
  std::vector<std::vector<int32_t>> need(n);
  for (int32_t op = 0; op < n; ++op) need[op].assign(problem.need.from(op), problem.need.to(op));
  for (const auto& [first, second] : edges) need[second].push_back(first);
  ScheduleProblem copy = problem;
  copy.need = Rows();
  for (std::vector<int32_t>& row : need) {
    std::sort(row.begin(), row.end());
    row.erase(std::unique(row.begin(), row.end()), row.end());
    copy.need.item.insert(copy.need.item.end(), row.begin(), row.end());
    copy.need.close();
  }
  copy.next = Transposed(copy.need, n);
  std::vector<int32_t> position(n), waits(n), legal;
  for (int32_t k = 0; k < n; ++k) position[order[k]] = k;
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<int32_t>> ready;
  for (int32_t op = 0; op < n; ++op) {
    waits[op] = copy.need.length(op);
    if (waits[op] == 0) ready.push(position[op]);
  }
  while (!ready.empty()) {
    const int32_t op = order[ready.top()];
    ready.pop();
    legal.push_back(op);
    for (const int32_t* j = copy.next.from(op); j != copy.next.to(op); ++j) {
      if (--waits[*j] == 0) ready.push(position[*j]);
    }
  }
  if (static_cast<int32_t>(legal.size()) < n) return ScheduleProblem();
  return PartOf(copy, legal, std::vector<char>(n, 0));
}

}  // namespace relax_disc
