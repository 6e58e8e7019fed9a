// The scheduler's face to Python: plain arrays in, an order out.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace relax_disc {
namespace {

using tvm::ffi::TensorView;

template <typename T>
std::vector<T> Values(TensorView tensor) {
  const T* data = static_cast<const T*>(tensor.data_ptr());
  return std::vector<T>(data, data + tensor.numel());
}

Rows RowsOf(TensorView begin, TensorView item) {
  Rows rows;
  rows.begin = Values<int32_t>(begin);
  rows.item = Values<int32_t>(item);
  return rows;
}

// order: int32[ops], written; facts: int64[4], written: peak, bound, work used, timed out.
void SplitSchedule(TensorView touch_begin, TensorView touch, TensorView need_begin, TensorView need,
                   TensorView pair_begin, TensorView pair, TensorView ready, TensorView stays,
                   TensorView size, TensorView extra, TensorView base, TensorView starts,
                   int64_t target, int64_t work, double seconds, TensorView order,
                   TensorView facts) {
  ScheduleProblem problem;
  problem.touch = RowsOf(touch_begin, touch);
  problem.need = RowsOf(need_begin, need);
  problem.pair = RowsOf(pair_begin, pair);
  problem.ready = Values<char>(ready);
  problem.stays = Values<char>(stays);
  problem.size = Values<int64_t>(size);
  problem.extra = Values<int64_t>(extra);
  problem.base = Values<int64_t>(base);
  problem.ops = problem.touch.count();
  problem.buffers = static_cast<int32_t>(problem.ready.size());
  problem.points = static_cast<int32_t>(problem.base.size());
  problem.users = Transposed(problem.touch, problem.buffers);
  problem.next = Transposed(problem.need, problem.ops);
  for (int32_t op = 0; op < problem.ops; ++op) problem.id.push_back(op);

  const std::vector<int32_t> flat = Values<int32_t>(starts);
  std::vector<std::vector<int32_t>> orders;
  for (auto i = flat.begin(); i != flat.end(); i += problem.ops) {
    orders.emplace_back(i, i + problem.ops);
  }
  SearchLimit limit;
  limit.work_left = work;
  limit.deadline = std::chrono::steady_clock::now() +
                   std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  const Schedule found = SplitSearch(problem, orders, target, &limit);
  std::copy(found.order.begin(), found.order.end(), static_cast<int32_t*>(order.data_ptr()));
  int64_t* out = static_cast<int64_t*>(facts.data_ptr());
  out[0] = found.peak;
  out[1] = found.bound;
  out[2] = work - limit.work_left;
  out[3] = limit.timed_out;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef().def("relax_disc.schedule.split", SplitSchedule);
}

}  // namespace relax_disc
