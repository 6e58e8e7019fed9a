// Exponential of a vector register of floats, for loops that the compiler does not vectorise.
//
// Method: x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite's split of ln 2), a polynomial of
// degree 6 for exp(r) (coefficients of Cephes' expf), 2^n put into the exponent. Relative error
// below 2e-7; exactly 0 below -87.3 and infinity above 88.7, so that a masked -inf vanishes.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_VECTOR_EXP_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_VECTOR_EXP_H_

#include <cstdint>
#include <limits>

#include "kernels/product/gemm_tile.h"

namespace relax_disc {

using FloatVector = Vector<float>::Type;
using LooseFloatVector = Vector<float>::Loose;
typedef int32_t IntVector __attribute__((vector_size(kVectorBytes)));

inline FloatVector Splat(float value) { return FloatVector{} + value; }

inline FloatVector VectorExp(FloatVector x) {
  const FloatVector low = Splat(-87.3f), high = Splat(88.7f), zero{};
  const FloatVector infinite = Splat(std::numeric_limits<float>::infinity());
  FloatVector clamped = x < low ? low : x;
  clamped = clamped > high ? high : clamped;
  const FloatVector magic = Splat(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
  const FloatVector n = (clamped * 1.44269504f + magic) - magic;
  const FloatVector r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  FloatVector p = Splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two halves, so that n = 128 does not overflow the exponent's field.
  const IntVector whole = __builtin_convertvector(n, IntVector), half = whole >> 1;
  const FloatVector first = reinterpret_cast<FloatVector>((half + 127) << 23);
  const FloatVector second = reinterpret_cast<FloatVector>((whole - half + 127) << 23);
  FloatVector result = p * first * second;
  result = x < low ? zero : result;
  result = x > high ? infinite : result;
  return x == x ? result : x;  // NaN stays NaN
}

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_VECTOR_EXP_H_
