// The scheduler's face to Python: a problem as lists in, an order with its figures out.
#include <tvm/ffi/reflection/registry.h>

#include <utility>
#include <vector>

#include "runtime/lists.h"
#include "schedule/schedule.h"

namespace relax_disc {
namespace {

namespace ffi = tvm::ffi;

Rows RowsOf(const ffi::Any& lists) {
  Rows rows;
  for (const ffi::Any& list : ListOf(lists)) {
    const std::vector<int32_t> items = Integers(list);
    rows.item.insert(rows.item.end(), items.begin(), items.end());
    rows.close();
  }
  return rows;
}

// The attributes of ScheduleProblem (analysis/schedule/problem.py) that follow from no others.
ScheduleProblem ProblemOf(const List& parts) {
  ScheduleProblem problem;
  problem.touch = RowsOf(parts[0]);
  problem.need = RowsOf(parts[1]);
  for (const ffi::Any& pairs : ListOf(parts[2])) {
    for (const auto& [source, target] : Pairs(pairs)) {
      problem.pair.item.insert(problem.pair.item.end(), {source, target});
    }
    problem.pair.close();
  }
  problem.ready = Integers<char>(parts[3]);
  problem.stays = Integers<char>(parts[4]);
  for (auto [row, values] : {std::pair{5, &problem.size}, std::pair{6, &problem.extra}}) {
    for (const ffi::Any& list : ListOf(parts[row])) {
      const std::vector<int64_t> numbers = Integers<int64_t>(list);
      values->insert(values->end(), numbers.begin(), numbers.end());
    }
  }
  problem.base = Integers<int64_t>(parts[7]);
  problem.ops = problem.touch.count();
  problem.buffers = static_cast<int32_t>(problem.ready.size());
  problem.points = static_cast<int32_t>(problem.base.size());
  problem.users = Transposed(problem.touch, problem.buffers);
  problem.next = Transposed(problem.need, problem.ops);
  for (int32_t op = 0; op < problem.ops; ++op) problem.id.push_back(op);
  return problem;
}

Facts SplitFacts(const List& parts, const List& starts, int64_t target, int64_t work,
                 double seconds) {
  const ScheduleProblem problem = ProblemOf(parts);
  std::vector<std::vector<int32_t>> orders;
  for (const ffi::Any& order : starts) orders.push_back(Integers(order));
  SearchLimit limit;
  limit.work_left = work;
  limit.deadline = std::chrono::steady_clock::now() +
                   std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  const Schedule found = SplitSearch(problem, orders, target, &limit);
  return {{"order", Numbers(found.order)},
          {"peak", found.peak},
          {"bound", found.bound},
          {"work", work - limit.work_left},
          {"timed_out", limit.timed_out}};
}

// For tests.  `force` are pairs of an op and its side; no bytes where the force contradicts edges.
Facts CutFacts(const List& parts, int64_t point, int64_t op, bool late, const List& force) {
  std::vector<std::pair<int32_t, Side>> sides;
  for (const auto& [other, side] : Pairs(force)) sides.emplace_back(other, static_cast<Side>(side));
  const Cut cut = LeastCut(ProblemOf(parts), static_cast<int32_t>(point), static_cast<int32_t>(op),
                           late, sides);
  if (!cut.possible) return {};
  return {{"bytes", cut.bytes}, {"done", Numbers(cut.done)}};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("relax_disc.schedule.split", SplitFacts)
      .def("relax_disc.schedule.least_cut", CutFacts);
}

}  // namespace relax_disc
