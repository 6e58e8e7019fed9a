// Seeds of the search: list scheduling in both directions, depth-first and level order.
#include <algorithm>
#include <functional>
#include <queue>

#include "schedule/schedule.h"

namespace relax_disc {

std::vector<int32_t> ListOrder(const ScheduleProblem& problem, int32_t point, bool reverse) {
  const Rows& need = reverse ? problem.next : problem.need;
  const Rows& next = reverse ? problem.need : problem.next;
  const std::vector<char>& stays = reverse ? problem.ready : problem.stays;
  std::vector<char> seen = reverse ? problem.stays : problem.ready;
  const int64_t* size = problem.sizes(point);
  const int32_t sign = reverse ? -1 : 1;
  const int32_t n = problem.ops;
  std::vector<int32_t> left(problem.buffers), waits(n), order;
  for (int32_t b = 0; b < problem.buffers; ++b) left[b] = problem.users.length(b);

  // Bytes that running the op next adds to what is live after it.
  auto growth = [&](int32_t op) {
    int64_t sum = 0;
    for (const int32_t* b = problem.touch.from(op); b != problem.touch.to(op); ++b) {
      if (!seen[*b]) sum += size[*b];
      if (left[*b] == 1 && !stays[*b]) sum -= size[*b];
    }
    return sum;
  };
  using Entry = std::pair<int64_t, int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
  std::vector<char> ready(n, 0);
  std::vector<int64_t> current(n, 0);
  auto push = [&](int32_t op) {
    ready[op] = 1;
    current[op] = growth(op);
    queue.emplace(current[op], sign * op);
  };
  for (int32_t op = 0; op < n; ++op) {
    waits[op] = need.length(op);
    if (waits[op] == 0) push(op);
  }
  while (!queue.empty()) {
    const auto [grows, key] = queue.top();
    queue.pop();
    const int32_t op = sign * key;
    if (!ready[op] || current[op] != grows) continue;
    ready[op] = 0;
    order.push_back(op);
    for (const int32_t* b = problem.touch.from(op); b != problem.touch.to(op); ++b) {
      const bool fresh = !seen[*b];
      seen[*b] = 1;
      if (!fresh && left[*b] != 2) {
        --left[*b];
        continue;
      }
      --left[*b];
      for (const int32_t* u = problem.users.from(*b); u != problem.users.to(*b); ++u) {
        if (ready[*u]) push(*u);
      }
    }
    for (const int32_t* j = next.from(op); j != next.to(op); ++j) {
      if (--waits[*j] == 0) push(*j);
    }
  }
  if (reverse) std::reverse(order.begin(), order.end());
  return order;
}

std::vector<int32_t> DepthFirstOrder(const ScheduleProblem& problem, int32_t point) {
  const int32_t n = problem.ops;
  const int64_t* size = problem.sizes(point);
  // Bytes made by an op and below it (shared parts count once for each path, as doubles: no
  // overflow on deep graphs).
  std::vector<double> total(n, 0.0);
  for (int32_t b = 0; b < problem.buffers; ++b) {
    if (!problem.ready[b]) total[*problem.users.from(b)] += static_cast<double>(size[b]);
  }
  for (int32_t op = 0; op < n; ++op) {  // indices are a legal order
    for (const int32_t* j = problem.need.from(op); j != problem.need.to(op); ++j) {
      total[op] += total[*j];
    }
  }
  auto largest_first = [&](int32_t a, int32_t b) {
    return total[a] != total[b] ? total[a] > total[b] : a < b;
  };
  auto sorted_needs = [&](int32_t op) {
    std::vector<int32_t> needs(problem.need.from(op), problem.need.to(op));
    std::sort(needs.begin(), needs.end(), largest_first);
    return needs;
  };
  std::vector<int32_t> sinks, order;
  for (int32_t op = 0; op < n; ++op) {
    if (problem.next.length(op) == 0) sinks.push_back(op);
  }
  std::sort(sinks.begin(), sinks.end(), largest_first);
  std::vector<char> seen(n, 0);
  struct Frame {
    int32_t op;
    std::vector<int32_t> needs;
    size_t at = 0;
  };
  std::vector<Frame> stack;
  for (int32_t sink : sinks) {
    seen[sink] = 1;
    stack.push_back({sink, sorted_needs(sink)});
    while (!stack.empty()) {
      Frame& frame = stack.back();
      if (frame.at == frame.needs.size()) {
        order.push_back(frame.op);
        stack.pop_back();
        continue;
      }
      const int32_t j = frame.needs[frame.at++];
      if (seen[j]) continue;
      seen[j] = 1;
      stack.push_back({j, sorted_needs(j)});
    }
  }
  return order;
}

std::vector<int32_t> LevelOrder(const ScheduleProblem& problem) {
  std::vector<int32_t> level(problem.ops, 0), order(problem.ops);
  for (int32_t op = 0; op < problem.ops; ++op) {
    order[op] = op;
    for (const int32_t* j = problem.need.from(op); j != problem.need.to(op); ++j) {
      level[op] = std::max(level[op], level[*j] + 1);
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return level[a] < level[b]; });
  return order;
}

}  // namespace relax_disc
