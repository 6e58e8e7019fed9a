// Exact memory timeline of a program with recomputation, kept up to date as the plan changes.
//
// A plan gives each gap of each tensor (see Model) a window [low, high) of blocks at whose ends the
// tensor is not kept.  A block that needs an absent tensor first runs its kernel again, recursively;
// what it makes is kept from there on unless the window still says otherwise.  Everything else
// follows: the sequence, every version's first and last position, memory, time.  The timeline is a
// pure function of the windows, so a change is undone by setting the window back.
//
// A changed window touches few blocks: those are run again, in order, and tell later ones when a
// tensor that they need came or went.  Lifetimes are summed per block boundary.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_TIMELINE_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_TIMELINE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/model.h"

namespace relax_disc {

constexpr int kForever = 1 << 29;

// Blocks [low, high) at whose ends a tensor is not kept; empty where low >= high.  A block that needs
// it all the same reloads it, or runs its kernel again.
struct Window {
  int low, high;
  bool reload = false;

  bool empty() const { return low >= high; }
  bool operator==(const Window& other) const {
    return low == other.low && high == other.high && reload == other.reload;
  }
};

// The part of a block in one tensor's life; positions count the block's executions.
struct Touch {
  int block;
  int old_last;  // last read of the copy that came into the block, -1 if none
  int created;   // where a new copy is made, -1 if nowhere
  int new_last;  // last read of the new copy

  bool operator==(const Touch& o) const {
    return block == o.block && old_last == o.old_last && created == o.created &&
           new_last == o.new_last;
  }
};

class Timeline {
 public:
  explicit Timeline(const Model& model, int grace = 0);

  // The plan in which nothing runs again.  A kernel that later plans run again finds a tensor up to
  // `grace` blocks after its last reader: it is then kept until there.
  static std::vector<Window> BaseWindows(const Model& model, int grace);

  void Set(int gap, Window window);
  void Assign(const std::vector<Window>& windows);

  const std::vector<Window>& windows() const { return windows_; }
  const std::vector<Touch>& touches(int tensor) const { return touches_[tensor]; }
  const std::vector<int>& executions(int block) const { return blocks_[block].executions; }
  int64_t time() const { return time_; }
  // Executions gone through so far, which measures what the search costs.
  int64_t work() const { return work_; }
  // False if some kernel would run again after its input's buffer was overwritten.
  bool valid() const { return late_ == 0; }
  int64_t BlockPeak(int block) const { return carried_[block] + local_peak_[block]; }
  int PeakPosition(int block) const { return blocks_[block].peak_position; }
  // First block with the most live bytes.
  int PeakBlock() const;
  int64_t Peak() const;
  // Bytes above the limit, summed over blocks.
  int64_t Overflow(int64_t limit) const;
  // Whether a tensor is there when a block starts; false before it is first made.
  bool Present(int tensor, int block) const;
  bool Touched(int tensor, int block) const;
  // The kernel that makes a tensor again where a block finds it absent.
  int Maker(int tensor, int block) const;
  // Kernels in the order that they run, reloads among them.
  std::vector<int32_t> Sequence() const;

 private:
  struct Block {
    std::vector<int> executions;  // recomputed kernels, then the block's own
    std::vector<int> touched;     // tensors, in the order of first touch
    int peak_position = 0;
    int late = 0;
  };
  using Spans = std::vector<std::pair<int, int>>;

  void MarkDirty(int block);
  void MarkStale(int block);
  void Flush();
  void Rebuild(int block);
  void Materialize(int tensor, int block);
  void Execute(int op, int block, bool again);
  Touch& LocalTouch(int tensor, int block);
  bool Have(int tensor, int block) const;
  void Replace(int tensor, int block, const Touch* before, const Touch* after);
  void CollectSpans(int tensor, Spans* spans) const;
  void Carry(const std::pair<int, int>& span, int64_t bytes);
  bool DiesAt(int tensor, int block, int position) const;
  void Measure(int block);

  const Model& model_;
  std::vector<Window> windows_;
  std::vector<std::vector<Touch>> touches_;  // per tensor, by block
  std::vector<Block> blocks_;
  std::vector<int64_t> carried_;     // per block: bytes alive across its start
  std::vector<int64_t> local_peak_;  // per block: most bytes above those
  int64_t time_ = 0, work_ = 0;
  int late_ = 0;

  // Work space of Rebuild.
  std::vector<int> dirty_, stale_;
  std::vector<char> is_dirty_, is_stale_;
  std::vector<int> stamp_, slot_;
  int mark_ = 0;
  Block next_;
  std::vector<Touch> next_touches_;
  std::vector<std::pair<int, int>> stack_;
  Spans spans_before_, spans_after_;
  std::vector<int64_t> deaths_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_TIMELINE_H_
