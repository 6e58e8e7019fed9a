// Vectorised 2^x and sums over vectors.
#ifndef RELAX_DISC_ATTENTION_MATH_H_
#define RELAX_DISC_ATTENTION_MATH_H_

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/gemm_tile.h"

namespace relax_disc {

template <typename T>
struct Exponent;
template <>
struct Exponent<float> {
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  static constexpr int bits = 23, terms = 7;
  static constexpr float least = -126.0f, round = 12582912.0f;  // 1.5 * 2^23
};
template <>
struct Exponent<double> {
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
  static constexpr int bits = 52, terms = 13;
  static constexpr double least = -1022.0, round = 6755399441055744.0;  // 1.5 * 2^52
};

/*!
 * \brief 2^x for x <= 0, 0 below the normal numbers; within 2 units of the last place.
 *
 * Taylor series on [-0.5, 0.5]: the first term left out is below half a unit.
 */
template <typename T>
inline typename Vector<T>::Type Exp2(typename Vector<T>::Type x) {
  typedef typename Vector<T>::Type V;
  typedef typename Exponent<T>::Int I;
  constexpr double ln2[] = {1.0,
                            6.931471805599453e-01,
                            2.402265069591007e-01,
                            5.550410866482158e-02,
                            9.618129107628477e-03,
                            1.333355814642844e-03,
                            1.540353039338161e-04,
                            1.525273380405984e-05,
                            1.321548679014431e-06,
                            1.017808600923970e-07,
                            7.054911620801123e-09,
                            4.445538271870811e-10,
                            2.567843599348821e-11,
                            1.369148885390413e-12};  // ln(2)^n / n!
  I normal = ~(I)(x < V{} + Exponent<T>::least);  // true for NaN, which then stays NaN
  V clamped = (V)((I)x & normal);  // 0 where too small: the result is masked below
  V shifted = clamped + Exponent<T>::round;
  V fraction = clamped - (shifted - Exponent<T>::round);
  V sum = V{} + static_cast<T>(ln2[Exponent<T>::terms]);
#pragma GCC unroll 16
  for (int n = Exponent<T>::terms - 1; n >= 0; --n) sum = sum * fraction + static_cast<T>(ln2[n]);
  I scaled = (I)sum + ((I)shifted << Exponent<T>::bits);
  return (V)(scaled & normal);
}

template <typename T>
inline typename Vector<T>::Type LoadVector(const T* source) {
  return *reinterpret_cast<const typename Vector<T>::Loose*>(source);
}
template <typename T>
inline void StoreVector(T* target, typename Vector<T>::Type value) {
  *reinterpret_cast<typename Vector<T>::Loose*>(target) = value;
}

template <typename T>
inline T SumLanes(typename Vector<T>::Type value) {
  T sum = value[0];
  for (int i = 1; i < kLanes<T>; ++i) sum += value[i];
  return sum;
}
template <typename T>
inline T MaxLanes(typename Vector<T>::Type value) {
  T top = value[0];
  for (int i = 1; i < kLanes<T>; ++i) top = value[i] > top ? value[i] : top;
  return top;
}

template <typename T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

}  // namespace relax_disc

#endif  // RELAX_DISC_ATTENTION_MATH_H_
