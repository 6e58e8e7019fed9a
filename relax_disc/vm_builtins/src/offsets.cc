// Offsets for buffers with fixed lifetimes; first form, one order.
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

}  // namespace relax_disc
