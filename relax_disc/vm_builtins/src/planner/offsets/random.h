// Random numbers (splitmix64, Steele et al., OOPSLA 2014) that are the same in C++ and Python.
#ifndef RELAX_DISC_VM_BUILTINS_PLANNER_OFFSETS_RANDOM_H_
#define RELAX_DISC_VM_BUILTINS_PLANNER_OFFSETS_RANDOM_H_

#include <cstdint>

namespace relax_disc {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // A number in [0, bound).
  int Below(int bound) {
    state_ += 0x9E3779B97F4A7C15ull;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<int>((z ^ (z >> 31)) % static_cast<uint64_t>(bound));
  }

 private:
  uint64_t state_;
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_PLANNER_OFFSETS_RANDOM_H_
