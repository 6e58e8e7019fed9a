// What the recurrent layers' forward and backward share: kinds, sizes, vectors of activations.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_RECURRENCE_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_RECURRENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/product/gemm.h"
#include "kernels/product/packed_matrix.h"
#include "kernels/tensor_view.h"
#include "kernels/vector_exp.h"

namespace relax_disc {

/*! \brief Kinds of layers, in the order of `recurrence_kinds.py`. */
enum class Cell : int64_t { kTanh, kRelu, kGru, kLstm };

constexpr int64_t Gates(Cell cell) { return cell == Cell::kLstm ? 4 : cell == Cell::kGru ? 3 : 1; }
constexpr int64_t States(Cell cell) { return cell == Cell::kLstm ? 2 : 1; }
constexpr int64_t Reserved(Cell cell) {
  return cell == Cell::kLstm ? 5 : cell == Cell::kGru ? 4 : 0;
}
constexpr int64_t Gradients(Cell cell) { return cell == Cell::kGru ? 4 : Gates(cell); }

/*! \brief Where the row of one step and one sequence lies in a tensor with a time axis. */
struct Steps {
  int64_t length, batch, width;
  bool batch_first, reverse;

  /*! \brief The time at which step `index` of the forward pass runs. */
  int64_t Time(int64_t index) const { return reverse ? length - 1 - index : index; }
  /*! \brief Offset of row (time, sequence) with `parts` widths to a row. */
  int64_t Row(int64_t time, int64_t sequence, int64_t parts) const {
    int64_t row = batch_first ? sequence * length + time : time * batch + sequence;
    return row * parts * width;
  }
  /*! \brief Distance of the rows of neighbouring sequences. */
  int64_t Pitch(int64_t parts) const { return (batch_first ? length : 1) * parts * width; }
};

/*! \brief Multiply-adds that are worth one more thread: about 4 microseconds of one core. */
constexpr int64_t kRecurrentWorkPerThread = 1 << 19;

/*! \brief Threads for a layer: they share out the sequences. */
inline int64_t RecurrentThreads(const Steps& steps, int64_t weights) {
  int64_t work = steps.length * steps.batch * weights;
  return std::clamp<int64_t>(std::min(work / kRecurrentWorkPerThread, steps.batch), 1,
                             NumThreads());
}

/*! \brief The first `count` lanes from memory, zeros after them. */
template <typename T>
inline typename Vector<T>::Type LoadLanes(const T* source, int64_t count) {
  if (count >= kLanes<T>) return *reinterpret_cast<const typename Vector<T>::Loose*>(source);
  typename Vector<T>::Type value{};
  std::memcpy(&value, source, count * sizeof(T));
  return value;
}

/*! \brief Store the first `count` lanes. */
template <typename T>
inline void StoreLanes(T* target, typename Vector<T>::Type value, int64_t count) {
  if (count >= kLanes<T>) {
    *reinterpret_cast<typename Vector<T>::Loose*>(target) = value;
  } else {
    std::memcpy(target, &value, count * sizeof(T));
  }
}

/*!
 * \brief Hyperbolic tangent; floats within 3 units of the last place.
 *
 * Method for floats: an odd polynomial below 0.625 (coefficients of Cephes' tanhf), else
 * 1 - 2 / (exp(2 |x|) + 1); doubles by the C library, lane by lane.
 */
template <typename T>
inline typename Vector<T>::Type Tanh(typename Vector<T>::Type x) {
  typedef typename Vector<T>::Type V;
  if constexpr (std::is_same_v<T, double>) {
    for (int i = 0; i < kLanes<T>; ++i) x[i] = std::tanh(x[i]);
    return x;
  } else {
    const V one = V{} + 1.0f, zero{};
    const V size = x < zero ? -x : x, square = x * x;
    V series = V{} - 5.70498872745e-3f;
    series = series * square + 2.06390887954e-2f;
    series = series * square - 5.37397155531e-2f;
    series = series * square + 1.33314422036e-1f;
    series = series * square - 3.33332819422e-1f;
    series = series * square * x + x;
    const V far = one - 2.0f / (VectorExp(2.0f * size) + one);
    const V bent = x < zero ? -far : far;
    return size > one * 0.625f ? bent : series;
  }
}

/*! \brief 1 / (1 + exp(-x)). */
template <typename T>
inline typename Vector<T>::Type Sigmoid(typename Vector<T>::Type x) {
  typedef typename Vector<T>::Type V;
  const V one = V{} + T(1);
  if constexpr (std::is_same_v<T, double>) {
    for (int i = 0; i < kLanes<T>; ++i) x[i] = std::exp(-x[i]);
    return one / (one + x);
  } else {
    return one / (one + VectorExp(-x));
  }
}

/*! \brief Call `run` with the kind as a compile-time constant. */
template <typename F>
void WithCell(int64_t kind, const F& run) {
  switch (static_cast<Cell>(kind)) {
    case Cell::kTanh:
      return run(std::integral_constant<Cell, Cell::kTanh>{});
    case Cell::kRelu:
      return run(std::integral_constant<Cell, Cell::kRelu>{});
    case Cell::kGru:
      return run(std::integral_constant<Cell, Cell::kGru>{});
    case Cell::kLstm:
      return run(std::integral_constant<Cell, Cell::kLstm>{});
  }
  TVM_FFI_THROW(ValueError) << "recurrence: no kind " << kind;
}

/*! \brief Check the weight [gates H, H] and the state [states, B, H] against a tensor over time. */
template <Cell kCell, typename T>
Steps CheckedSteps(const Tensor<T>& over_time, int64_t parts, const Tensor<T>& state,
                   const Tensor<T>& weight, int64_t batch_first, int64_t reverse) {
  TVM_FFI_CHECK(over_time.ndim == 3 && state.ndim == 3 && weight.ndim == 2, ValueError)
      << "recurrence: ranks " << over_time.ndim << ", " << state.ndim << ", " << weight.ndim;
  Steps steps{over_time.shape[batch_first ? 1 : 0], over_time.shape[batch_first ? 0 : 1],
              weight.shape[1], batch_first != 0, reverse != 0};
  TVM_FFI_CHECK(over_time.shape[2] == parts * steps.width &&
                    weight.shape[0] == Gates(kCell) * steps.width &&
                    state.shape[0] == States(kCell) && state.shape[1] == steps.batch &&
                    state.shape[2] == steps.width,
                ValueError)
      << "recurrence: rows of " << over_time.shape[2] << ", weight [" << weight.shape[0] << ", "
      << weight.shape[1] << "], state [" << state.shape[0] << ", " << state.shape[1] << ", "
      << state.shape[2] << "] for a batch of " << steps.batch;
  return steps;
}

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_RECURRENCE_H_
