// relax_disc.cpu.attention: softmax(scale * q k^T + mask) v without a matrix of scores, and with
// dropout of the weights.
//
// Blocks of queries against blocks of keys with a running maximum and sum per row, as in Dao et
// al., "FlashAttention" (2022), algorithm 1. Rows are independent and their sums have one order,
// so results do not depend on the number of threads.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include "kernels/attention/attention.h"

namespace relax_disc {
namespace {

constexpr int64_t kQueries = kForwardQueries, kChunk = kForwardChunk, kKeys = kForwardKeys;

template <typename T>
struct Forward {
  Heads<T> q, k, v, out;
  T* lse;
  int64_t lse_length = 0;  // elements of a head
  Mask<T> mask = {};
  Dropout<T> dropout = {};
  T scale = T(1);
  bool is_causal = false;

  /*! \brief Rows [first, last) of one head. */
  void Chunk(int64_t b, int64_t h, int64_t first, int64_t last, T* scratch) const {
    const int64_t width = RoundUpLanes<T>(v.dim), key_head = h / (q.heads / k.heads);
    T* keys = scratch;
    T* values = keys + kKeys * k.dim;
    T* queries = values + kKeys * width;
    T* scores = queries + kQueries * kPitch<T>;
    T* sums = scores + kQueries * kPitch<T>;
    T* top = sums + kChunk * width;
    T* total = top + kChunk;
    std::fill(sums, sums + (last - first) * width, T(0));
    std::fill(top, top + (last - first), kMinusInfinity<T>);
    std::fill(total, total + (last - first), T(0));
    int64_t seen = is_causal ? std::min(last, k.length) : k.length;
    for (int64_t key = 0; key < seen; key += kKeys) {
      int64_t count = std::min(kKeys, seen - key);
      PackTransposed(k.At(b, key_head, key), k.row, count, k.dim, keys);
      PackValues(v.At(b, key_head, key), count, values);
      int64_t start = is_causal ? std::max(first, key) : first;
      for (int64_t i = first + (start - first) / kQueries * kQueries; i < last; i += kQueries) {
        int64_t rows = std::min(kQueries, last - i), at = i - first;
        int64_t visible = is_causal ? std::min(count, i + rows - key) : count;
        CopyRows<T>(q.At(b, h, i), q.row, rows, q.dim, scale * static_cast<T>(kLog2E), q.dim,
                    kPitch<T>, queries);
        MultiplyCached<T>(rows, visible, q.dim, {queries, true, 1}, {keys, count, q.dim, 0},
                          nullptr, scores, kPitch<T>);
        for (int64_t r = 0; r < rows; ++r) {
          Softmax(b, h, i + r, key, visible, scores + r * kPitch<T>, sums + (at + r) * width,
                  top + at + r, total + at + r);
          if (dropout.Drops()) Drop(b, h, i + r, key, visible, scores + r * kPitch<T>);
        }
        T* target = sums + at * width;
        MultiplyCached<T>(rows, width, visible, {scores, true, 1}, {values, v.dim, count, 0},
                          target, target, width);
      }
    }
    for (int64_t i = first; i < last; ++i) {
      const T* row = sums + (i - first) * width;
      T weight = total[i - first];
      T factor = weight == T(0) ? T(0) : T(1) / weight;
      T* target = out.At(b, h, i);
      for (int64_t j = 0; j < v.dim; ++j) target[j] = row[j] * factor;
      lse[(b * q.heads + h) * lse_length + i] =
          weight == T(0) ? kMinusInfinity<T>
                         : top[i - first] * static_cast<T>(kLn2) + std::log(weight);
    }
  }

  /*! \brief Values as panels of operand B. */
  void PackValues(const T* rows, int64_t count, T* panels) const {
    for (int64_t x = 0; x < v.dim; x += kTileColumns<T>) {
      PackB(Matrix<T>{rows + x, v.row, 1}, count, std::min<int64_t>(kTileColumns<T>, v.dim - x),
            panels + x * count);
    }
  }

  /*! \brief Scores of one row to weights; rescales what the row has summed so far. */
  void Softmax(int64_t b, int64_t h, int64_t i, int64_t key, int64_t visible, T* row, T* sums,
               T* top, T* total) const {
    typedef typename Vector<T>::Type V;
    constexpr int L = kLanes<T>;
    int64_t limit = is_causal ? std::clamp<int64_t>(i + 1 - key, 0, visible) : visible;
    mask.Apply(b, h, i, key, limit, row);
    int64_t padded = RoundUpLanes<T>(visible);
    std::fill(row + limit, row + padded, kMinusInfinity<T>);
    V highest = LoadVector(row);
    for (int64_t j = L; j < padded; j += L) {
      V value = LoadVector(row + j);
      highest = value > highest ? value : highest;
    }
    T before = *top, now = std::max(before, MaxLanes<T>(highest));
    if (now == kMinusInfinity<T>) {  // nothing is seen, or all that is seen is NaN
      for (int64_t j = 0; j < limit; ++j) *total += std::isnan(row[j]) ? row[j] : T(0);
      std::fill(row, row + padded, T(0));
      return;
    }
    V sum = V{};
    for (int64_t j = 0; j < padded; j += L) {
      V weight = Exp2<T>(LoadVector(row + j) - now);
      StoreVector(row + j, weight);
      sum += weight;
    }
    if (before != now) {
      T factor = std::exp2(before - now);
      *total *= factor;
      for (int64_t j = 0; j < RoundUpLanes<T>(v.dim); ++j) sums[j] *= factor;
    }
    *total += SumLanes<T>(sum);
    *top = now;
  }

