// What the attention kernels share: vectorised 2^x and sums over vectors, operands with strided
// rows, masks, packed heads, the forms that their functions have.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_ATTENTION_ATTENTION_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_ATTENTION_ATTENTION_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "kernels/argument_reader.h"
#include "kernels/attention/attention_workspace.h"
#include "kernels/product/gemm.h"
#include "kernels/product/gemm_tile.h"
#include "kernels/philox.h"
#include "kernels/tensor_view.h"

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
/*! \brief Rows whose log-sum-exp is below this see nothing but what numbers of a mask hide. */
constexpr double kBlind = -1e30;
constexpr double kLn2 = 0.6931471805599453;

/*! \brief Widest head of the kernels: the whole of it is one panel of a matrix product. */
constexpr int64_t kMostHeadDim = kDepth;

/*! \brief In which order a tensor [batch, heads, length, dim] is stored. */
enum class HeadsOrder { kHeadsFirst, kLengthBeforeHeads, kLengthBeforeBatch };

/*! \brief A tensor [batch, heads, length, dim] stored so, as [b, l, heads, d] or [l, b, heads, d]. */
template <typename T>
struct Heads {
  T* data;
  int64_t batches, heads, length, dim;
  int64_t batch, head, row;  // strides in elements

  Heads(TensorView view, HeadsOrder order) {
    Tensor<T> tensor(view);
    TVM_FFI_CHECK(tensor.ndim == 4, ValueError) << "attention: rank " << tensor.ndim;
    data = tensor.data;
    const bool by_heads = order == HeadsOrder::kHeadsFirst;
    const bool by_length = order == HeadsOrder::kLengthBeforeBatch;
    batches = tensor.shape[by_length ? 1 : 0];
    heads = tensor.shape[by_heads ? 1 : 2];
    length = tensor.shape[by_heads ? 2 : by_length ? 0 : 1];
    dim = tensor.shape[3];
    batch = by_length ? heads * dim : heads * length * dim;
    head = by_heads ? length * dim : dim;
    row = by_heads ? dim : (by_length ? batches : 1) * heads * dim;
  }
  T* At(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }

  /*! \brief `count` rows from `start` on, as tensors of a batch of one. */
  Heads Rows(int64_t start, int64_t count) const {
    Heads part = *this;
    part.data += start * row;
    part.length = count;
    return part;
  }
  /*! \brief Write zeros from row `start` of a batch of one to its end. */
  void ClearFrom(int64_t start) const {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = start; i < length; ++i) std::fill_n(At(0, h, i), dim, T(0));
    }
  }
};

/*! \brief Sequences one after the other: sequence b is rows [starts[b], starts[b + 1]). */
struct Sequences {
  const int64_t* starts;
  int64_t count;

  Sequences(TensorView view, int64_t rows) {
    Tensor<int64_t> tensor(view);
    TVM_FFI_CHECK(tensor.ndim == 1 && tensor.shape[0] >= 1, ValueError)
        << "attention: starts of sequences of rank " << tensor.ndim;
    starts = tensor.data;
    count = tensor.shape[0] - 1;
    for (int64_t b = 0; b < count; ++b) {
      TVM_FFI_CHECK(0 <= starts[b] && starts[b] <= starts[b + 1] && starts[b + 1] <= rows,
                    ValueError)
          << "attention: sequence " << b << " is rows " << starts[b] << " to " << starts[b + 1]
          << " of " << rows;
    }
  }
  int64_t Length(int64_t b) const { return starts[b + 1] - starts[b]; }
  int64_t Longest() const {
    int64_t longest = 0;
    for (int64_t b = 0; b < count; ++b) longest = std::max(longest, Length(b));
    return longest;
  }
};

/*! \brief The queries, or the keys, of packed sequences and their places in the padded batch. */
struct PackedRows {
  Sequences sequences;
  const int64_t* positions;  // of each row in its sequence
  int64_t count;             // rows, with those that fill up

