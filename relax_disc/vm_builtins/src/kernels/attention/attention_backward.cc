// relax_disc.cpu.attention_backward: gradients of q, k and v from log-sum-exp, without a matrix of
// scores.
//
// Scores are computed again, block by block, as in Dao et al., "FlashAttention" (2022), algorithm
// 4. One task is one batch and key head: its thread sums dk and dv over the blocks of queries of
// all the heads that share the key head, and dq over the blocks of keys, each in ascending order.
// Limit: no more than batch * key heads threads have work.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include "kernels/attention/attention.h"

namespace relax_disc {
namespace {

constexpr int64_t kQueries = kBackwardQueries, kKeys = kBackwardKeys;

template <typename T>
struct Backward {
  Heads<T> grad, q, k, v, out, dq, dk, dv;
  const T* lse;
  T* dmask = nullptr;      // of the mask's shape; null: it is not trained
  int64_t lse_length = 0;  // elements of a head
  Mask<T> mask = {};
  Dropout<T> dropout = {};
  T scale = T(1);
  bool is_causal = false;

  /*! \brief Operands of one block of keys, in one thread's scratch. */
  struct Block {
    T *keys_t, *values_t, *keys;        // [dim, keys] panels twice, [keys, dim]
    T *dk, *dv;                         // [keys, dim]
    T *queries, *grads, *scores, *dp;   // [queries, kPitch]
    T* dq;                              // [queries, dim]
    int64_t first, count;               // keys
  };

  int64_t QueryWidth() const { return RoundUpLanes<T>(q.dim); }
  int64_t ValueWidth() const { return RoundUpLanes<T>(v.dim); }

  Block Carve(T* memory) const {
    Block block{};
    auto take = [&memory](int64_t count) {
      T* part = memory;
      memory += (count + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
      return part;
    };
    block.keys_t = take(kKeys * q.dim);
    block.values_t = take(kKeys * v.dim);
    block.keys = take(kKeys * QueryWidth());
    block.dk = take(kKeys * QueryWidth());
    block.dv = take(kKeys * ValueWidth());
    for (T** rows : {&block.queries, &block.grads, &block.scores, &block.dp}) {
      *rows = take(kQueries * kPitch<T>);
    }
    block.dq = take(kQueries * QueryWidth());
    return block;
  }

  /*! \brief All gradients of one key head. */
  void KeyHead(int64_t b, int64_t key_head, T* scratch) const {
    Block block = Carve(scratch);
    const int64_t group = q.heads / k.heads;
    if (k.length == 0) {  // nobody is seen: no block of keys writes dq
      for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
        for (int64_t i = 0; i < q.length; ++i) std::fill_n(dq.At(b, h, i), q.dim, T(0));
      }
    }
    for (int64_t key = 0; key < k.length; key += kKeys) {
      block.first = key;
      block.count = std::min(kKeys, k.length - key);
      PackTransposed(k.At(b, key_head, key), k.row, block.count, k.dim, block.keys_t);
      PackTransposed(v.At(b, key_head, key), v.row, block.count, v.dim, block.values_t);
      CopyRows<T>(k.At(b, key_head, key), k.row, block.count, k.dim, T(1), QueryWidth(),
                  QueryWidth(), block.keys);
      std::fill(block.dk, block.dk + block.count * QueryWidth(), T(0));
      std::fill(block.dv, block.dv + block.count * ValueWidth(), T(0));
      for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
        int64_t start = is_causal ? key / kQueries * kQueries : 0;
        for (int64_t i = start; i < q.length; i += kQueries) Queries(b, h, i, block);
      }
      for (int64_t j = 0; j < block.count; ++j) {
        std::copy_n(block.dk + j * QueryWidth(), k.dim, dk.At(b, key_head, key + j));
        std::copy_n(block.dv + j * ValueWidth(), v.dim, dv.At(b, key_head, key + j));
      }
    }
  }

