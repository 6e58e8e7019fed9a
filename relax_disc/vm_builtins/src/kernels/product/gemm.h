// Matrix products on the one thread pool: C = A * B + addend with any strides of A and B.
//
// Blocked as in Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008):
// a shared packed block of B (kDepth x kBlockColumns), packed rows of A per thread, register tiles.
// Every element of C is a sum of depth blocks in ascending k, so results depend on neither the
// split over threads nor the other rows and columns.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels/product/gemm_pack.h"
#include "kernels/parallel.h"
#include "kernels/workspace.h"

namespace relax_disc {

template <typename T>
struct Product {
  int64_t m, n, k;
  Matrix<T> a;  // [m, k]
  Matrix<T> b;  // [k, n]
  const T* addend;  // [m, n] with pitch `addend_pitch` (0: one row for all), or null for zero
  int64_t addend_pitch;
  T* c;  // [m, n], rows contiguous
  int64_t c_pitch;
};

/*! \brief Tile rows packed at once per thread: 20 tiles of AVX-512, 450 KiB, half of L2. */
constexpr int64_t kBlockTiles = 20;
/*! \brief Bytes of a row of a shared block of B: 1.5 MiB in all, which L3 holds. */
constexpr int64_t kBlockRowBytes = 4096;
/*! \brief Room of two such blocks, which may hold fewer columns over the whole depth instead... */
constexpr int64_t kWholeBytes = 2 * kDepth * kBlockRowBytes;
/*! \brief ...if they are at least so wide: each packing of A serves so many columns. */
constexpr int64_t kWholeRowBytes = 2048;

/*! \brief Part `index` of [0, count) cut into `parts` nearly equal parts of whole `unit`s. */
inline std::pair<int64_t, int64_t> Share(int64_t count, int64_t unit, int64_t parts,
                                         int64_t index) {
  int64_t units = (count + unit - 1) / unit;
  return {std::min(count, units * index / parts * unit),
          std::min(count, units * (index + 1) / parts * unit)};
}

/*! \brief Columns in whole register tiles. */
template <typename T>
inline int64_t RoundUpColumns(int64_t n) {
  return (n + kTileColumns<T> - 1) / kTileColumns<T> * kTileColumns<T>;
}

/*! \brief Most bytes that a product takes beside its operands on at most so many threads. */
template <typename T>
int64_t GemmBytes(int64_t m, int64_t n, int64_t k, int64_t threads) {
  if (m == 0 || n == 0 || k == 0) return 0;
  const int64_t element = sizeof(T);
  int64_t shared = std::min(kWholeBytes, RoundUpColumns<T>(n) * k * element);
  int64_t tiles = std::min<int64_t>(kBlockTiles, (m + kTileRows - 1) / kTileRows);
  int64_t panels = (tiles * kTileRows * kPitch<T> + 15) / 16 * 16 * element;
  return PieceBytes(shared + threads * panels);
}

/*! \brief One product computed by a team of threads arranged as rows x columns of C. */
template <typename T>
class GemmTeam {
 public:
  GemmTeam(const Product<T>& product, int rows, int columns, WorkspaceScope* workspace)
      : p_(product), rows_(rows), columns_(columns), barrier_(rows * columns) {
    by_rows_ = product.a.column == 1 || product.a.row != 1;
    int64_t share = (product.m + rows - 1) / rows;
    row_blocks_ = (share + kBlockTiles * kTileRows - 1) / (kBlockTiles * kTileRows);
    int64_t tiles = ((share + row_blocks_ - 1) / row_blocks_ + kTileRows - 1) / kTileRows;
    int64_t depth_steps = (product.k + kDepth - 1) / kDepth;
    depth_ = (product.k + depth_steps - 1) / depth_steps;
    panel_ = by_rows_ ? kTileRows * kPitch<T> : kTileRows * depth_ + kTileCopy<T>;
    a_size_ = (tiles * panel_ + 15) / 16 * 16;
    const int64_t element = sizeof(T);
    int64_t whole = kWholeBytes / element / product.k / kTileColumns<T> * kTileColumns<T>;
    is_whole_ = whole * element >= kWholeRowBytes || whole >= product.n;
    block_columns_ =
        std::min(RoundUpColumns<T>(product.n), is_whole_ ? whole : kBlockRowBytes / element);
    int64_t b_size = block_columns_ * (is_whole_ ? product.k : depth_);
    T* memory = workspace->Take<T>((is_whole_ ? 1 : 2) * b_size + rows * columns * a_size_);
    b_[0] = memory;
    b_[1] = memory + b_size;
    a_ = memory + (is_whole_ ? 1 : 2) * b_size;
  }

  /*! \brief The share of one thread; all threads of the team must call it. */
  void Run(int thread) {
    if (is_whole_) {
      RunWhole(thread);
    } else {
      RunDeep(thread);
    }
  }