  PackedRows(TensorView starts, TensorView places, int64_t rows)
      : sequences(starts, rows), count(rows) {
    Tensor<int64_t> table(places);
    TVM_FFI_CHECK(table.ndim == 2 && table.shape[0] == 3 && table.shape[1] == rows, ValueError)
        << "attention: the places of packed rows have another shape than [3, " << rows << "]";
    positions = table.data + 2 * rows;
  }
  /*! \brief Whether an axis of a padded mask has all positions; one of 1 is everybody's. */
  void CheckInside(int64_t extent) const {
    for (int64_t i = 0; extent > 1 && i < count; ++i) {
      TVM_FFI_CHECK(0 <= positions[i] && positions[i] < extent, ValueError)
          << "attention: position " << positions[i] << " is outside the mask of " << extent;
    }
  }
};

/*! \brief A packed batch: sequence b of the queries sees sequence b of the keys. */
struct PackedBatch {
  PackedRows queries, keys;

  PackedBatch(PackedRows of_queries, PackedRows of_keys)
      : queries(of_queries), keys(of_keys) {
    TVM_FFI_CHECK(queries.sequences.count == keys.sequences.count, ValueError)
        << "attention: " << queries.sequences.count << " sequences of queries, "
        << keys.sequences.count << " of keys";
  }
  int64_t Count() const { return queries.sequences.count; }
};

/*!
 * \brief A mask [B|1, H|1, Tq|1, Tk|1] of bool or of the scores' type; null data: none.
 *
 * With places, query i and key j are at query_places[i] and key_places[j] of its axes.
 */
template <typename T>
struct Mask {
  const char* data = nullptr;
  bool is_bool = false;
  int64_t stride[4] = {0, 0, 0, 0};
  const int64_t* query_places = nullptr;
  const int64_t* key_places = nullptr;

  void Set(TensorView view, int64_t batches, int64_t heads, int64_t rows, int64_t columns) {
    const int64_t full[4] = {batches, heads, rows, columns};
    TVM_FFI_CHECK(view.ndim() == 4, ValueError) << "attention: mask of rank " << view.ndim();
    is_bool = view.dtype().bits == 8;
    if (!is_bool) Tensor<T> checked(view);
    data = static_cast<const char*>(view.data_ptr()) + view.byte_offset();
    int64_t step = 1;
    for (int i = 3; i >= 0; --i) {
      int64_t size = view.shape()[i];
      TVM_FFI_CHECK(size == 1 || size == full[i], ValueError)
          << "attention: axis " << i << " of the mask has " << size << " elements, not "
          << full[i];
      stride[i] = size == 1 ? 0 : step;
      step *= size;
    }
  }

  /*! \brief Like `Set`, for rows of packed sequences: the mask is that of the padded batch. */
  void SetPacked(TensorView view, const PackedBatch& batch, int64_t heads) {
    TVM_FFI_CHECK(view.ndim() == 4, ValueError) << "attention: mask of rank " << view.ndim();
    batch.queries.CheckInside(view.shape()[2]);
    batch.keys.CheckInside(view.shape()[3]);
    query_places = batch.queries.positions;
    key_places = batch.keys.positions;
    Set(view, batch.Count(), heads, view.shape()[2], view.shape()[3]);
  }

  /*! \brief Where the element of a query is whose key is at 0. */
  int64_t RowOffset(int64_t b, int64_t h, int64_t i) const {
    return b * stride[0] + h * stride[1] + (query_places ? query_places[i] : i) * stride[2];
  }
  /*! \brief How far the element of a key is from that. */
  int64_t KeyOffset(int64_t j) const { return (key_places ? key_places[j] : j) * stride[3]; }

  /*! \brief A number of the mask in units of log2, where the least number is no infinity. */
  static T InLog2(T number) {
    constexpr T kLeast = std::numeric_limits<T>::lowest();
    const T scaled = number * static_cast<T>(kLog2E);
    return number >= kLeast ? std::max(scaled, kLeast) : scaled;
  }

  /*! \brief Add the mask, in units of log2, to `count` scores from column `first` on. */
  void Apply(int64_t b, int64_t h, int64_t i, int64_t first, int64_t count, T* scores) const {
    if (data == nullptr) return;
    if (query_places != nullptr) return ApplyPacked(b, h, i, first, count, scores);
    int64_t at = RowOffset(b, h, i) + first * stride[3];
    if (is_bool) {
      const char* row = data + at;
      for (int64_t j = 0; j < count; ++j) {
        scores[j] = row[j * stride[3]] ? scores[j] : kMinusInfinity<T>;
      }
    } else {
      const T* row = reinterpret_cast<const T*>(data) + at;
      for (int64_t j = 0; j < count; ++j) {
        scores[j] += InLog2(row[j * stride[3]]);
      }
    }
  }

