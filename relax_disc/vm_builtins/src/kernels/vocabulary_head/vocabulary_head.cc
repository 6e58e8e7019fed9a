// Linear head and cross-entropy, one chunk of rows at a time: relax_disc.cpu.vocabulary_head; and
// the gradient of some rows of its weight alone, made later: relax_disc.cpu.vocabulary_head_weight.
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
#include "kernels/vocabulary_head/head_chunk.h"
#include "kernels/vocabulary_head/head_tiles.h"
#include "kernels/vocabulary_head/head_vectors.h"
#include "kernels/workspace.h"

namespace relax_disc {
namespace {

struct Head {
  HeadOperands operands;
  int64_t count;
  float grad_loss;
  float* loss;  // null: the gradient of the weight alone
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
    int64_t wanted = 0, labelled = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t label = operands.target[i];
      if (label != operands.ignore_index) {
        TVM_FFI_CHECK(label >= 0 && label < operands.all_classes, ValueError)
            << "label " << label << " of row " << i << " is outside 0 .. "
            << operands.all_classes - 1;
        ++labelled;
      } else if (!operands.lse_factor || operands.lse_factor[i] == 0) {
        continue;
      }
      rows[wanted++] = i;
    }
    const double counted = static_cast<double>(labelled);
    operands.scale = mean ? static_cast<float>(grad_loss / counted) : grad_loss;
    if (loss) std::memset(operands.grad_x, 0, sizeof(float) * count * width);
    if (loss && operands.lse) std::memset(operands.lse, 0, sizeof(float) * count);
    if (wanted == 0 && operands.grad_weight) {
      std::memset(operands.grad_weight, 0, sizeof(float) * classes * width);
    }
    if (wanted == 0 && operands.grad_bias) {
      std::memset(operands.grad_bias, 0, sizeof(float) * classes);
    }
    const auto run_by = HeadTiles::MayMultiply(width) ? &Head::RunBy<HeadTiles>
                                                     : &Head::RunBy<HeadVectors>;
    (this->*run_by)(rows, wanted, losses, logits, &scope);
    if (!loss) return;
    double sum = 0;
    for (int64_t i = 0; i < wanted; ++i) sum += losses[i];
    *loss = static_cast<float>(mean ? sum / counted : sum);
  }

  template <typename Products>
  void RunBy(const int64_t* rows, int64_t wanted, double* losses, float* logits,
             WorkspaceScope* scope) {
    const int64_t room = workspace.shape[0];
    Products products(operands, MostChunkRows(wanted, room), scope);
    // Equal chunks: a last one of few rows would read the weight for little.
    const int64_t chunks = wanted == 0 ? 0 : (wanted + room - 1) / room;
    for (int64_t i = 0; i < chunks; ++i) {
      auto [first, last] = Share(wanted, kRowUnit, chunks, i);
      HeadChunk<Products> chunk(operands, rows + first, last - first, workspace.data, &products);
      loss ? chunk.Run(losses + first, logits + first, i == 0)
           : chunk.RunWeight(logits + first, i == 0);
    }
  }
};

/*! \brief What a function makes of the gradient of the weight. */
enum class Weight { kWhole, kFrozen, kLater, kRows };

/*! \brief Which of the optional arguments a function has. */
struct Variant {
  bool bias, lse;
  Weight weight;
  std::string Name() const {
    constexpr const char* kEnds[] = {"", "_frozen", "_lse", ""};
    return std::string("relax_disc.cpu.vocabulary_head") +
           (weight == Weight::kRows ? "_weight" : "") + (bias ? "_bias" : "") +
           (lse ? "_z" : "") + kEnds[static_cast<int>(weight)];
  }
  int Arguments() const {
    if (weight == Weight::kRows) return 12 + bias + lse;
    return 10 + 2 * bias + 2 * lse + (weight != Weight::kFrozen);
  }
};

/*! \brief Reads the arguments; some forms lack some. */
class Reader : public ArgumentReader {
 public:
  using ArgumentReader::ArgumentReader;
  /*! \brief The next tensor, of so many elements, if the function has it; else null. */
  template <typename T = float>
  T* NextIf(bool has, int64_t size) {
    if (!has) return nullptr;
    const Tensor<T> tensor = NextTensor<T>();
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
  const bool only_rows = variant.weight == Weight::kRows;
  head.x = x.data;
  head.weight = weight.data;
  head.target = target.data;
  const float grad_loss = *reader.NextTensor<float>().data;
  Tensor<float> bias = weight;
  if (variant.bias) bias = reader.NextTensor<float>();
  head.bias = variant.bias ? bias.data : nullptr;
  head.lse_factor = reader.NextIf(variant.lse, count);
  head.row_lse = reader.NextIf<double>(only_rows, count);
  head.ignore_index = reader.Next<int64_t>();
  head.label_smoothing = reader.Next<double>();
  const bool mean = reader.Next<int64_t>() != 0;
  head.first_class = only_rows ? reader.Next<int64_t>() : 0;
  head.all_classes = only_rows ? reader.Next<int64_t>() : head.classes;
  TVM_FFI_CHECK(!variant.bias || bias.Size(0, bias.ndim) == head.all_classes, ValueError)
      << "vocabulary_head: a bias of " << bias.Size(0, bias.ndim) << " elements, expected "
      << head.all_classes;
  TVM_FFI_CHECK(head.first_class % kBlockClasses == 0, ValueError)
      << "vocabulary_head: rows of the weight from " << head.first_class
      << " on, which begins no block of " << kBlockClasses;
  float* loss = nullptr;
  if (!only_rows) {
    loss = reader.NextTensor<float>().data;
    head.grad_x = reader.NextTensor<float>().data;
    head.grad_bias = reader.NextIf(variant.bias, head.classes);
    head.lse = reader.NextIf(variant.lse, count);
    head.row_lse = reader.NextIf<double>(variant.weight == Weight::kLater, count);
  }
  const bool has_gradient = variant.weight == Weight::kWhole || only_rows;
  head.grad_weight = reader.NextIf(has_gradient, head.classes * head.width);
  Head{head, count, grad_loss, loss, reader.NextTensor<float>(), mean}.Run();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  for (int bits = 0; bits < 16; ++bits) {
    const Variant variant{(bits & 1) != 0, (bits & 2) != 0, static_cast<Weight>(bits >> 2)};
    tvm::ffi::reflection::GlobalDef().def_packed(
        variant.Name().c_str(), [variant](tvm::ffi::PackedArgs args, tvm::ffi::Any*) {
          VocabularyHead(variant, args);
        });
  }
}

}  // namespace relax_disc