  /*! \brief Drop weights of one row; those that are kept become larger. */
  void Drop(int64_t b, int64_t h, int64_t i, int64_t key, int64_t visible, T* row) const {
    T factors[kKeys];
    const int64_t limit = is_causal ? std::clamp<int64_t>(i + 1 - key, 0, visible) : visible;
    dropout.Factors(b, h, i, key, limit, factors);
    for (int64_t j = 0; j < limit; ++j) row[j] *= factors[j];
  }

  /*! \brief Chunks of equal size: short sequences give one, long ones small scratch. */
  int64_t Chunks() const { return std::max<int64_t>((q.length + kChunk - 1) / kChunk, 1); }

  void RunChunk(int64_t b, int64_t h, int64_t chunk, T* scratch) const {
    if (chunk >= Chunks()) return;
    auto [first, last] = Share(q.length, kQueries, Chunks(), chunk);
    if (first < last) Chunk(b, h, first, last, scratch);
  }

  /*! \brief Run every chunk of `batches` sequences, the b-th of which is `sequence(b, run)`. */
  template <typename F>
  void RunAll(int64_t batches, int64_t longest, const F& run) const {
    TVM_FFI_CHECK(q.dim <= kMostHeadDim && v.dim <= kMostHeadDim, ValueError)
        << "attention: heads of " << std::max(q.dim, v.dim) << " elements, at most "
        << kMostHeadDim;
    int64_t chunks = std::max<int64_t>((longest + kChunk - 1) / kChunk, 1);
    const int64_t bytes = PieceBytes(AttentionElements<T>(k.dim, v.dim) * sizeof(T));
    WorkspaceScope workspace;
    char* memory = workspace.Take<char>(NumThreads() * bytes);
    ParallelFor(batches * q.heads * chunks, NumThreads(), [&](int64_t task, int thread) {
      // Late chunks of a causal head see more keys: they go first.
      int64_t chunk = chunks - 1 - task / (batches * q.heads);
      int64_t index = task % (batches * q.heads);
      run(index / q.heads, index % q.heads, chunk, reinterpret_cast<T*>(memory + thread * bytes));
    });
  }

  void Run() const {
    RunAll(q.batches, q.length, [&](int64_t b, int64_t h, int64_t chunk, T* scratch) {
      RunChunk(b, h, chunk, scratch);
    });
  }

  /*! \brief Sequence b of a packed batch, as a batch of one. */
  Forward Sequence(const PackedBatch& packed, int64_t b) const {
    Forward part = *this;
    const int64_t query = packed.queries.sequences.starts[b];
    const int64_t key = packed.keys.sequences.starts[b];
    const int64_t rows = packed.queries.sequences.Length(b);
    const int64_t columns = packed.keys.sequences.Length(b);
    part.q = q.Rows(query, rows);
    part.k = k.Rows(key, columns);
    part.v = v.Rows(key, columns);
    part.out = out.Rows(query, rows);
    part.lse = lse + query;
    part.mask = mask.Sequence(b, query, key);
    part.dropout = dropout.Sequence(b, query, key);
    return part;
  }

  void RunPacked(const PackedBatch& packed) const {
    const Sequences& sequences = packed.queries.sequences;
    RunAll(packed.Count(), sequences.Longest(),
           [&](int64_t b, int64_t h, int64_t chunk, T* scratch) {
             Sequence(packed, b).RunChunk(0, h, chunk, scratch);
           });
    const int64_t end = sequences.starts[sequences.count];
    out.ClearFrom(end);
    for (int64_t h = 0; h < q.heads; ++h) {
      std::fill(lse + h * lse_length + end, lse + (h + 1) * lse_length, kMinusInfinity<T>);
    }
  }
};

template <typename T>
void Attention(TensorView q, TensorView k, TensorView v, const AttentionOptions& options,
               TensorView out, TensorView lse) {
  Forward<T> forward{{q, options.OrderOf(0)},
                     {k, options.OrderOf(1)},
                     {v, options.OrderOf(2)},
                     {out, options.OrderOf(3)},
                     Tensor<T>(lse).data};
  RunWith<Forward<T>, T>(&forward, options);
}

void Dispatch(AttentionForm form, tvm::ffi::PackedArgs args) {
  ArgumentReader reader(args);
  TensorView q = reader.Next<TensorView>(), k = reader.Next<TensorView>(),
             v = reader.Next<TensorView>();
  AttentionOptions options(form, &reader);
  TensorView out = reader.Next<TensorView>(), lse = reader.Next<TensorView>();
  (IsDouble(q) ? &Attention<double> : &Attention<float>)(q, k, v, options, out, lse);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  for (int bits = 0; bits < kAttentionForms; ++bits) {
    const AttentionForm form = AttentionForm::OfNumber(bits);
    tvm::ffi::reflection::GlobalDef().def_packed(
        form.Name("attention").c_str(),
        [form](tvm::ffi::PackedArgs args, tvm::ffi::Any*) { Dispatch(form, args); });
  }
}

}  // namespace relax_disc
