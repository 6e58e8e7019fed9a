// Memory of the library kernels beside their arguments: one block per thread, kept and counted.
#ifndef RELAX_DISC_SCRATCH_H_
#define RELAX_DISC_SCRATCH_H_

#include <cstdint>

namespace relax_disc {

/*! \brief Memory that grows on demand up to the bound of its uses and lives with its thread. */
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();

  /*! \brief Room for `count` elements on a 64-byte boundary; what it held before is lost. */
  template <typename T>
  T* Get(int64_t count) {
    return static_cast<T*>(Reserve(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  void* Reserve(int64_t bytes);
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

/*! \brief The calling thread's scratch: kernels do not nest, so they share it. */
Scratch& ThreadScratch();

}  // namespace relax_disc

#endif  // RELAX_DISC_SCRATCH_H_
