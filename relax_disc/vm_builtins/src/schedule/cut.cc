// The least live memory while one op runs, as a minimum cut.
//
// Nodes: the ops that are free to run before or after `op`.  An arc v -> w without limit for every
// w that v needs; for every buffer an arc of its size from its producer to a node from which arcs
// without limit lead to its readers.  The source side runs before: a buffer is paid for when its
// producer does and some reader does not.
#include <algorithm>

#include "schedule/schedule.h"

namespace relax_disc {
namespace {

constexpr int64_t kNoLimit = kNoCapacityLimit;

// Put an op and all that it entails on a side; false if some of it is on the other side.
bool PutOn(Side side, int32_t op, const ScheduleProblem& problem, std::vector<char>* state) {
  const Rows& rows = side == kBefore ? problem.need : problem.next;
  std::vector<int32_t> stack{op};
  if ((*state)[op] != kFree && (*state)[op] != side) return false;
  (*state)[op] = side;
  while (!stack.empty()) {
    const int32_t u = stack.back();
    stack.pop_back();
    for (const int32_t* v = rows.from(u); v != rows.to(u); ++v) {
      if ((*state)[*v] == side) continue;
      if ((*state)[*v] != kFree) return false;
      (*state)[*v] = side;
      stack.push_back(*v);
    }
  }
  return true;
}

}  // namespace

CutNetwork::CutNetwork(const ScheduleProblem& problem, int32_t point, int32_t op,
                       const std::vector<std::pair<int32_t, Side>>& force)
    : state_(problem.ops, kFree), node_(problem.ops), network_(0) {
  PutOn(kAfter, op, problem, &state_);
  state_[op] = kFree;
  PutOn(kBefore, op, problem, &state_);
  for (const auto& [other, side] : force) {
    if (!PutOn(side, other, problem, &state_)) return;
  }
  possible_ = true;

  int32_t nodes = 2;
  for (int32_t v = 0; v < problem.ops; ++v) {
    node_[v] = state_[v] == kFree ? nodes++ : state_[v] == kBefore ? 0 : 1;
  }
  network_ = FlowNetwork(nodes);
  const int64_t* size = problem.sizes(point);
  bytes_ = problem.base[point] + problem.extras(point)[op];
  std::vector<int32_t> free;
  for (int32_t b = 0; b < problem.buffers; ++b) {
    bool before = problem.ready[b], after = problem.stays[b], own = false;
    free.clear();
    for (const int32_t* u = problem.users.from(b); u != problem.users.to(b); ++u) {
      own |= *u == op;
      before |= state_[*u] == kBefore;
      after |= state_[*u] == kAfter;
      if (state_[*u] == kFree) free.push_back(*u);
    }
    if (own || (before && after)) {
      bytes_ += size[b];
      continue;
    }
    if (free.empty() || size[b] == 0) continue;
    // Without `before` the producer is free, and it is the first of them.
    const int32_t from = before ? 0 : node_[free[0]];
    const size_t readers = before ? 0 : 1;
    if (after) {
      network_.AddArc(from, 1, size[b]);
    } else if (free.size() == readers + 1) {
      network_.AddArc(from, node_[free[readers]], size[b]);
    } else if (free.size() > readers) {
      const int32_t middle = network_.AddNode();
      network_.AddArc(from, middle, size[b]);
      for (size_t k = readers; k < free.size(); ++k) {
        network_.AddArc(middle, node_[free[k]], kNoLimit);
      }
    }
  }
  for (int32_t v = 0; v < problem.ops; ++v) {
    if (state_[v] != kFree) continue;
    for (const int32_t* w = problem.need.from(v); w != problem.need.to(v); ++w) {
      if (state_[*w] == kFree) network_.AddArc(node_[v], node_[*w], kNoLimit);
    }
  }
  bytes_ += network_.MaximumFlow();
  own_work_ = problem.touch.begin.back();
}

std::vector<char> CutNetwork::Done(bool late) {
  const std::vector<char> side = network_.SourceSide(late);
  std::vector<char> done(state_.size());
  for (size_t v = 0; v < state_.size(); ++v) {
    done[v] = state_[v] == kBefore || (state_[v] == kFree && side[node_[v]]);
  }
  return done;
}

int64_t CutNetwork::BytesWith(int32_t other, Side side, int64_t enough) {
  if (state_[other] != kFree) return state_[other] == side ? bytes_ : kNoLimit;
  return bytes_ + network_.FlowFrom(node_[other], side == kBefore, enough - bytes_);
}

int64_t SavingAt(const ScheduleProblem& problem, int32_t point, int32_t op,
                 std::vector<int32_t>* sources) {
  const int64_t* size = problem.sizes(point);
  int64_t saving = 0;
  std::vector<int32_t> targets;
  for (const int32_t* i = problem.pair.from(op); i != problem.pair.to(op); i += 2) {
    if (size[i[0]] != size[i[1]] || problem.stays[i[0]]) continue;
    if (std::find(targets.begin(), targets.end(), i[1]) == targets.end()) {
      targets.push_back(i[1]);
      saving += size[i[1]];
    }
    if (std::find(sources->begin(), sources->end(), i[0]) == sources->end()) {
      sources->push_back(i[0]);
    }
  }
  return saving;
}

Cut LeastCut(const ScheduleProblem& problem, int32_t point, int32_t op, bool late,
             const std::vector<std::pair<int32_t, Side>>& force) {
  Cut cut;
  CutNetwork network(problem, point, op, force);
  if (!network.possible()) return cut;
  cut.possible = true;
  cut.bytes = network.bytes();
  cut.done = network.Done(late);
  cut.work = network.work();
  return cut;
}

}  // namespace relax_disc
