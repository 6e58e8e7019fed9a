// Orders of operators with a small peak of live memory: plain C++ over plain data.
//
// The method is described in analysis/schedule/split.py.
// Everything is a pure function of its arguments, except where the time limit strikes.
#ifndef RELAX_DISC_VM_BUILTINS_SCHEDULE_SCHEDULE_H_
#define RELAX_DISC_VM_BUILTINS_SCHEDULE_SCHEDULE_H_

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "schedule/flow.h"

namespace relax_disc {

// Rows of different lengths, one behind the other.
struct Rows {
  std::vector<int32_t> begin{0}, item;

  int32_t count() const { return static_cast<int32_t>(begin.size()) - 1; }
  const int32_t* from(int32_t row) const { return item.data() + begin[row]; }
  const int32_t* to(int32_t row) const { return item.data() + begin[row + 1]; }
  int32_t length(int32_t row) const { return begin[row + 1] - begin[row]; }
  void close() { begin.push_back(static_cast<int32_t>(item.size())); }
};

// The rows' transpose: for each of `columns` items, the rows that hold it, in ascending order.
Rows Transposed(const Rows& rows, int32_t columns);

// Ops with the buffers that they touch.  A buffer is live from its first toucher to its last; the
// first is its producer and comes before all others.  The order of the indices is a legal order.
struct ScheduleProblem {
  int32_t ops = 0, buffers = 0, points = 0;
  Rows touch;  // op -> buffers, ascending
  Rows users;  // buffer -> ops, ascending; begins with the producer unless `ready`
  Rows need;   // op -> ops that come before it
  Rows next;   // op -> ops that come after it
  Rows pair;   // op -> source, target, source, target ...: in-place pairs that depend on the order
  std::vector<char> ready;     // buffer: live from the start
  std::vector<char> stays;     // buffer: live to the end
  std::vector<int64_t> size;   // [points, buffers]
  std::vector<int64_t> extra;  // [points, ops] live only while the op runs (negative: in place)
  std::vector<int64_t> base;   // [points] live throughout
  std::vector<int32_t> id;     // op -> op of the whole problem

  const int64_t* sizes(int32_t point) const { return size.data() + int64_t{point} * buffers; }
  const int64_t* extras(int32_t point) const { return extra.data() + int64_t{point} * ops; }
};

// The most live bytes of an order, at which op and at which point.
struct Peak {
  int64_t bytes = -1;
  int32_t op = -1, point = 0;
};

// The part of a problem that runs `ops` (a legal order) after all ops with done[op].
ScheduleProblem PartOf(const ScheduleProblem& problem, const std::vector<int32_t>& ops,
                       const std::vector<char>& done);
// Live bytes during each step of an order at a point.
std::vector<int64_t> LiveDuring(const ScheduleProblem& problem, const std::vector<int32_t>& order,
                                int32_t point);
// Steps from skip_from until before skip_to are not looked at.
Peak PeakOf(const ScheduleProblem& problem, const std::vector<int32_t>& order,
            int32_t skip_from = 0, int32_t skip_to = 0);

// Seeds.  `reverse` schedules backwards in time.
std::vector<int32_t> ListOrder(const ScheduleProblem& problem, int32_t point, bool reverse);
std::vector<int32_t> DepthFirstOrder(const ScheduleProblem& problem, int32_t point);
std::vector<int32_t> LevelOrder(const ScheduleProblem& problem);

// Where an op stands relative to the op that a cut is made at.
enum Side : char { kFree = 0, kBefore = 1, kAfter = 2 };

// Least live bytes while `op` runs over all legal orders that put each op of `force` on its side.
struct Cut {
  bool possible = false;
  int64_t bytes = 0;
  std::vector<char> done;  // ops that run before `op`, and `op` itself
  int64_t work = 0;        // arcs looked at
};

// The network of such a cut, to ask more of it.
class CutNetwork {
 public:
  CutNetwork(const ScheduleProblem& problem, int32_t point, int32_t op,
             const std::vector<std::pair<int32_t, Side>>& force);

  // False if `force` contradicts the edges: then there is nothing to ask.
  bool possible() const { return possible_; }
  int64_t bytes() const { return bytes_; }
  int64_t work() const { return network_.work() + own_work_; }
  bool is_free(int32_t op) const { return state_[op] == kFree; }
  // Of several least cuts `late` takes that with the most done ops, else the fewest are taken.
  std::vector<char> Done(bool late);
  // The least bytes with one more op on a side, or a number of at least `enough` if they are.
  int64_t BytesWith(int32_t other, Side side, int64_t enough);

 private:
  bool possible_ = false;
  int64_t bytes_ = 0, own_work_ = 0;
  std::vector<char> state_;
  std::vector<int32_t> node_;
  FlowNetwork network_;
};

// The bytes that in-place pairs can save at an op, and the inputs whose places are taken.
int64_t SavingAt(const ScheduleProblem& problem, int32_t point, int32_t op,
                 std::vector<int32_t>* sources);

Cut LeastCut(const ScheduleProblem& problem, int32_t point, int32_t op, bool late,
             const std::vector<std::pair<int32_t, Side>>& force);

// What a search may use, and what it has used.
struct SearchLimit {
  int64_t work_left = 0;
  std::chrono::steady_clock::time_point deadline;
  bool timed_out = false;

  bool Exhausted();
  // Leave 1/share of the work; returns the rest, to be added again.
  int64_t Grant(int64_t share);
};

// Pairs (a, b): in any order with a peak below `peak` a runs before b, as cuts at the ops with the
// most live bytes of `order` show.  Raises `bound` to the least cut of each; once that is no less
// than `peak` no such order exists.  For problems with one point.
std::vector<std::pair<int32_t, int32_t>> ForcedPairs(const ScheduleProblem& problem,
                                                     const std::vector<int32_t>& order,
                                                     int64_t peak, SearchLimit* limit,
                                                     int64_t* bound);
// The problem with more edges, ops renumbered to a legal order near `order`; without ops if the
// edges make a cycle.
ScheduleProblem Tightened(const ScheduleProblem& problem,
                          const std::vector<std::pair<int32_t, int32_t>>& edges,
                          const std::vector<int32_t>& order);

struct Schedule {
  int64_t peak = 0;   // greatest over the points
  int64_t bound = 0;  // no order has a smaller peak
  int32_t peak_op = -1;
  std::vector<int32_t> order;
};

// Minimise the greatest peak over the points; stop at `target` or when the limit is exhausted.
Schedule SplitSearch(const ScheduleProblem& problem,
                     const std::vector<std::vector<int32_t>>& starts, int64_t target,
                     SearchLimit* limit);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_SCHEDULE_SCHEDULE_H_
