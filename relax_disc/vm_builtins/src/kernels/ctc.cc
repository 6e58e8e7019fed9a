// relax_disc.cpu.ctc_loss and its gradient: connectionist temporal classification.
//
// Graves et al., "Connectionist temporal classification" (2006), in logarithms: alpha runs forward
// over the states blank, label, blank, ..., blank of a target, beta backward. The threads share out
// the sequences, so that results do not depend on their number. Arguments: libraries/install.py.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/parallel.h"
#include "kernels/tensor_view.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

template <typename T>
constexpr T kNever = -std::numeric_limits<T>::infinity();

/*! \brief Logarithm of a sum of up to three exponentials. */
template <typename T>
T LogSum(T a, T b, T c = kNever<T>) {
  T top = std::max(a, std::max(b, c));
  if (top == kNever<T>) return top;
  return top + std::log(std::exp(a - top) + std::exp(b - top) + std::exp(c - top));
}

/*! \brief One sequence of a batch. */
template <typename T>
struct Sequence {
  const T* log_probs;  // of step 0
  int64_t pitch;       // from one step to the next
  const int64_t* target;
  int64_t length, labels, blank;

  int64_t States() const { return 2 * labels + 1; }
  int64_t Label(int64_t state) const { return state % 2 == 1 ? target[state / 2] : blank; }
  T At(int64_t t, int64_t state) const { return log_probs[t * pitch + Label(state)]; }
  /*! \brief Whether state + 2 may follow a state: labels that differ need no blank between. */
  bool Skips(int64_t state) const {
    return state % 2 == 1 && state + 2 < States() && Label(state) != Label(state + 2);
  }
};

/*! \brief Checked views of the arguments that forward and backward share. */
template <typename T>
struct Batch {
  Tensor<T> log_probs;
  Tensor<int64_t> targets, input_lengths, target_lengths;
  int64_t steps, count, classes, room, blank;

  Batch(TensorView log_probs_view, TensorView targets_view, TensorView input_lengths_view,
        TensorView target_lengths_view, int64_t blank)
      : log_probs(log_probs_view),
        targets(targets_view),
        input_lengths(input_lengths_view),
        target_lengths(target_lengths_view),
        steps(log_probs.shape[0]),
        count(log_probs.shape[1]),
        classes(log_probs.shape[2]),
        room(targets.shape[1]),
        blank(blank) {
    TVM_FFI_CHECK(blank >= 0 && blank < classes, ValueError)
        << "ctc_loss: blank " << blank << " is not one of " << classes << " classes";
    for (int64_t n = 0; n < count; ++n) {
      int64_t length = input_lengths.data[n], labels = target_lengths.data[n];
      if (length < 0 || length > steps || labels < 0 || labels > room) {
        TVM_FFI_THROW(IndexRangeError)
            << "ctc_loss: sequence " << n << " of the batch has input_lengths = " << length
            << ", allowed is 0 .. " << steps << ", and target_lengths = " << labels
            << ", allowed is 0 .. " << room << ". Nothing has been written.";
      }
      for (int64_t k = 0; k < labels; ++k) {
        int64_t label = targets.data[n * room + k];
        if (label < 0 || label >= classes) {
          TVM_FFI_THROW(IndexRangeError)
              << "ctc_loss: label " << label << " at " << k << " of sequence " << n
              << " is not one of " << classes << " classes. Nothing has been written.";
        }
      }
    }
  }

  Sequence<T> operator[](int64_t n) const {
    return {log_probs.data + n * classes, count * classes,          targets.data + n * room,
            input_lengths.data[n],        target_lengths.data[n], blank};
  }
  int64_t Row() const { return 2 * room + 1; }
};

template <typename T>
void Forward(TensorView log_probs, TensorView targets, TensorView input_lengths,
             TensorView target_lengths, int64_t blank, TensorView loss_view,
             TensorView alpha_view) {
  const Batch<T> batch(log_probs, targets, input_lengths, target_lengths, blank);
  Tensor<T> loss(loss_view), alphas(alpha_view);
  ParallelFor(batch.count, [&](int64_t n) {
    const Sequence<T> s = batch[n];
    const int64_t row = batch.Row(), states = s.States();
    T* alpha = alphas.data + n * batch.steps * row;
    std::fill(alpha, alpha + batch.steps * row, kNever<T>);
    for (int64_t t = 0; t < s.length; ++t) {
      T* now = alpha + t * row;
      if (t == 0) {
        for (int64_t k = 0; k < std::min<int64_t>(2, states); ++k) now[k] = s.At(0, k);
        continue;
      }
      const T* before = now - row;
      for (int64_t k = 0; k < states; ++k) {
        T skipped = k >= 2 && s.Skips(k - 2) ? before[k - 2] : kNever<T>;
        now[k] = LogSum(before[k], k > 0 ? before[k - 1] : kNever<T>, skipped) + s.At(t, k);
      }
    }
    if (s.length == 0) {
      loss.data[n] = s.labels == 0 ? T(0) : -kNever<T>;
      return;
    }
    const T* last = alpha + (s.length - 1) * row;
    loss.data[n] = -LogSum(last[states - 1], states > 1 ? last[states - 2] : kNever<T>);
  });
}