  /*! \brief What one block of queries of one head adds to the gradients. */
  void Queries(int64_t b, int64_t h, int64_t first, const Block& block) const {
    const int64_t rows = std::min(kQueries, q.length - first);
    const int64_t visible =
        is_causal ? std::clamp<int64_t>(first + rows - block.first, 0, block.count) : block.count;
    if (visible == 0) return;
    CopyRows<T>(q.At(b, h, first), q.row, rows, q.dim, T(1), QueryWidth(), kPitch<T>,
                block.queries);
    CopyRows<T>(grad.At(b, h, first), grad.row, rows, v.dim, T(1), ValueWidth(), kPitch<T>,
                block.grads);
    MultiplyCached<T>(rows, visible, q.dim, {block.queries, true, 1},
                      {block.keys_t, block.count, q.dim, 0}, nullptr, block.scores, kPitch<T>);
    MultiplyCached<T>(rows, visible, v.dim, {block.grads, true, 1},
                      {block.values_t, block.count, v.dim, 0}, nullptr, block.dp, kPitch<T>);
    for (int64_t r = 0; r < rows; ++r) Row(b, h, first + r, r, visible, block);
    // dv += weights^T grads, dk += dscores^T queries, dq += dscores keys
    MultiplyCached<T>(visible, v.dim, rows, {block.scores, false, kPitch<T>},
                      {block.grads, 0, 0, kPitch<T>}, block.dv, block.dv, ValueWidth());
    MultiplyCached<T>(visible, q.dim, rows, {block.dp, false, kPitch<T>},
                      {block.queries, 0, 0, kPitch<T>}, block.dk, block.dk, QueryWidth());
    MultiplyCached<T>(rows, q.dim, visible, {block.dp, true, 1},
                      {block.keys, 0, 0, QueryWidth()}, nullptr, block.dq, QueryWidth());
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = block.dq + r * QueryWidth();
      T* target = dq.At(b, h, first + r);
      if (block.first == 0) {  // the first keys are seen by every row
        std::copy_n(row, q.dim, target);
      } else {
        for (int64_t j = 0; j < q.dim; ++j) target[j] += row[j];
      }
    }
  }

  /*! \brief Scores of row i to weights, and gradients of weights to gradients of scores. */
  void Row(int64_t b, int64_t h, int64_t i, int64_t r, int64_t visible, const Block& block) const {
    typedef typename Vector<T>::Type V;
    constexpr int L = kLanes<T>;
    T* scores = block.scores + r * kPitch<T>;
    T* dp = block.dp + r * kPitch<T>;
    const T* result = out.At(b, h, i);
    const T* gradient = block.grads + r * kPitch<T>;
    const int64_t limit =
        is_causal ? std::clamp<int64_t>(i + 1 - block.first, 0, visible) : visible;
    T delta = T(0);
    V sums = V{};
    int64_t j = 0;
    for (; j + L <= v.dim; j += L) sums += LoadVector(result + j) * LoadVector(gradient + j);
    for (; j < v.dim; ++j) delta += result[j] * gradient[j];
    delta += SumLanes<T>(sums);
    const T row_lse = lse[(b * q.heads + h) * lse_length + i];
    T top = row_lse * static_cast<T>(kLog2E);
    const int64_t padded = RoundUpLanes<T>(visible);
    if (row_lse == kMinusInfinity<T>) {  // a row that sees nothing
      std::fill(scores, scores + padded, T(0));
      std::fill(dp, dp + padded, T(0));
      return;
    }
    // Numbers hide all of the row: its scores vanish beside them, and their sum in the log.
    const bool is_blind = mask.data != nullptr && row_lse < static_cast<T>(kBlind);
    if (is_blind) {
      const auto [greatest, times] =
          mask.Top(b, h, i, is_causal ? std::min(i + 1, k.length) : k.length);
      std::fill(scores, scores + padded, T(0));
      mask.Apply(b, h, i, block.first, limit, scores);
      for (int64_t j = 0; j < limit; ++j) {
        scores[j] = scores[j] < greatest ? kMinusInfinity<T> : T(0);
      }
      top = std::log2(static_cast<T>(times));
    }
    const T factor = scale * static_cast<T>(kLog2E);
    if (mask.data != nullptr && !is_blind) {
      for (int64_t x = 0; x < padded; x += L) {
        StoreVector<T>(scores + x, LoadVector(scores + x) * factor);
      }
      mask.Apply(b, h, i, block.first, limit, scores);
    }
    const T multiplier = mask.data != nullptr ? T(1) : factor;
    T kept[kKeys];  // what dropout multiplies weights by, and so their gradients
    if (dropout.Drops()) {
      dropout.Factors(b, h, i, block.first, limit, kept);
      std::fill(kept + limit, kept + padded, T(0));
    }
    const T by_score = dmask != nullptr ? T(1) : scale;
    for (int64_t x = 0; x < padded; x += L) {
      V weight = Exp2<T>(LoadVector(scores + x) * multiplier - top), by_weight = LoadVector(dp + x);
      V used = weight;
      if (dropout.Drops()) {
        used *= LoadVector(kept + x);
        by_weight *= LoadVector(kept + x);
      }
      StoreVector<T>(scores + x, used);
      StoreVector<T>(dp + x, weight * (by_weight - delta) * by_score);
    }
    if (dmask != nullptr) {
      T* row = dmask + mask.RowOffset(b, h, i);
      for (int64_t x = 0; x < limit; ++x) row[mask.KeyOffset(block.first + x)] = dp[x];
      for (int64_t x = 0; x < padded; ++x) dp[x] *= scale;
    }
    std::fill(scores + limit, scores + padded, T(0));
    std::fill(dp + limit, dp + padded, T(0));
  }

