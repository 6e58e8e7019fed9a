// First form of PlanArena: program order, live ranges, best-fit offsets.
#include <algorithm>

#include "planner.h"

namespace relax_disc {

int64_t PlanOffsets(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
                    const std::vector<int64_t>& size, int64_t, std::vector<int64_t>* offsets) {
  const int n = static_cast<int>(size.size());
  std::vector<int> order(n);
  for (int i = 0; i < n; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return size[a] > size[b]; });
  offsets->assign(n, 0);
  std::vector<int> placed;
  int64_t height = 0;
  for (int i : order) {
    if (size[i] == 0) continue;
    std::vector<std::pair<int64_t, int64_t>> busy;
    for (int j : placed) {
      if (lower[j] < upper[i] && lower[i] < upper[j]) {
        busy.emplace_back((*offsets)[j], (*offsets)[j] + size[j]);
      }
    }
    std::sort(busy.begin(), busy.end());
    int64_t at = 0;
    for (const auto& [begin, end] : busy) {
      if (begin - at >= size[i]) break;
      at = std::max(at, end);
    }
    (*offsets)[i] = at;
    height = std::max(height, at + size[i]);
    placed.push_back(i);
  }
  return height;
}

ArenaPlan PlanArena(const PlannerGraph& graph, int64_t arena_budget, int64_t alignment, int) {
  ArenaPlan plan;
  const int n = static_cast<int>(graph.ops.size());
  auto rounded = [&](int64_t b) { return (b + alignment - 1) / alignment * alignment; };
  std::vector<char> nowhere(graph.resident);
  std::vector<int> last(graph.bytes.size(), -1);
  for (int k = 0; k < n; ++k) {
    for (int t : graph.ops[k].inputs) last[t] = k;
    for (int t : graph.ops[k].outputs) last[t] = std::max(last[t], k);
    for (const auto& pair : graph.ops[k].inplace) {
      if (graph.resident[pair.first]) nowhere[pair.second] = 1;
    }
  }
  std::vector<int64_t> lower, upper, size, offsets, live(n + 1, 0);
  for (int k = 0; k < n; ++k) {
    plan.sequence.push_back(k);
    plan.time_ns += graph.ops[k].time_ns;
    auto add = [&](int t, int end, int64_t bytes) {
      plan.versions.push_back({t, k, end, 0});
      lower.push_back(k);
      upper.push_back(end + 1);
      size.push_back(rounded(bytes));
      for (int p = k; p <= std::min(end, n - 1); ++p) live[p] += size.back();
    };
    for (int t : graph.ops[k].outputs) {
      if (!nowhere[t]) add(t, graph.is_output[t] ? n : last[t], graph.bytes[t]);
    }
    if (graph.ops[k].workspace) add(-1 - k, k, graph.ops[k].workspace);
  }
  plan.arena_bytes = PlanOffsets(lower, upper, size, -1, &offsets);
  for (size_t i = 0; i < offsets.size(); ++i) plan.versions[i].offset = offsets[i];
  plan.live_peak_bytes = *std::max_element(live.begin(), live.end());
  plan.feasible = plan.arena_bytes <= arena_budget;
  if (!plan.feasible) plan.least_bytes = plan.arena_bytes;
  return plan;
}

}  // namespace relax_disc
