// Maximum flow and minimum cut in a network of the scheduler.
#ifndef RELAX_DISC_VM_BUILTINS_SCHEDULE_FLOW_H_
#define RELAX_DISC_VM_BUILTINS_SCHEDULE_FLOW_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace relax_disc {

constexpr int64_t kNoCapacityLimit = int64_t{1} << 61;

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

  // How much more flow there is once `node` is joined to the source (or the sink), or at least
  // `enough`: by shortest paths from it, which stay near it.  Changes nothing.
  int64_t FlowFrom(int32_t node, bool as_source, int64_t enough) {
    const int32_t goal = as_source ? 1 : 0;
    arrived_.resize(nodes_);
    seen_.resize(nodes_, 0);
    std::vector<std::pair<int32_t, int64_t>> pushed;
    int64_t flow = 0;
    while (flow < enough) {
      ++stamp_;
      queue_.assign(1, node);
      seen_[node] = stamp_;
      for (size_t head = 0; head < queue_.size() && seen_[goal] != stamp_; ++head) {
        const int32_t u = queue_[head];
        work_ += begin_[u + 1] - begin_[u];
        for (int32_t a = begin_[u]; a < begin_[u + 1]; ++a) {
          const int32_t arc = as_source ? a : reverse_[a];
          if (rest_[arc] > 0 && seen_[head_[a]] != stamp_) {
            seen_[head_[a]] = stamp_;
            arrived_[head_[a]] = arc;
            queue_.push_back(head_[a]);
          }
        }
      }
      if (seen_[goal] != stamp_) break;
      int64_t amount = kNoCapacityLimit;
      path_.clear();
      for (int32_t v = goal; v != node;) {
        const int32_t arc = arrived_[v];
        path_.push_back(arc);
        amount = std::min(amount, rest_[arc]);
        v = as_source ? head_[reverse_[arc]] : head_[arc];
      }
      for (int32_t arc : path_) {
        rest_[arc] -= amount;
        rest_[reverse_[arc]] += amount;
        pushed.emplace_back(arc, amount);
      }
      flow += amount;
    }
    for (const auto& [arc, amount] : pushed) {
      rest_[arc] += amount;
      rest_[reverse_[arc]] -= amount;
    }
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
        int64_t pushed = kNoCapacityLimit;
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
  std::vector<int32_t> arrived_, seen_;
  int32_t stamp_ = 0;
  std::vector<int64_t> capacity_, rest_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_SCHEDULE_FLOW_H_
