// The graph as the rematerialization planner sees it: only tensors whose absence frees memory.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_MODEL_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/planner.h"

namespace relax_disc {

// Lists of small integers, flattened: list i is values[begin[i] .. begin[i + 1]).
struct Lists {
  std::vector<int> begin{0}, values;

  void Close() { begin.push_back(static_cast<int>(values.size())); }
  int Size(int i) const { return begin[i + 1] - begin[i]; }
};

// Plain numbers derived from a PlannerGraph.  A tensor is *tracked* if it takes memory and some
// kernel makes it; resident and zero-size tensors are always there and do not appear.
//
// The program has one block per kernel: the recomputations that kernel needs, then the kernel; and
// a last block, number `ops`, whose "kernel" reads the outputs.  The *points* of a tensor are the
// blocks whose kernel makes or reads it; the stretch after each point up to the next is a *gap*,
// numbered like the point; the gap after the last point is the tail.
//
// With a tier a tensor has a second maker, a *reload*: a kernel without inputs, numbered from
// ops + 1, that runs only where the tensor is absent.
struct Model {
  explicit Model(const PlannerGraph& graph);
  // `exposed` is the part of the transfers' time that kernels are taken to wait for; only what is
  // made in the first `early` part of the program's time may be reloaded.
  Model(const PlannerGraph& graph, const TierModel& tier, double exposed, double early);

  int ops = 0;
  std::vector<int64_t> bytes;                // per tensor
  std::vector<int> producer;                 // per tensor: kernel, -1 where not tracked
  std::vector<char> evictable;               // per tensor: tracked and its kernel may run again
  std::vector<int> reload;                   // per tensor: the kernel that reads it back, or -1
  std::vector<int64_t> time, rerun;          // per kernel
  std::vector<int64_t> workspace;            // per kernel
  std::vector<int> deadline;                 // per kernel: last block in which it may run again
  Lists inputs, outputs;                     // per kernel (block `ops` too): tracked, no repeats
  std::vector<std::vector<std::pair<int, int>>> inplace;  // per kernel: may-share pairs
  Lists points;                              // per tensor; gap ids index points.values
  std::vector<int> gap_tensor;               // per gap
  int64_t resident_bytes = 0;
  int64_t base_time = 0;

  int gaps() const { return static_cast<int>(points.values.size()); }
  int tensors() const { return static_cast<int>(bytes.size()); }
  bool IsReload(int op) const { return op > ops; }
  // Whether there is a way to have an absent tensor back.
  bool CanReturn(int tensor) const { return evictable[tensor] || reload[tensor] >= 0; }
  bool IsTail(int gap) const { return gap + 1 == points.begin[gap_tensor[gap] + 1]; }

  // Call use(input, output) for the pairs of a kernel that share memory, where dies(input) tells
  // whether the kernel is the last to read its input: each tensor is in one pair, first come.
  template <typename Dies, typename Use>
  void ForSharedPairs(int op, Dies dies, Use use) const {
    const auto& pairs = inplace[op];
    uint64_t taken = 0;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      bool free = dies(pairs[i].first);
      for (std::size_t j = 0; j < i && free; ++j) {
        const bool clash = pairs[j].first == pairs[i].first || pairs[j].second == pairs[i].second;
        free = !(clash && (taken >> j & 1));
      }
      if (!free) continue;
      taken |= uint64_t{1} << i;
      use(pairs[i].first, pairs[i].second);
    }
  }

  // The gap of a tensor that block k lies in: its last point before k.
  int GapBefore(int tensor, int block) const;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_MODEL_H_