template <typename T>
void BackwardOne(const Sequence<T>& s, int64_t classes, int64_t row, T grad, T loss,
                 const T* alpha, T* beta, T* result) {
  const int64_t states = s.States();
  for (int64_t t = s.length - 1; t >= 0; --t) {
    T* out = result + t * s.pitch;
    const T* probs = s.log_probs + t * s.pitch;
    std::fill(out, out + classes, kNever<T>);
    for (int64_t k = 0; k < states; ++k) {  // ascending: beta[k + 1], beta[k + 2] are still later's
      T through;
      if (t == s.length - 1) {
        through = k >= states - 2 ? T(0) : kNever<T>;
      } else {
        through = LogSum(beta[k], k + 1 < states ? beta[k + 1] : kNever<T>,
                         s.Skips(k) ? beta[k + 2] : kNever<T>);
      }
      beta[k] = through + s.At(t, k);
      T* sum = out + s.Label(k);
      *sum = LogSum(*sum, alpha[t * row + k] + beta[k]);
    }
    for (int64_t c = 0; c < classes; ++c) {
      T share = out[c] == kNever<T> ? T(0) : std::exp(out[c] + loss - probs[c]);
      out[c] = (std::exp(probs[c]) - share) * grad;
    }
  }
}

template <typename T>
void Backward(TensorView grad_view, TensorView log_probs, TensorView targets,
              TensorView input_lengths, TensorView target_lengths, TensorView loss_view,
              TensorView alpha_view, int64_t blank, TensorView result_view) {
  const Batch<T> batch(log_probs, targets, input_lengths, target_lengths, blank);
  Tensor<T> grad(grad_view), loss(loss_view), alphas(alpha_view), result(result_view);
  const int64_t row = batch.Row(), parts = std::clamp<int64_t>(batch.count, 1, NumThreads());
  WorkspaceScope workspace;
  T* memory = workspace.Take<T>(parts * row);
  ParallelFor(parts, [&](int64_t part) {
    for (int64_t n = batch.count * part / parts; n < batch.count * (part + 1) / parts; ++n) {
      const Sequence<T> s = batch[n];
      T* own = result.data + n * batch.classes;
      const bool lost = std::isinf(loss.data[n]);
      // A target that no path reaches: PyTorch gives NaN, or zeros where the loss was set to zero.
      const T fill = lost && grad.data[n] != T(0) ? std::numeric_limits<T>::quiet_NaN() : T(0);
      for (int64_t t = lost ? 0 : s.length; t < batch.steps; ++t) {
        const T value = t < s.length ? fill : T(0);
        std::fill(own + t * s.pitch, own + t * s.pitch + batch.classes, value);
      }
      if (lost) continue;
      BackwardOne(s, batch.classes, row, grad.data[n], loss.data[n],
                  alphas.data + n * batch.steps * row, memory + part * row, own);
    }
  });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef()
      .def("relax_disc.cpu.ctc_loss",
           [](TensorView log_probs, TensorView targets, TensorView input_lengths,
              TensorView target_lengths, int64_t blank, TensorView loss, TensorView alpha) {
             auto run = IsDouble(log_probs) ? &Forward<double> : &Forward<float>;
             run(log_probs, targets, input_lengths, target_lengths, blank, loss, alpha);
           })
      .def("relax_disc.cpu.ctc_loss_backward",
           [](TensorView grad, TensorView log_probs, TensorView targets, TensorView input_lengths,
              TensorView target_lengths, TensorView loss, TensorView alpha, int64_t blank,
              TensorView result) {
             auto run = IsDouble(log_probs) ? &Backward<double> : &Backward<float>;
             run(grad, log_probs, targets, input_lengths, target_lengths, loss, alpha, blank,
                 result);
           });
}

}  // namespace relax_disc
