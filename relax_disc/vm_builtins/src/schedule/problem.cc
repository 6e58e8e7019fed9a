// Parts of scheduling problems, and the peak of an order.
#include <algorithm>

#include "schedule/schedule.h"

namespace relax_disc {

Rows Transposed(const Rows& rows, int32_t columns) {
  Rows result;
  result.begin.assign(columns + 1, 0);
  for (int32_t item : rows.item) ++result.begin[item + 1];
  for (int32_t c = 0; c < columns; ++c) result.begin[c + 1] += result.begin[c];
  result.item.resize(rows.item.size());
  std::vector<int32_t> at(result.begin.begin(), result.begin.end() - 1);
  for (int32_t row = 0; row < rows.count(); ++row) {
    for (const int32_t* i = rows.from(row); i != rows.to(row); ++i) result.item[at[*i]++] = row;
  }
  return result;
}

ScheduleProblem PartOf(const ScheduleProblem& whole, const std::vector<int32_t>& ops,
                       const std::vector<char>& done) {
  ScheduleProblem part;
  part.ops = static_cast<int32_t>(ops.size());
  part.points = whole.points;
  part.base = whole.base;
  std::vector<int32_t> local(whole.ops, -1);
  for (int32_t k = 0; k < part.ops; ++k) local[ops[k]] = k;

  // Buffers: those that some op of the part touches and that are not live throughout it.
  std::vector<int32_t> kept, renamed(whole.buffers, -1);
  for (int32_t b = 0; b < whole.buffers; ++b) {
    bool ready = whole.ready[b], stays = whole.stays[b], inside = false;
    for (const int32_t* u = whole.users.from(b); u != whole.users.to(b); ++u) {
      if (local[*u] >= 0) {
        inside = true;
      } else if (done[*u]) {
        ready = true;
      } else {
        stays = true;
      }
    }
    if (ready && stays) {
      for (int32_t p = 0; p < whole.points; ++p) part.base[p] += whole.sizes(p)[b];
    } else if (inside) {
      renamed[b] = static_cast<int32_t>(kept.size());
      kept.push_back(b);
      part.ready.push_back(ready);
      part.stays.push_back(stays);
    }
  }
  part.buffers = static_cast<int32_t>(kept.size());

  auto add_sorted = [](Rows* rows, const int32_t* from, const int32_t* to,
                       const std::vector<int32_t>& names) {
    const size_t start = rows->item.size();
    for (const int32_t* i = from; i != to; ++i) {
      if (names[*i] >= 0) rows->item.push_back(names[*i]);
    }
    std::sort(rows->item.begin() + start, rows->item.end());
    rows->close();
  };
  for (int32_t op : ops) {
    add_sorted(&part.touch, whole.touch.from(op), whole.touch.to(op), renamed);
    add_sorted(&part.need, whole.need.from(op), whole.need.to(op), local);
    for (const int32_t* i = whole.pair.from(op); i != whole.pair.to(op); i += 2) {
      if (renamed[i[0]] < 0 || renamed[i[1]] < 0) continue;
      part.pair.item.push_back(renamed[i[0]]);
      part.pair.item.push_back(renamed[i[1]]);
    }
    part.pair.close();
    part.id.push_back(whole.id[op]);
  }
  part.users = Transposed(part.touch, part.buffers);
  part.next = Transposed(part.need, part.ops);
  part.size.reserve(size_t(part.points) * part.buffers);
  part.extra.reserve(size_t(part.points) * part.ops);
  for (int32_t p = 0; p < whole.points; ++p) {
    for (int32_t b : kept) part.size.push_back(whole.sizes(p)[b]);
    for (int32_t op : ops) part.extra.push_back(whole.extras(p)[op]);
  }
  return part;
}

std::vector<int64_t> LiveDuring(const ScheduleProblem& problem, const std::vector<int32_t>& order,
                                int32_t point) {
  const int32_t n = problem.ops;
  std::vector<int32_t> position(n), last(problem.buffers);
  for (int32_t k = 0; k < n; ++k) position[order[k]] = k;
  const int64_t* size = problem.sizes(point);
  const int64_t* extra = problem.extras(point);
  std::vector<int64_t> change(n + 2, 0), live(n);
  for (int32_t b = 0; b < problem.buffers; ++b) {
    int32_t low = n, high = 0;
    for (const int32_t* u = problem.users.from(b); u != problem.users.to(b); ++u) {
      low = std::min(low, position[*u]);
      high = std::max(high, position[*u]);
    }
    last[b] = problem.stays[b] ? n : high;
    change[problem.ready[b] ? 0 : low] += size[b];
    change[last[b] + 1] -= size[b];
  }
  std::vector<char> taken;
  int64_t now = problem.base[point];
  for (int32_t k = 0; k < n; ++k) {
    now += change[k];
    const int32_t op = order[k];
    live[k] = now + extra[op];
    const int32_t* pair = problem.pair.from(op);
    const int32_t count = problem.pair.length(op) / 2;
    taken.assign(count, 0);
    for (int32_t i = 0; i < count; ++i) {
      const int32_t source = pair[2 * i], target = pair[2 * i + 1];
      bool fits = last[source] == k && size[source] == size[target];
      for (int32_t j = 0; fits && j < i; ++j) {
        fits = !taken[j] || (pair[2 * j] != source && pair[2 * j + 1] != target);
      }
      taken[i] = fits;
      if (fits) live[k] -= size[target];
    }
  }
  return live;
}

Peak PeakOf(const ScheduleProblem& problem, const std::vector<int32_t>& order, int32_t skip_from,
            int32_t skip_to) {
  Peak best;
  for (int32_t p = 0; p < problem.points; ++p) {
    const std::vector<int64_t> live = LiveDuring(problem, order, p);
    for (int32_t k = 0; k < problem.ops; ++k) {
      if (skip_from <= k && k < skip_to) continue;
      if (live[k] > best.bytes) best = {live[k], order[k], p};
    }
  }
  return best;
}

}  // namespace relax_disc
