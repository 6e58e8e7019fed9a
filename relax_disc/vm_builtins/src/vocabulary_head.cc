// Linear head and cross-entropy, one chunk of rows at a time: relax_disc.cpu.vocabulary_head.
//
// The logits of a chunk exist only in the workspace, where its gradient replaces them; loss,
// gradient of the input and of the weight come from one pass over the chunks with the same matrix
// products as the plain head. Rows whose label is ignored are not computed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "gemm.h"
#include "parallel.h"
#include "tensor_view.h"
#include "vector_exp.h"

namespace relax_disc {
namespace {

constexpr int kFloats = kLanes<float>;

struct HeadOptions {
  int64_t ignore_index;
  double label_smoothing;
};

inline FloatVector Load(const float* from) {
  return *reinterpret_cast<const LooseFloatVector*>(from);
}
inline void Store(float* to, FloatVector value) {
  *reinterpret_cast<LooseFloatVector*>(to) = value;
}

/*! \brief Loss of one row; its logits are replaced by the gradient times `scale`. */
double HeadRow(float* row, int64_t classes, int64_t label, double smoothing, float scale) {
  const int64_t whole = classes / kFloats * kFloats;
  FloatVector top = Splat(-std::numeric_limits<float>::infinity()), total{};
  for (int64_t j = 0; j < whole; j += kFloats) {
    const FloatVector x = Load(row + j);
    top = x > top ? x : top;
    total += x;
  }
  float peak = -std::numeric_limits<float>::infinity();
  double sum_logits = 0;
  for (int i = 0; i < kFloats; ++i) {
    peak = std::max(peak, top[i]);
    sum_logits += total[i];
  }
  bool has_nan = std::isnan(sum_logits);
  for (int64_t j = whole; j < classes; ++j) {
    peak = std::max(peak, row[j]);
    sum_logits += row[j];
    has_nan |= std::isnan(row[j]);
  }
  const double wanted = row[label];
  FloatVector sums{};
  for (int64_t j = 0; j < whole; j += kFloats) sums += VectorExp(Load(row + j) - peak);
  double sum = 0;
  for (int i = 0; i < kFloats; ++i) sum += sums[i];
  for (int64_t j = whole; j < classes; ++j) sum += std::exp(row[j] - peak);
  const double lse = has_nan ? std::numeric_limits<double>::quiet_NaN() : peak + std::log(sum);
  const float shift = static_cast<float>(lse), spread = static_cast<float>(smoothing / classes);
  for (int64_t j = 0; j < whole; j += kFloats) {
    Store(row + j, (VectorExp(Load(row + j) - shift) - spread) * scale);
  }
  for (int64_t j = whole; j < classes; ++j) {
    row[j] = (std::exp(row[j] - shift) - spread) * scale;
  }
  row[label] -= static_cast<float>(1.0 - smoothing) * scale;
  double loss = lse - (1.0 - smoothing) * wanted;
  if (smoothing != 0) loss -= smoothing / classes * sum_logits;
  return loss;
}

struct Head {
  Tensor<float> x, weight;
  Tensor<int64_t> target;
  float grad_loss;
  float *loss, *grad_x, *grad_weight;  // grad_weight is null if nobody wants it
  Tensor<float> workspace;             // [rows of a chunk, classes + 2 * width]
  bool mean;
  HeadOptions options;

