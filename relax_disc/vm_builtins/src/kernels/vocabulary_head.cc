// Linear head and cross-entropy, one chunk of rows at a time: relax_disc.cpu.vocabulary_head.
//
// The logits of a chunk exist only in the workspace, where its gradient replaces them; loss,
// gradient of the input and of the weight come from one pass over the chunks with the same matrix
// products as the plain head. Rows whose label is ignored are computed only for z-loss, which adds
// lse_factor * lse^2 / 2 of a row to what gradients are of, lse being its log-sum-exp.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>
#include <string>

#include "kernels/argument_reader.h"
#include "kernels/product/gemm.h"
#include "kernels/tensor_view.h"
#include "kernels/vocabulary_head_chunk.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

struct Head {
  HeadOperands operands;
  int64_t count;
  float grad_loss;
  float* loss;
  Tensor<float> workspace;  // [rows of a chunk, HeadRowFloats]
  bool mean;

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
    int64_t wanted = 0, labelled = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t label = operands.target[i];
      if (label != operands.ignore_index) {
        TVM_FFI_CHECK(label >= 0 && label < classes, ValueError)
            << "label " << label << " of row " << i << " is outside 0 .. " << classes - 1;
        ++labelled;
      } else if (!operands.lse_factor || operands.lse_factor[i] == 0) {
        continue;
      }
      rows[wanted++] = i;
    }
    const double counted = static_cast<double>(labelled);
    operands.scale = mean ? static_cast<float>(grad_loss / counted) : grad_loss;
    std::memset(operands.grad_x, 0, sizeof(float) * count * width);
    if (operands.lse) std::memset(operands.lse, 0, sizeof(float) * count);
    if (wanted == 0 && operands.grad_weight) {
      std::memset(operands.grad_weight, 0, sizeof(float) * classes * width);
    }
    if (wanted == 0 && operands.grad_bias) {
      std::memset(operands.grad_bias, 0, sizeof(float) * classes);
    }
    // Equal chunks: a last one of few rows would read the weight for little.
    const int64_t chunks = wanted == 0 ? 0 : (wanted + room - 1) / room;
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

/*! \brief Which of the optional arguments a function has. */
struct Variant {
  bool bias, lse, frozen;
  std::string Name() const {
    return std::string("relax_disc.cpu.vocabulary_head") + (bias ? "_bias" : "") +
           (lse ? "_z" : "") + (frozen ? "_frozen" : "");
  }
  int Arguments() const { return 10 + 2 * bias + 2 * lse + !frozen; }
};

/*! \brief Reads the arguments; some forms lack some. */
class Reader : public ArgumentReader {
 public:
  using ArgumentReader::ArgumentReader;
  /*! \brief The next tensor, of so many elements, if the function has it; else null. */
  float* NextIf(bool has, int64_t size) {
    if (!has) return nullptr;
    const Tensor<float> tensor = NextTensor<float>();
    TVM_FFI_CHECK(tensor.Size(0, tensor.ndim) == size, ValueError)
        << "vocabulary_head: argument " << count() - 1 << " has " << tensor.Size(0, tensor.ndim)
        << " elements, expected " << size;
    return tensor.data;
  }
};

void VocabularyHead(Variant variant, tvm::ffi::PackedArgs args) {
  TVM_FFI_CHECK(args.size() == variant.Arguments(), TypeError)
      << variant.Name() << " takes " << variant.Arguments() << " arguments, got " << args.size();
  Reader reader(args);
  HeadOperands head{};
  const Tensor<float> x = reader.NextTensor<float>(), weight = reader.NextTensor<float>();
  const Tensor<int64_t> target = reader.NextTensor<int64_t>();
  const int64_t count = target.Size(0, target.ndim);
  head.classes = weight.shape[0];
  head.width = weight.shape[1];
  TVM_FFI_CHECK(x.Size(0, x.ndim) == count * head.width, ValueError)
      << "vocabulary_head: " << x.Size(0, x.ndim) << " inputs for " << count << " labels";
  head.x = x.data;
  head.weight = weight.data;
  head.target = target.data;
  const float grad_loss = *reader.NextTensor<float>().data;
  head.bias = reader.NextIf(variant.bias, head.classes);
  head.lse_factor = reader.NextIf(variant.lse, count);
  head.ignore_index = reader.Next<int64_t>();
  head.label_smoothing = reader.Next<double>();
  const bool mean = reader.Next<int64_t>() != 0;
  float* loss = reader.NextTensor<float>().data;
  head.grad_x = reader.NextTensor<float>().data;
  head.grad_bias = reader.NextIf(variant.bias, head.classes);
  head.lse = reader.NextIf(variant.lse, count);
  head.grad_weight = reader.NextIf(!variant.frozen, head.classes * head.width);
  Head{head, count, grad_loss, loss, reader.NextTensor<float>(), mean}.Run();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  for (int bits = 0; bits < 8; ++bits) {
    const Variant variant{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
    tvm::ffi::reflection::GlobalDef().def_packed(
        variant.Name().c_str(), [variant](tvm::ffi::PackedArgs args, tvm::ffi::Any*) {
          VocabularyHead(variant, args);
        });
  }
}

}  // namespace relax_disc
