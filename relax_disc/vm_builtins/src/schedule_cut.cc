// The least live memory while one op runs, as a minimum cut.
//
// Nodes: the ops that are free to run before or after `op`.  An arc v -> w without limit for every w
// that v needs; for every buffer an arc of its size from its producer to a node from which arcs
// without limit lead to its readers.  The source side runs before: a buffer is paid for when its
// producer does and some reader does not.
#include <algorithm>
#include <climits>

#include "schedule.h"

namespace relax_disc {
namespace {

constexpr int64_t kNoLimit = int64_t{1} << 61;

// Dinic's maximum flow from node 0 to node 1.
class FlowNetwork {
 public:
  explicit FlowNetwork(int32_t nodes) : nodes_(nodes) {}

  int32_t AddNode() { return nodes_++; }
  void AddArc(int32_t from, int32_t to, int64_t capacity) {
    from_.push_back(from);
    to_.push_back(to);
    capacity_.push_back(capacity);
  }

  int64_t MaximumFlow() {
    Build();
    int64_t flow = 0;
    while (FindLevels()) flow += Augment();
    return flow;
  }

  // Nodes on the source side of the least cut that is nearest the source, or, if late, the sink.
  std::vector<char> SourceSide(bool late) {
    std::vector<char> reached(nodes_, 0);
    std::vector<int32_t> queue{late ? 1 : 0};
    reached[queue[0]] = 1;
    for (size_t head = 0; head < queue.size(); ++head) {
      const int32_t u = queue[head];
      for (int32_t a = begin_[u]; a < begin_[u + 1]; ++a) {
        const int64_t open = late ? rest_[reverse_[a]] : rest_[a];
        if (open > 0 && !reached[head_[a]]) {
          reached[head_[a]] = 1;
          queue.push_back(head_[a]);
        }
      }
    }
    if (late) {
      for (char& r : reached) r = !r;
    }
    return reached;
  }

  int64_t work() const { return work_; }

 private:
  // Arcs sorted by tail; each has its reverse.
  void Build() {
    const size_t count = from_.size();
    begin_.assign(nodes_ + 1, 0);
    for (size_t a = 0; a < count; ++a) {
      ++begin_[from_[a] + 1];
      ++begin_[to_[a] + 1];
    }
    for (int32_t u = 0; u < nodes_; ++u) begin_[u + 1] += begin_[u];
    head_.resize(2 * count);
    rest_.resize(2 * count);
    reverse_.resize(2 * count);
    std::vector<int32_t> at(begin_.begin(), begin_.end() - 1);
    for (size_t a = 0; a < count; ++a) {
      const int32_t forth = at[from_[a]]++, back = at[to_[a]]++;
      head_[forth] = to_[a];
      rest_[forth] = capacity_[a];
      reverse_[forth] = back;
      head_[back] = from_[a];
      rest_[back] = 0;
      reverse_[back] = forth;
    }
    work_ += static_cast<int64_t>(2 * count);
  }

  // Distances to the sink over open arcs; false if the source cannot reach it.
  bool FindLevels() {
    level_.assign(nodes_, -1);
    level_[1] = 0;
    queue_.assign(1, 1);
    for (size_t head = 0; head < queue_.size(); ++head) {
      const int32_t u = queue_[head];
      work_ += begin_[u + 1] - begin_[u];
      for (int32_t a = begin_[u]; a < begin_[u + 1]; ++a) {
        const int32_t v = head_[a];
        if (level_[v] < 0 && rest_[reverse_[a]] > 0) {
          level_[v] = level_[u] + 1;
          queue_.push_back(v);
        }
      }
    }
    return level_[0] >= 0;
  }

