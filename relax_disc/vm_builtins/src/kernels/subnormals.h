// Numbers too small for their exponent, which processors multiply by microcode.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_SUBNORMALS_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_SUBNORMALS_H_

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace relax_disc {

/*! \brief While this lives, the thread takes subnormal operands and results as 0 (x86 only). */
class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlush); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
#else
  FlushSubnormals() {}
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__SSE__)
  static constexpr unsigned kFlush = 1u << 15 | 1u << 6;  // results, operands
  unsigned before_;
#endif
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_SUBNORMALS_H_