  void Run() {
    const int64_t width = weight.shape[1], classes = weight.shape[0];
    const int64_t chunk = workspace.shape[0], count = target.Size(0, target.ndim);
    TVM_FFI_CHECK(x.Size(0, x.ndim) == count * width, ValueError)
        << "vocabulary_head: " << x.Size(0, x.ndim) << " inputs for " << count << " labels";
    WorkspaceScope scope;
    int64_t* rows = scope.Take<int64_t>(count);
    double* losses = scope.Take<double>(count);
    int64_t wanted = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t label = target.data[i];
      if (label == options.ignore_index) continue;
      TVM_FFI_CHECK(label >= 0 && label < classes, ValueError)
          << "label " << label << " of row " << i << " is outside 0 .. " << classes - 1;
      rows[wanted++] = i;
    }
    const double counted = static_cast<double>(wanted);
    const float scale = mean ? static_cast<float>(grad_loss / counted) : grad_loss;
    std::memset(grad_x, 0, sizeof(float) * count * width);
    if (wanted == 0 && grad_weight) std::memset(grad_weight, 0, sizeof(float) * classes * width);
    // Equal chunks: a last one of few rows would read the weight for little.
    const int64_t chunks = (wanted + chunk - 1) / chunk;
    for (int64_t i = 0; i < chunks; ++i) {
      auto [first, last] = Share(wanted, 1, chunks, i);
      Chunk(rows + first, last - first, scale, losses + first, i == 0);
    }
    double sum = 0;
    for (int64_t i = 0; i < wanted; ++i) sum += losses[i];
    *loss = static_cast<float>(mean ? sum / counted : sum);
  }

  void Chunk(const int64_t* rows, int64_t count, float scale, double* losses, bool is_first) {
    const int64_t width = weight.shape[1], classes = weight.shape[0];
    float* logits = workspace.data;
    float* inputs = logits + workspace.shape[0] * classes;
    float* grads = inputs + workspace.shape[0] * width;
    ParallelFor(count, [&](int64_t i) {
      std::memcpy(inputs + i * width, x.data + rows[i] * width, sizeof(float) * width);
    });
    Multiply(Product<float>{count, classes, width, {inputs, width, 1}, {weight.data, 1, width},
                            nullptr, 0, logits, classes});
    ParallelFor(count, [&](int64_t i) {
      losses[i] = HeadRow(logits + i * classes, classes, target.data[rows[i]],
                          options.label_smoothing, scale);
    });
    Multiply(Product<float>{count, width, classes, {logits, classes, 1}, {weight.data, width, 1},
                            nullptr, 0, grads, width});
    ParallelFor(count, [&](int64_t i) {
      std::memcpy(grad_x + rows[i] * width, grads + i * width, sizeof(float) * width);
    });
    if (grad_weight) {
      Multiply(Product<float>{classes, width, count, {logits, 1, classes}, {inputs, width, 1},
                              is_first ? nullptr : grad_weight, width, grad_weight, width});
    }
  }
};

void VocabularyHead(TensorView x, TensorView weight, TensorView target, TensorView grad_loss,
                    int64_t ignore_index, double label_smoothing, bool mean, TensorView loss,
                    TensorView grad_x, float* grad_weight, TensorView workspace) {
  Head{Tensor<float>(x),
       Tensor<float>(weight),
       Tensor<int64_t>(target),
       *Tensor<float>(grad_loss).data,
       Tensor<float>(loss).data,
       Tensor<float>(grad_x).data,
       grad_weight,
       Tensor<float>(workspace),
       mean,
       {ignore_index, label_smoothing}}
      .Run();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("relax_disc.cpu.vocabulary_head",
           [](TensorView x, TensorView weight, TensorView target, TensorView grad_loss,
              int64_t ignore_index, double label_smoothing, int64_t mean, TensorView loss,
              TensorView grad_x, TensorView grad_weight, TensorView workspace) {
             VocabularyHead(x, weight, target, grad_loss, ignore_index, label_smoothing, mean,
                            loss, grad_x, Tensor<float>(grad_weight).data, workspace);
           })
      .def("relax_disc.cpu.vocabulary_head_frozen",
           [](TensorView x, TensorView weight, TensorView target, TensorView grad_loss,
              int64_t ignore_index, double label_smoothing, int64_t mean, TensorView loss,
              TensorView grad_x, TensorView workspace) {
             VocabularyHead(x, weight, target, grad_loss, ignore_index, label_smoothing, mean,
                            loss, grad_x, nullptr, workspace);
           });
}

}  // namespace relax_disc