  // A blocking flow along arcs that lead one level down.
  int64_t Augment() {
    next_.assign(begin_.begin(), begin_.end() - 1);
    path_.clear();
    int64_t flow = 0;
    int32_t u = 0;
    while (true) {
      if (u == 1) {
        int64_t pushed = kNoLimit;
        for (int32_t a : path_) pushed = std::min(pushed, rest_[a]);
        size_t full = path_.size();
        for (size_t k = path_.size(); k-- > 0;) {
          rest_[path_[k]] -= pushed;
          rest_[reverse_[path_[k]]] += pushed;
          if (rest_[path_[k]] == 0) full = k;
        }
        work_ += static_cast<int64_t>(path_.size());
        flow += pushed;
        u = head_[reverse_[path_[full]]];
        path_.resize(full);
        continue;
      }
      int32_t& a = next_[u];
      const int32_t start = a;
      while (a < begin_[u + 1] && !(rest_[a] > 0 && level_[head_[a]] == level_[u] - 1)) ++a;
      work_ += a - start + 1;
      if (a < begin_[u + 1]) {
        path_.push_back(a);
        u = head_[a];
      } else if (path_.empty()) {
        return flow;
      } else {
        level_[u] = -1;
        u = head_[reverse_[path_.back()]];
        path_.pop_back();
        ++next_[u];
      }
    }
  }

  int32_t nodes_;
  int64_t work_ = 0;
  std::vector<int32_t> from_, to_, begin_, head_, reverse_, level_, queue_, next_, path_;
  std::vector<int64_t> capacity_, rest_;
};

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

Cut LeastCut(const ScheduleProblem& problem, int32_t point, int32_t op, bool late,
             const std::vector<std::pair<int32_t, Side>>& force) {
  Cut cut;
  std::vector<char> state(problem.ops, kFree);
  PutOn(kAfter, op, problem, &state);
  state[op] = kFree;
  PutOn(kBefore, op, problem, &state);
  for (const auto& [other, side] : force) {
    if (!PutOn(side, other, problem, &state)) return cut;
  }
  cut.possible = true;

  std::vector<int32_t> node(problem.ops);
  int32_t nodes = 2;
  for (int32_t v = 0; v < problem.ops; ++v) {
    node[v] = state[v] == kFree ? nodes++ : state[v] == kBefore ? 0 : 1;
  }
  FlowNetwork network(nodes);
  const int64_t* size = problem.sizes(point);
  int64_t fixed = problem.base[point] + problem.extras(point)[op];
  std::vector<int32_t> free;
  for (int32_t b = 0; b < problem.buffers; ++b) {
    bool before = problem.ready[b], after = problem.stays[b], own = false;
    free.clear();
    for (const int32_t* u = problem.users.from(b); u != problem.users.to(b); ++u) {
      own |= *u == op;
      before |= state[*u] == kBefore;
      after |= state[*u] == kAfter;
      if (state[*u] == kFree) free.push_back(*u);
    }
    if (own || (before && after)) {
      fixed += size[b];
      continue;
    }
    if (free.empty() || size[b] == 0) continue;
    // Without `before` the producer is free, and it is the first of them.
    const int32_t from = before ? 0 : node[free[0]];
    const size_t readers = before ? 0 : 1;
    if (after) {
      network.AddArc(from, 1, size[b]);
    } else if (free.size() == readers + 1) {
      network.AddArc(from, node[free[readers]], size[b]);
    } else if (free.size() > readers) {
      const int32_t middle = network.AddNode();
      network.AddArc(from, middle, size[b]);
      for (size_t k = readers; k < free.size(); ++k) {
        network.AddArc(middle, node[free[k]], kNoLimit);
      }
    }
  }
  for (int32_t v = 0; v < problem.ops; ++v) {
    if (state[v] != kFree) continue;
    for (const int32_t* w = problem.need.from(v); w != problem.need.to(v); ++w) {
      if (state[*w] == kFree) network.AddArc(node[v], node[*w], kNoLimit);
    }
  }
  cut.bytes = fixed + network.MaximumFlow();
  const std::vector<char> side = network.SourceSide(late);
  cut.done.resize(problem.ops);
  for (int32_t v = 0; v < problem.ops; ++v) {
    cut.done[v] = state[v] == kBefore || (state[v] == kFree && side[node[v]]);
  }
  cut.work = network.work() + problem.touch.begin.back();
  return cut;
}

}  // namespace relax_disc
