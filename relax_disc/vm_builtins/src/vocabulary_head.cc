// Linear head and cross-entropy, one chunk of rows at a time: relax_disc.cpu.vocabulary_head.
//
// The logits of a chunk exist only in the workspace, where its gradient replaces them; loss,
// gradient of the input and of the weight come from one pass over the chunks with the same matrix
// products as the plain head. Rows whose label is ignored are not computed.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>

#include "gemm.h"
#include "tensor_view.h"
#include "vocabulary_head_chunk.h"
#include "workspace.h"

namespace relax_disc {
namespace {

struct Head {
  HeadOperands operands;
  int64_t count;
  float grad_loss;
  float* loss;
  Tensor<float> workspace;  // [rows of a chunk, HeadRowFloats]
  bool mean;
  int64_t ignore_index;

  void Run() {
    const int64_t width = operands.width, classes = operands.classes;
    const int64_t room = workspace.shape[0];
    TVM_FFI_CHECK(room % kRowUnit == 0 && workspace.shape[1] >= HeadRowFloats(classes, width),
                  ValueError)
        << "vocabulary_head: a workspace of [" << room << ", " << workspace.shape[1] << "]";
    WorkspaceScope scope;
    int64_t* rows = scope.Take<int64_t>(count);
    double* losses = scope.Take<double>(count);
    float* logits = scope.Take<float>(count);
    float* scratch = scope.Take<float>(NumThreads() * kHeadScratch);
    int64_t wanted = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t label = operands.target[i];
      if (label == ignore_index) continue;
      TVM_FFI_CHECK(label >= 0 && label < classes, ValueError)
          << "label " << label << " of row " << i << " is outside 0 .. " << classes - 1;
      rows[wanted++] = i;
    }
    const double counted = static_cast<double>(wanted);
    operands.scale = mean ? static_cast<float>(grad_loss / counted) : grad_loss;
    std::memset(operands.grad_x, 0, sizeof(float) * count * width);
    if (wanted == 0 && operands.grad_weight) {
      std::memset(operands.grad_weight, 0, sizeof(float) * classes * width);
    }
    if (wanted == 0 && operands.grad_bias) {
      std::memset(operands.grad_bias, 0, sizeof(float) * classes);
    }
    // Equal chunks: a last one of few rows would read the weight for little.
    const int64_t chunks = (wanted + room - 1) / room;
    for (int64_t i = 0; i < chunks; ++i) {
      auto [first, last] = Share(wanted, kRowUnit, chunks, i);
      HeadChunk(operands, rows + first, last - first, workspace.data, scratch)
          .Run(losses + first, logits + first, i == 0);
    }
    double sum = 0;
    for (int64_t i = 0; i < wanted; ++i) sum += losses[i];
    *loss = static_cast<float>(mean ? sum / counted : sum);
  }
};

struct Options {
  int64_t ignore_index;
  double label_smoothing;
  bool mean;
};

void VocabularyHead(TensorView x, TensorView weight, TensorView target, TensorView grad_loss,
                    const float* bias, Options options, TensorView loss, TensorView grad_x,
                    float* grad_weight, float* grad_bias, TensorView workspace) {
  Tensor<float> inputs(x), table(weight);
  Tensor<int64_t> labels(target);
  const int64_t count = labels.Size(0, labels.ndim), width = table.shape[1];
  TVM_FFI_CHECK(inputs.Size(0, inputs.ndim) == count * width, ValueError)
      << "vocabulary_head: " << inputs.Size(0, inputs.ndim) << " inputs for " << count << " labels";
  Head{{table.shape[0], width, inputs.data, table.data, bias, labels.data,
        Tensor<float>(grad_x).data, grad_weight, grad_bias, options.label_smoothing, 0},
       count,
       *Tensor<float>(grad_loss).data,
       Tensor<float>(loss).data,
       Tensor<float>(workspace),
       options.mean,
       options.ignore_index}
      .Run();
}

float* Data(TensorView view) { return Tensor<float>(view).data; }

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  using View = TensorView;
  refl::GlobalDef()
      .def("relax_disc.cpu.vocabulary_head",
           [](View x, View weight, View target, View grad_loss, int64_t ignore_index,
              double label_smoothing, int64_t mean, View loss, View grad_x, View grad_weight,
              View workspace) {
             VocabularyHead(x, weight, target, grad_loss, nullptr,
                            {ignore_index, label_smoothing, mean != 0}, loss, grad_x,
                            Data(grad_weight), nullptr, workspace);
           })
      .def("relax_disc.cpu.vocabulary_head_frozen",
           [](View x, View weight, View target, View grad_loss, int64_t ignore_index,
              double label_smoothing, int64_t mean, View loss, View grad_x, View workspace) {
             VocabularyHead(x, weight, target, grad_loss, nullptr,
                            {ignore_index, label_smoothing, mean != 0}, loss, grad_x, nullptr,
                            nullptr, workspace);
           })
      .def("relax_disc.cpu.vocabulary_head_bias",
           [](View x, View weight, View target, View grad_loss, View bias, int64_t ignore_index,
              double label_smoothing, int64_t mean, View loss, View grad_x, View grad_bias,
              View grad_weight, View workspace) {
             VocabularyHead(x, weight, target, grad_loss, Data(bias),
                            {ignore_index, label_smoothing, mean != 0}, loss, grad_x,
                            Data(grad_weight), Data(grad_bias), workspace);
           })
      .def("relax_disc.cpu.vocabulary_head_bias_frozen",
           [](View x, View weight, View target, View grad_loss, View bias, int64_t ignore_index,
              double label_smoothing, int64_t mean, View loss, View grad_x, View grad_bias,
              View workspace) {
             VocabularyHead(x, weight, target, grad_loss, Data(bias),
                            {ignore_index, label_smoothing, mean != 0}, loss, grad_x, nullptr,
                            Data(grad_bias), workspace);
           });
}

}  // namespace relax_disc
