// Matrix products on the one thread pool: C = A * B + addend with any strides of A and B.
//
// Blocked as in Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008):
// a shared packed block of B, packed rows of A per thread, register tiles of a kernel. Every
// element of C is a sum of depth blocks in ascending k, so results depend on neither the split over
// threads nor, with one kernel, the other rows and columns.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels/parallel.h"
#include "kernels/product/amx_kernel.h"
#include "kernels/product/fma_kernel.h"
#include "kernels/product/gemm_pack.h"
#include "kernels/product/window_matrix.h"
#include "kernels/workspace.h"

namespace relax_disc {

template <typename T, typename Left = Matrix<T>, typename Right = Matrix<T>>
struct Product {
  int64_t m, n, k;
  Left a;   // [m, k]
  Right b;  // [k, n]
  const T* addend;  // [m, n] with pitch `addend_pitch` (0: one row for all), or null for zero
  int64_t addend_pitch;
  T* c;  // [m, n], rows contiguous
  int64_t c_pitch;
};

/*! \brief Room of two such blocks, which may hold fewer columns over the whole depth instead... */
template <typename Kernel>
constexpr int64_t kWholeBytes = 2 * Kernel::kMostDepth * Kernel::kBlockRowBytes;
/*! \brief ...if they are at least so wide: each packing of A serves so many columns. */
constexpr int64_t kWholeRowBytes = 2048;

/*! \brief Part `index` of [0, count) cut into `parts` nearly equal parts of whole `unit`s. */
inline std::pair<int64_t, int64_t> Share(int64_t count, int64_t unit, int64_t parts,
                                         int64_t index) {
  int64_t units = (count + unit - 1) / unit;
  return {std::min(count, units * index / parts * unit),
          std::min(count, units * (index + 1) / parts * unit)};
}

/*! \brief `count` rounded up to whole `unit`s. */
inline int64_t WholeUnits(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

/*! \brief Depth of the nearly equal blocks into which a depth is cut. */
template <typename Kernel>
int64_t DepthBlock(int64_t k) {
  const int64_t blocks = (k + Kernel::kMostDepth - 1) / Kernel::kMostDepth;
  return WholeUnits((k + blocks - 1) / blocks, Kernel::kDepthUnit);
}

/*! \brief Whether rows are so few that threads share nothing: each packs what it multiplies. */
template <typename Kernel>
constexpr bool IsPrivate(int64_t m) {
  return Kernel::kMayBePrivate && m <= Kernel::kBlockTiles * Kernel::kRows;
}

/*! \brief Most bytes that a product by one kernel takes beside its operands, or a smaller one. */
template <typename Kernel>
int64_t TeamBytes(int64_t m, int64_t n, int64_t k, int64_t threads) {
  const int64_t element = sizeof(typename Kernel::Packed);
  const int64_t depth = WholeUnits(k, Kernel::kDepthUnit);
  int64_t block = 0;
  if (Kernel::kMayBePrivate) {  // of fewer rows
    block = threads * Kernel::kColumns * std::min(depth, Kernel::kMostDepth) * element;
  }
  if (!IsPrivate<Kernel>(m)) {
    const int64_t shared = WholeUnits(n, Kernel::kColumns) * depth * element;
    block = std::max(block, std::min(kWholeBytes<Kernel>, shared));
  }
  const int64_t tiles = std::min(Kernel::kBlockTiles, (m + Kernel::kRows - 1) / Kernel::kRows);
  // A panel holds kDepthUnit steps or more beside its flag.
  const int64_t flags = block * Kernel::kFlag / (Kernel::kColumns * Kernel::kDepthUnit);
  const int64_t panel = Kernel::MostPanelOfA(k);
  const int64_t panels = threads * WholeUnits(tiles * panel, 64) * element;
  return PieceBytes(block + flags + panels);
}

/*! \brief Most bytes that a product takes beside its operands on at most so many threads. */
template <typename T>
int64_t GemmBytes(int64_t m, int64_t n, int64_t k, int64_t threads) {
  if (m == 0 || n == 0 || k == 0) return 0;
  int64_t bytes = TeamBytes<FmaKernel<T>>(m, n, k, threads);
  if (std::is_same_v<T, float> && MayUseAmx(n, k)) {
    bytes = std::max(bytes, TeamBytes<AmxKernel>(m, n, k, threads));
  }
  return bytes;
}

/*! \brief One product computed by a team of threads arranged as rows x columns of C. */
template <typename Kernel, typename Left, typename Right>
class GemmTeam {
 public:
  using T = typename Kernel::Element;
  using Packed = typename Kernel::Packed;

  GemmTeam(const Product<T, Left, Right>& product, int rows, int columns, WorkspaceScope* workspace)
      : p_(product),
        kernel_(product.a),
        rows_(rows),
        columns_(columns),
        barrier_(rows * columns) {
    const int64_t units = (product.m + Kernel::kRowUnit - 1) / Kernel::kRowUnit;
    const int64_t share = (units + rows - 1) / rows;
    constexpr int64_t most_rows = Kernel::kBlockTiles * Kernel::kRows;
    row_blocks_ = (share * Kernel::kRowUnit + most_rows - 1) / most_rows;
    const int64_t height = (share + row_blocks_ - 1) / row_blocks_ * Kernel::kRowUnit;
    const int64_t tiles = (height + Kernel::kRows - 1) / Kernel::kRows;
    depth_ = DepthBlock<Kernel>(product.k);
    panel_ = kernel_.PanelOfA(depth_);
    a_size_ = WholeUnits(tiles * panel_, 64);
    const int64_t element = sizeof(Packed);
    int64_t whole = kWholeBytes<Kernel> / element / WholeUnits(product.k, Kernel::kDepthUnit) /
                    Kernel::kColumns * Kernel::kColumns;
    const bool is_whole = whole * element >= kWholeRowBytes || whole >= product.n;
    order_ = IsPrivate<Kernel>(product.m) ? Order::kPrivate
             : is_whole                   ? Order::kWhole
                                          : Order::kDeep;
    const int64_t deep = Kernel::kBlockRowBytes / element / Kernel::kColumns * Kernel::kColumns;
    const int64_t most = is_whole ? whole : deep, blocks = (product.n + most - 1) / most;
    block_columns_ = WholeUnits((product.n + blocks - 1) / blocks, Kernel::kColumns);
    b_block_ = block_columns_ / Kernel::kColumns * Kernel::PanelOfB(depth_);
    int64_t b_size = 2 * b_block_;
    if (order_ == Order::kWhole) {
      const int64_t last = (product.k - 1) / depth_ * depth_;  // where the last depth block begins
      b_size = last / depth_ * b_block_ +
               block_columns_ / Kernel::kColumns * Kernel::PanelOfB(product.k - last);
    } else if (order_ == Order::kPrivate) {
      b_size = rows * columns * Kernel::PanelOfB(depth_);
    }
    b_ = workspace->Take<Packed>(b_size + rows * columns * a_size_);
    a_ = b_ + b_size;
  }

  /*! \brief The share of one thread; all threads of the team must call it. */
  void Run(int thread) {
    typename Kernel::Scope scope;
    switch (order_) {
      case Order::kPrivate:
        return RunPrivate(thread);
      case Order::kWhole:
        return RunWhole(thread);
      case Order::kDeep:
        return RunDeep(thread);
    }
  }

 private:
  enum class Order { kPrivate, kWhole, kDeep };

  /*! \brief This thread's part of C, with a tile column of B at a time; nothing is shared. */
  void RunPrivate(int thread) {
    const Range rows = RowsOf(thread, 0);
    auto [left, right] = Share(p_.n, Kernel::kColumns, columns_, thread % columns_);
    if (rows.begin == rows.end || left == right) return;
    Packed* panel = b_ + thread * Kernel::PanelOfB(depth_);
    for (int64_t k = 0; k < p_.k; k += depth_) {
      PackRows(thread, rows, k);
      for (int64_t x = left; x < right; x += Kernel::kColumns) {
        const int64_t columns = std::min(Kernel::kColumns, right - x);
        kernel_.PackB(p_.b.At(k, x), std::min(depth_, p_.k - k), columns, panel);
        TileColumn(thread, rows, x, columns, k, panel);
      }
    }
  }

  /*! \brief Whole columns of B at a time: a block of C stays in cache over the depth. */
  void RunWhole(int thread) {
    for (int64_t j = 0; j < p_.n; j += block_columns_) {
      int64_t width = std::min(block_columns_, p_.n - j);
      if (j > 0) barrier_.Wait();  // until nobody reads the block before
      for (int64_t k = 0; k < p_.k; k += depth_) {
        PackBlock(thread, j, width, k, b_ + k / depth_ * b_block_);
      }
      barrier_.Wait();
      for (int64_t block = 0; block < row_blocks_; ++block) {
        const Range rows = RowsOf(thread, block);
        for (int64_t k = 0; k < p_.k; k += depth_) {
          PackRows(thread, rows, k);
          Tiles(thread, rows, j, width, k, b_ + k / depth_ * b_block_);
        }
      }
    }
  }

  /*! \brief One depth block of B at a time; two take turns, so that one barrier each is enough. */
  void RunDeep(int thread) {
    int which = 0;
    for (int64_t j = 0; j < p_.n; j += block_columns_) {
      int64_t width = std::min(block_columns_, p_.n - j);
      for (int64_t k = 0; k < p_.k; k += depth_, which ^= 1) {
        PackBlock(thread, j, width, k, b_ + which * b_block_);
        barrier_.Wait();
        for (int64_t block = 0; block < row_blocks_; ++block) {
          const Range rows = RowsOf(thread, block);
          PackRows(thread, rows, k);
          Tiles(thread, rows, j, width, k, b_ + which * b_block_);
        }
      }
    }
  }

  struct Range {
    int64_t begin, end;
  };

  /*! \brief A block of a thread's rows of C. */
  Range RowsOf(int thread, int64_t block) const {
    auto [first, last] = Share(p_.m, Kernel::kRowUnit, rows_, thread / columns_);
    auto [begin, end] = Share(last - first, Kernel::kRowUnit, row_blocks_, block);
    return {first + begin, first + end};
  }

  void PackRows(int thread, Range rows, int64_t k) {
    const int64_t height = rows.end - rows.begin;
    kernel_.PackA(p_.a.At(rows.begin, k), height, std::min(depth_, p_.k - k),
                  (height + Kernel::kRows - 1) / Kernel::kRows, a_ + thread * a_size_, panel_);
  }

  /*! \brief Pack this thread's panels of a block of B. */
  void PackBlock(int thread, int64_t j, int64_t width, int64_t k, Packed* block) {
    int64_t depth = std::min(depth_, p_.k - k);
    auto [left, right] = Share(width, Kernel::kColumns, rows_ * columns_, thread);
    for (int64_t x = left; x < right; x += Kernel::kColumns) {
      kernel_.PackB(p_.b.At(k, j + x), depth, std::min(Kernel::kColumns, width - x),
                    block + x / Kernel::kColumns * Kernel::PanelOfB(depth));
    }
  }

  /*! \brief This thread's columns of a block of its rows of C, for one depth block. */
  void Tiles(int thread, Range rows, int64_t j, int64_t width, int64_t k, const Packed* block) {
    auto [left, right] = Share(width, Kernel::kColumns, columns_, thread % columns_);
    const int64_t depth = std::min(depth_, p_.k - k);
    for (int64_t x = left; x < right; x += Kernel::kColumns) {
      TileColumn(thread, rows, j + x, std::min(Kernel::kColumns, right - x), k,
                 block + x / Kernel::kColumns * Kernel::PanelOfB(depth));
    }
  }

  void TileColumn(int thread, Range rows, int64_t j, int64_t columns, int64_t k,
                  const Packed* panel) {
    const int64_t height = rows.end - rows.begin, depth = std::min(depth_, p_.k - k);
    const int64_t tiles = (height + Kernel::kRows - 1) / Kernel::kRows;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t top = Kernel::Top(height, tiles, t);
      const TileTarget<T> target = Target(
          rows.begin + top, Kernel::Top(height, tiles, t + 1) - top, j, columns, k);
      for (int64_t r = 0; r < target.rows; ++r) {
        PrefetchRow(target.c + r * p_.c_pitch, target.columns);
      }
      kernel_.Run(a_ + thread * a_size_ + t * panel_, panel, depth, target);
    }
  }

  /*! \brief A tile of C and what the depth block from k on is added to. */
  TileTarget<T> Target(int64_t i, int64_t rows, int64_t j, int64_t columns, int64_t k) const {
    TileTarget<T> target{rows, columns, p_.c + i * p_.c_pitch + j, p_.c_pitch, nullptr, 0};
    // Each depth block is summed by itself and then added: over a deep product (the gradient
    // through a vocabulary of 32,000) one running sum would lose a decimal digit.
    if (k > 0) {
      target.addend = target.c;
      target.addend_pitch = p_.c_pitch;
    } else if (p_.addend) {
      target.addend = p_.addend + i * p_.addend_pitch + j;
      target.addend_pitch = p_.addend_pitch;
    }
    return target;
  }

  Product<T, Left, Right> p_;
  Kernel kernel_;
  int rows_, columns_;
  Barrier barrier_;
  Order order_;
  int64_t row_blocks_, block_columns_, depth_, panel_, a_size_;
  int64_t b_block_;  // packed numbers of a shared block of B of one depth
  Packed* b_;
  Packed* a_;
};

/*! \brief A product by one kernel, on threads that are arranged so unless they share nothing. */
template <typename Kernel, typename Left, typename Right>
void RunTeam(const Product<typename Kernel::Element, Left, Right>& product, int rows,
             int columns) {
  if (IsPrivate<Kernel>(product.m)) {  // B is packed once if each thread has columns of its own
    const int64_t threads = rows * columns;
    const int64_t most = (product.n + Kernel::kColumns - 1) / Kernel::kColumns;
    columns = static_cast<int>(std::min(threads, most));
    rows = static_cast<int>(threads / columns);
  }
  WorkspaceScope workspace;
  GemmTeam<Kernel, Left, Right> team(product, rows, columns, &workspace);
  ParallelRegion(rows * columns, [&](int thread, int) { team.Run(thread); });
}

/*! \brief True if nothing has to be summed: an empty C, or a C that is the addend alone. */
template <typename T>
bool FillIfNoDepth(const Product<T>& p) {
  if (p.m == 0 || p.n == 0) return true;
  if (p.k > 0) return false;
  for (int64_t i = 0; i < p.m; ++i) {
    T* row = p.c + i * p.c_pitch;
    for (int64_t j = 0; j < p.n; ++j) row[j] = p.addend ? p.addend[i * p.addend_pitch + j] : T(0);
  }
  return true;
}

/*! \brief Whole product on the calling thread alone, in memory that it is given. */
template <typename T>
void MultiplySerial(const Product<T>& product, char* memory, int64_t bytes);

/*! \brief Whole product on the thread pool. */
template <typename T>
void Multiply(const Product<T>& product);

/*! \brief The same by matrix tiles, where an operand is windows; neither axis is empty. */
template <typename Left, typename Right>
void MultiplyByTiles(const Product<float, Left, Right>& product);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_H_