  /*! \brief The greatest number of a row, in units of log2, and how many of its keys have it. */
  std::pair<T, int64_t> Top(int64_t b, int64_t h, int64_t i, int64_t count) const {
    const T* row = reinterpret_cast<const T*>(data) + RowOffset(b, h, i);
    T top = kMinusInfinity<T>;
    int64_t times = 0;
    for (int64_t j = 0; j < count; ++j) {
      const T number = InLog2(row[KeyOffset(j)]);
      if (number > top) times = 0;
      top = std::max(top, number);
      times += number == top;
    }
    return {top, times};
  }

  void ApplyPacked(int64_t b, int64_t h, int64_t i, int64_t first, int64_t count,
                   T* scores) const {
    int64_t at = RowOffset(b, h, i);
    for (int64_t j = 0; j < count; ++j) {
      int64_t place = at + KeyOffset(first + j);
      if (is_bool) {
        scores[j] = data[place] ? scores[j] : kMinusInfinity<T>;
      } else {
        scores[j] += InLog2(reinterpret_cast<const T*>(data)[place]);
      }
    }
  }

  /*! \brief The mask of one sequence of a packed batch, from which query and key on it is. */
  Mask Sequence(int64_t b, int64_t query, int64_t key) const {
    Mask part = *this;
    if (data == nullptr) return part;
    part.data += b * stride[0] * static_cast<int64_t>(is_bool ? 1 : sizeof(T));
    part.query_places += query;
    part.key_places += key;
    return part;
  }
};

/*! \brief Pack the transposes of `count` rows as panels [dim, tile columns] of operand B. */
template <typename T>
void PackTransposed(const T* rows, int64_t pitch, int64_t count, int64_t dim, T* panels) {
  for (int64_t x = 0; x < count; x += kTileColumns<T>) {
    Matrix<T> matrix{rows + x * pitch, 1, pitch};
    PackB(matrix, dim, std::min<int64_t>(kTileColumns<T>, count - x), panels + x * dim);
  }
}

/*! \brief Copy rows times a factor to a new pitch; zeros up to `width`. */
template <typename T>
void CopyRows(const T* rows, int64_t pitch, int64_t count, int64_t dim, T factor, int64_t width,
              int64_t target_pitch, T* target) {
  for (int64_t i = 0; i < count; ++i) {
    const T* source = rows + i * pitch;
    T* row = target + i * target_pitch;
    for (int64_t j = 0; j < dim; ++j) row[j] = source[j] * factor;
    for (int64_t j = dim; j < width; ++j) row[j] = T(0);
  }
}

/*! \brief Operand B in cache: packed panels, or rows at a fixed pitch (whole vectors wide). */
template <typename T>
struct CachedB {
  const T* data;
  int64_t columns;  // that it was packed with
  int64_t depth;    // of the packed panels
  int64_t pitch;    // 0: packed panels

  const T* Panel(int64_t x) const { return data + (pitch ? x : x * depth); }
  int64_t Step(int64_t x) const {
    return pitch ? pitch : PanelVectors<T>(columns - x) * kLanes<T>;
  }
};

/*! \brief Operand A in cache: rows at kPitch, or the transpose of rows at `step`. */
template <typename T>
struct CachedA {
  const T* data;
  bool by_rows;
  int64_t step;
};

/*!
 * \brief C[rows, columns] = A * B + addend on operands that stay in cache.
 *
 * `columns` is rounded up to whole vectors, for which C, the addend and B have room.
 */
template <typename T>
void MultiplyCached(int64_t rows, int64_t columns, int64_t depth, CachedA<T> a, CachedB<T> b,
                    const T* addend, T* c, int64_t c_pitch) {
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t x = 0; x < columns; x += kTileColumns<T>) {
    int64_t vectors = PanelVectors<T>(columns - x);
    for (int64_t t = 0; t < tiles; ++t) {
      int64_t top = TileTop(rows, tiles, t), height = TileTop(rows, tiles, t + 1) - top;
      TileOperands<T> tile{};
      tile.depth = depth;
      tile.a = a.data + top * (a.by_rows ? kPitch<T> : 1);
      tile.a_step = a.step;
      tile.b = b.Panel(x);
      tile.b_step = b.Step(x);
      tile.addend = addend ? addend + top * c_pitch + x : nullptr;
      tile.addend_pitch = tile.c_pitch = c_pitch;
      tile.c = c + top * c_pitch + x;
      RunTile(height, vectors, a.by_rows, tile);
    }
  }
}