 private:
  /*! \brief Whole columns of B at a time: a block of C stays in cache over the depth. */
  void RunWhole(int thread) {
    for (int64_t j = 0; j < p_.n; j += block_columns_) {
      int64_t width = std::min(block_columns_, p_.n - j);
      if (j > 0) barrier_.Wait();  // until nobody reads the block before
      for (int64_t k = 0; k < p_.k; k += depth_) {
        PackBlock(thread, j, width, k, b_[0] + k * block_columns_);
      }
      barrier_.Wait();
      for (int64_t block = 0; block < row_blocks_; ++block) {
        for (int64_t k = 0; k < p_.k; k += depth_) {
          Rows(thread, block, j, width, k, b_[0] + k * block_columns_);
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
        PackBlock(thread, j, width, k, b_[which]);
        barrier_.Wait();
        for (int64_t block = 0; block < row_blocks_; ++block) {
          Rows(thread, block, j, width, k, b_[which]);
        }
      }
    }
  }

  /*! \brief Pack this thread's panels of a block of B. */
  void PackBlock(int thread, int64_t j, int64_t width, int64_t k, T* block) {
    int64_t depth = std::min(depth_, p_.k - k);
    auto [left, right] = Share(width, kTileColumns<T>, rows_ * columns_, thread);
    for (int64_t x = left; x < right; x += kTileColumns<T>) {
      PackB(p_.b.At(k, j + x), depth, std::min<int64_t>(kTileColumns<T>, width - x),
            block + x * depth);
    }
  }

  /*! \brief This thread's columns of a block of its rows of C, for one depth block. */
  void Rows(int thread, int64_t row_block, int64_t j, int64_t width, int64_t k, const T* block) {
    auto [left, right] = Share(width, kTileColumns<T>, columns_, thread % columns_);
    auto [first, last] = Share(p_.m, 1, rows_, thread / columns_);
    auto [begin, end] = Share(last - first, 1, row_blocks_, row_block);
    int64_t i = first + begin, height = end - begin, depth = std::min(depth_, p_.k - k);
    int64_t tiles = (height + kTileRows - 1) / kTileRows;
    T* panels = a_ + thread * a_size_;
    PackA(p_.a.At(i, k), height, depth, tiles, by_rows_, panels, panel_);
    for (int64_t x = left; x < right; x += kTileColumns<T>) {
      int64_t columns = std::min<int64_t>(kTileColumns<T>, right - x);
      int64_t vectors = PanelVectors<T>(columns);
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t top = TileTop(height, tiles, t), rows = TileTop(height, tiles, t + 1) - top;
        T* c = p_.c + (i + top) * p_.c_pitch + j + x;
        TileOperands<T> tile{};
        tile.depth = depth;
        tile.a = panels + t * panel_;
        tile.a_step = rows;
        tile.b = block + x * depth;
        tile.b_step = vectors * kLanes<T>;
        tile.c_pitch = p_.c_pitch;
        tile.c = c;
        // Each depth block is summed by itself and then added: over a deep product (the gradient
        // through a vocabulary of 32,000) one running sum would lose a decimal digit.
        if (k > 0) {
          tile.addend = c;
          tile.addend_pitch = p_.c_pitch;
        } else if (p_.addend) {
          tile.addend = p_.addend + (i + top) * p_.addend_pitch + j + x;
          tile.addend_pitch = p_.addend_pitch;
        }
        for (int64_t r = 0; r < rows; ++r) PrefetchRow(c + r * p_.c_pitch, columns);
        if (columns == tile.b_step) {
          RunTile(rows, vectors, by_rows_, tile);
        } else {
          EdgeTile(rows, columns, tile);
        }
      }
    }
  }

  /*! \brief A tile whose last vector is not full: computed beside C, then copied. */
  void EdgeTile(int64_t rows, int64_t columns, TileOperands<T> tile) {
    alignas(kVectorBytes) T sums[kTileRows * kTileColumns<T>];
    alignas(kVectorBytes) T addends[kTileRows * kTileColumns<T>];
    auto load = [&](const T* source, int64_t pitch, T* target) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t x = 0; x < tile.b_step; ++x) {
          target[r * tile.b_step + x] = x < columns ? source[r * pitch + x] : T(0);
        }
      }
      return target;
    };
    if (tile.addend) tile.addend = load(tile.addend, tile.addend_pitch, addends);
    T* c = std::exchange(tile.c, sums);
    tile.c_pitch = tile.addend_pitch = tile.b_step;
    RunTile(rows, PanelVectors<T>(columns), by_rows_, tile);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(c + r * p_.c_pitch, sums + r * tile.b_step, columns * sizeof(T));
    }
  }

  Product<T> p_;
  int rows_, columns_;
  Barrier barrier_;
  bool by_rows_, is_whole_;
  int64_t row_blocks_, block_columns_, depth_, panel_, a_size_;
  T* b_[2];
  T* a_;
};

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
void MultiplySerial(const Product<T>& product, char* memory, int64_t bytes) {
  if (FillIfNoDepth(product)) return;
  LentWorkspace lent(memory, bytes);
  WorkspaceScope workspace;
  GemmTeam<T>(product, 1, 1, &workspace).Run(0);
}

/*! \brief Whole product on the thread pool. */
template <typename T>
void Multiply(const Product<T>& product);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_H_
