// What to do without at the peak: a knapsack, solved by a dynamic program.
//
// At one block, the peak of the program without recomputation, a plan is little more than the set
// of tensors that it keeps across the block.  A tensor that is read later is kept, or reloaded, or
// its kernel runs again; then the same holds for what that kernel reads.  The bytes of that block alone, and
// every kernel counted once, give the least time of all plans that keep the block within a limit.
// The program goes through the kernels before the block from the last to the first.  All it has to
// know of those behind it is which tensors they want; for each such set it holds the pairs of bytes
// and time that no other pair beats.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_FRONT_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_FRONT_H_

#include <cstdint>
#include <vector>

#include "planner/timeline.h"

namespace relax_disc {

class Front {
 public:
  // A choice of kernels to run again: no plan within `limit` live bytes is faster, if the front is
  // exact; whether a plan keeps to both depends on the other blocks.
  struct Choice {
    int64_t limit, time;
    int node;
  };

  // `base` is the program without recomputation.
  Front(const Model& model, const Timeline& base);

  // All choices that no other beats, the fastest first.
  const std::vector<Choice>& choices() const { return choices_; }
  // The first choice within a limit; choices().size() if there is none.
  std::size_t Find(int64_t limit) const;
  // False where choices were left out to save time.
  bool exact() const { return exact_; }
  // The plan that follows a choice.
  std::vector<Window> Windows(const Choice& choice, int grace) const;

 private:
  struct Entry {
    int64_t bytes, time;
    int node;  // index into nodes_, -1 for none
  };
  struct Node {
    int parent, op;
    bool reload;  // what the kernel makes is reloaded
  };
  struct State {
    uint64_t wanted;             // slots of tensors
    std::vector<Entry> entries;  // bytes rise, time falls
  };

  int64_t Prepare(const Timeline& base);
  void Step(int op);
  uint64_t Want(int op);
  void Return(const State& state, int op, bool reload, int64_t time, uint64_t wanted);
  void Add(uint64_t wanted, std::vector<Entry>&& entries);
  void Thin(std::vector<Entry>* entries);
  void Narrow();

  const Model& model_;
  const int block_;
  int64_t bucket_ = 1;
  bool exact_ = true;
  std::vector<char> later_;     // per tensor: made before the block and read after it
  std::vector<int64_t> keep_;   // per tensor: bytes that keeping it adds to the block
  std::vector<int> slot_;       // per tensor: bit in State::wanted, -1 for none
  uint64_t free_slots_ = ~uint64_t{0};
  std::vector<State> states_, next_;
  std::vector<Node> nodes_;
  std::vector<Choice> choices_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_FRONT_H_