/*! \brief Which form of a function this is. */
struct AttentionForm {
  bool is_packed, has_mask, has_dropout, is_trained;  // the last: of a mask that gets a gradient

  static AttentionForm OfNumber(int bits) {
    return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
  }
  /*! \brief Its name; `base` is "attention" or "attention_backward". */
  std::string Name(const char* base) const {
    return std::string("relax_disc.cpu.") + (is_packed ? "packed_" : "") + base +
           (is_trained ? "_trained" : has_mask ? "_masked" : "") + (has_dropout ? "_dropout" : "");
  }
};
constexpr int kAttentionForms = 8;

/*! \brief What comes between the operands of a pass and its results, in this order. */
struct AttentionOptions {
  std::optional<TensorView> starts, places, key_starts, key_places, mask, rng;
  double scale;
  bool is_causal;
  int64_t layout;
  double dropout = 0;
  int64_t stream = 0;
  int64_t queries = 0, keys = 0;  // lengths of the padded batch

  AttentionOptions(AttentionForm form, ArgumentReader* reader) {
    if (form.is_packed) {
      for (auto* tensor : {&starts, &places, &key_starts, &key_places}) {
        *tensor = reader->Next<TensorView>();
      }
    }
    if (form.has_mask) mask = reader->Next<TensorView>();
    if (form.has_dropout) rng = reader->Next<TensorView>();
    scale = reader->Next<double>();
    is_causal = reader->Next<int64_t>() != 0;
    layout = reader->Next<int64_t>();
    if (!form.has_dropout) return;
    dropout = reader->Next<double>();
    stream = reader->Next<int64_t>();
    if (!form.is_packed) return;
    queries = reader->Next<int64_t>();
    keys = reader->Next<int64_t>();
  }
  HeadsOrder OrderOf(int operand) const {
    if ((layout >> (8 + operand) & 1) != 0) return HeadsOrder::kLengthBeforeBatch;
    return (layout >> operand & 1) != 0 ? HeadsOrder::kLengthBeforeHeads : HeadsOrder::kHeadsFirst;
  }

  /*! \brief The sequences of a packed batch; nothing: it is padded. */
  template <typename T>
  std::optional<PackedBatch> Packed(const Heads<T>& q, const Heads<T>& k) const {
    if (!starts) return std::nullopt;
    return PackedBatch(PackedRows(*starts, *places, q.length),
                       PackedRows(*key_starts, *key_places, k.length));
  }

  template <typename T>
  Dropout<T> Draws(const Heads<T>& q, const Heads<T>& k,
                   const std::optional<PackedBatch>& packed) const {
    if (!rng) return {};
    Tensor<int64_t> state(*rng);
    TVM_FFI_CHECK(state.Size(0, state.ndim) == 2, ValueError)
        << "attention: the state of the random operators is not a seed and an offset";
    Philox philox(state.data[0], state.data[1], stream);
    if (!packed) return {philox, dropout, q.heads, q.length, k.length};
    return {philox, dropout, q.heads,  queries,
            keys,   0,       packed->queries.positions, packed->keys.positions};
  }
};

/*! \brief Run a pass, forward or backward, over a padded or a packed batch. */
template <typename Pass, typename T>
void RunWith(Pass* pass, const AttentionOptions& options) {
  const std::optional<PackedBatch> packed = options.Packed(pass->q, pass->k);
  pass->lse_length = pass->q.length;
  pass->scale = static_cast<T>(options.scale);
  pass->is_causal = options.is_causal;
  pass->dropout = options.Draws(pass->q, pass->k, packed);
  if (packed) {
    if (options.mask) pass->mask.SetPacked(*options.mask, *packed, pass->q.heads);
    pass->RunPacked(*packed);
    return;
  }
  if (options.mask) {
    pass->mask.Set(*options.mask, pass->q.batches, pass->q.heads, pass->q.length, pass->k.length);
  }
  pass->Run();
}

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_ATTENTION_ATTENTION_H_