  /*! \brief Run every key head of `batches` sequences by `run(b, key head, scratch)`. */
  template <typename F>
  void RunAll(int64_t batches, const F& run) const {
    TVM_FFI_CHECK(q.dim <= kMostHeadDim && v.dim <= kMostHeadDim, ValueError)
        << "attention_backward: heads of " << std::max(q.dim, v.dim) << " elements, at most "
        << kMostHeadDim;
    const int64_t bytes = PieceBytes(AttentionBackwardElements<T>(q.dim, v.dim) * sizeof(T));
    WorkspaceScope workspace;
    char* memory = workspace.Take<char>(NumThreads() * bytes);
    ParallelFor(batches * k.heads, NumThreads(), [&](int64_t task, int thread) {
      run(task / k.heads, task % k.heads, reinterpret_cast<T*>(memory + thread * bytes));
    });
  }

  void Run() const {
    RunAll(k.batches, [&](int64_t b, int64_t h, T* scratch) { KeyHead(b, h, scratch); });
  }

  /*! \brief Sequence b of a packed batch, as a batch of one. */
  Backward Sequence(const PackedBatch& packed, int64_t b) const {
    Backward part = *this;
    const int64_t query = packed.queries.sequences.starts[b];
    const int64_t key = packed.keys.sequences.starts[b];
    const int64_t rows = packed.queries.sequences.Length(b);
    const int64_t columns = packed.keys.sequences.Length(b);
    for (Heads<T> Backward::* operand :
         {&Backward::grad, &Backward::q, &Backward::out, &Backward::dq}) {
      part.*operand = (this->*operand).Rows(query, rows);
    }
    for (Heads<T> Backward::* operand :
         {&Backward::k, &Backward::v, &Backward::dk, &Backward::dv}) {
      part.*operand = (this->*operand).Rows(key, columns);
    }
    part.lse = lse + query;
    part.mask = mask.Sequence(b, query, key);
    if (dmask != nullptr) part.dmask = dmask + b * mask.stride[0];
    part.dropout = dropout.Sequence(b, query, key);
    return part;
  }

  void RunPacked(const PackedBatch& packed) const {
    RunAll(packed.Count(), [&](int64_t b, int64_t h, T* scratch) {
      Sequence(packed, b).KeyHead(0, h, scratch);
    });
    dq.ClearFrom(packed.queries.sequences.starts[packed.Count()]);
    for (const Heads<T>& result : {dk, dv}) {
      result.ClearFrom(packed.keys.sequences.starts[packed.Count()]);
    }
  }
};

template <typename T>
void AttentionBackward(TensorView grad, TensorView q, TensorView k, TensorView v, TensorView out,
                       TensorView lse, const AttentionOptions& options, TensorView dq,
                       TensorView dk, TensorView dv, std::optional<TensorView> dmask) {
  auto heads = [&options](TensorView view, int operand) {
    return Heads<T>(view, options.OrderOf(operand));
  };
  Backward<T> backward{heads(grad, 0), heads(q, 1),  heads(k, 2),  heads(v, 3),
                       heads(out, 4),  heads(dq, 5), heads(dk, 6), heads(dv, 7),
                       Tensor<T>(lse).data};
  if (dmask) {
    // Each of its elements belongs to one query of one head and one key: nothing is added up.
    Tensor<T> whole(*dmask);
    const int64_t batches = options.starts ? options.starts->shape()[0] - 1 : backward.q.batches;
    TVM_FFI_CHECK(whole.ndim == 4 && whole.shape[0] == batches &&
                      whole.shape[1] == backward.q.heads &&
                      std::equal(whole.shape, whole.shape + 4, options.mask->shape().data()),
                  ValueError)
        << "attention_backward: a trained mask, and its gradient, have a batch of " << batches
        << " and " << backward.q.heads << " heads";
    std::fill_n(whole.data, whole.Size(0, 4), T(0));
    backward.dmask = whole.data;
  }
  RunWith<Backward<T>, T>(&backward, options);
}

void Dispatch(AttentionForm form, tvm::ffi::PackedArgs args) {
  ArgumentReader reader(args);
  auto next = [&reader] { return reader.Next<TensorView>(); };
  TensorView grad = next(), q = next(), k = next(), v = next(), out = next(), lse = next();
  AttentionOptions options(form, &reader);
  TensorView dq = next(), dk = next(), dv = next();
  std::optional<TensorView> dmask;
  if (form.is_trained) dmask = next();
  auto function = IsDouble(q) ? &AttentionBackward<double> : &AttentionBackward<float>;
  function(grad, q, k, v, out, lse, options, dq, dk, dv, dmask);
}

void Register(AttentionForm form) {
  tvm::ffi::reflection::GlobalDef().def_packed(
      form.Name("attention_backward").c_str(),
      [form](tvm::ffi::PackedArgs args, tvm::ffi::Any*) { Dispatch(form, args); });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  for (int bits = 0; bits < kAttentionForms; ++bits) {
    AttentionForm form = AttentionForm::OfNumber(bits);
    Register(form);
    form.is_trained = true;
    if (form.has_mask) Register(form);
  }
}

}  // namespace relax_disc
