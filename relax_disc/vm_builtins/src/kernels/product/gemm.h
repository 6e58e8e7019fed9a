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

/*! \brief Most bytes that a product by one kernel takes beside its operands. */
template <typename Kernel>
int64_t TeamBytes(int64_t m, int64_t n, int64_t k, int64_t threads) {
  const int64_t element = sizeof(typename Kernel::Packed);
  const int64_t depth = WholeUnits(k, Kernel::kDepthUnit);
  const int64_t shared =
      std::min(kWholeBytes<Kernel>, WholeUnits(n, Kernel::kColumns) * depth * element);
  const int64_t tiles = std::min(Kernel::kBlockTiles, (m + Kernel::kRows - 1) / Kernel::kRows);
  // A panel holds kDepthUnit steps or more beside its flag.
  const int64_t flags = shared * Kernel::kFlag / (Kernel::kColumns * Kernel::kDepthUnit);
  const int64_t panel = Kernel::MostPanelOfA(k);
  const int64_t panels = threads * WholeUnits(tiles * panel, 64) * element;
  return PieceBytes(shared + flags + panels);
}

/*! \brief Most bytes that a product takes beside its operands on at most so many threads. */
template <typename T>
int64_t GemmBytes(int64_t m, int64_t n, int64_t k, int64_t threads) {
  if (m == 0 || n == 0 || k == 0) return 0;
  int64_t bytes = TeamBytes<FmaKernel<T>>(m, n, k, threads);
  if (std::is_same_v<T, float> && MayUseAmx(m, n, k)) {
    bytes = std::max(bytes, TeamBytes<AmxKernel>(m, n, k, threads));
  }
  return bytes;
}

/*! \brief One product computed by a team of threads arranged as rows x columns of C. */
template <typename Kernel>
class GemmTeam {
 public:
  using T = typename Kernel::Element;
  using Packed = typename Kernel::Packed;

  GemmTeam(const Product<T>& product, int rows, int columns, WorkspaceScope* workspace)
      : p_(product),
        kernel_(product.a),
        rows_(rows),
        columns_(columns),
        barrier_(rows * columns) {
    int64_t share = (product.m + rows - 1) / rows;
    row_blocks_ = (share + Kernel::kBlockTiles * Kernel::kRows - 1) /
                  (Kernel::kBlockTiles * Kernel::kRows);
    int64_t tiles =
        ((share + row_blocks_ - 1) / row_blocks_ + Kernel::kRows - 1) / Kernel::kRows;
    int64_t depth_steps = (product.k + Kernel::kMostDepth - 1) / Kernel::kMostDepth;
    depth_ = WholeUnits((product.k + depth_steps - 1) / depth_steps, Kernel::kDepthUnit);
    panel_ = kernel_.PanelOfA(depth_);
    a_size_ = WholeUnits(tiles * panel_, 64);
    const int64_t element = sizeof(Packed);
    int64_t whole = kWholeBytes<Kernel> / element / WholeUnits(product.k, Kernel::kDepthUnit) /
                    Kernel::kColumns * Kernel::kColumns;
    is_whole_ = whole * element >= kWholeRowBytes || whole >= product.n;
    const int64_t deep = Kernel::kBlockRowBytes / element / Kernel::kColumns * Kernel::kColumns;
    const int64_t most = is_whole_ ? whole : deep, blocks = (product.n + most - 1) / most;
    block_columns_ = WholeUnits((product.n + blocks - 1) / blocks, Kernel::kColumns);
    b_block_ = block_columns_ / Kernel::kColumns * Kernel::PanelOfB(depth_);
    const int64_t last = (product.k - 1) / depth_ * depth_;  // where the last depth block begins
    const int64_t last_block =
        block_columns_ / Kernel::kColumns * Kernel::PanelOfB(product.k - last);
    int64_t b_size = is_whole_ ? last / depth_ * b_block_ + last_block : b_block_;
    Packed* memory =
        workspace->Take<Packed>((is_whole_ ? 1 : 2) * b_size + rows * columns * a_size_);
    b_[0] = memory;
    b_[1] = memory + b_size;
    a_ = memory + (is_whole_ ? 1 : 2) * b_size;
  }

  /*! \brief The share of one thread; all threads of the team must call it. */
  void Run(int thread) {
    typename Kernel::Scope scope;
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
        PackBlock(thread, j, width, k, b_[0] + k / depth_ * b_block_);
      }
      barrier_.Wait();
      for (int64_t block = 0; block < row_blocks_; ++block) {
        for (int64_t k = 0; k < p_.k; k += depth_) {
          Rows(thread, block, j, width, k, b_[0] + k / depth_ * b_block_);
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
  void PackBlock(int thread, int64_t j, int64_t width, int64_t k, Packed* block) {
    int64_t depth = std::min(depth_, p_.k - k);
    auto [left, right] = Share(width, Kernel::kColumns, rows_ * columns_, thread);
    for (int64_t x = left; x < right; x += Kernel::kColumns) {
      kernel_.PackB(p_.b.At(k, j + x), depth, std::min(Kernel::kColumns, width - x),
                    block + x / Kernel::kColumns * Kernel::PanelOfB(depth));
    }
  }

  /*! \brief This thread's columns of a block of its rows of C, for one depth block. */
  void Rows(int thread, int64_t row_block, int64_t j, int64_t width, int64_t k,
            const Packed* block) {
    auto [left, right] = Share(width, Kernel::kColumns, columns_, thread % columns_);
    auto [first, last] = Share(p_.m, 1, rows_, thread / columns_);
    auto [begin, end] = Share(last - first, 1, row_blocks_, row_block);
    int64_t i = first + begin, height = end - begin, depth = std::min(depth_, p_.k - k);
    int64_t tiles = (height + Kernel::kRows - 1) / Kernel::kRows;
    Packed* panels = a_ + thread * a_size_;
    kernel_.PackA(p_.a.At(i, k), height, depth, tiles, panels, panel_);
    for (int64_t x = left; x < right; x += Kernel::kColumns) {
      TileTarget<T> target{};
      target.columns = std::min(Kernel::kColumns, right - x);
      target.c_pitch = p_.c_pitch;
      const Packed* column = block + x / Kernel::kColumns * Kernel::PanelOfB(depth);
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t top = TileTop(height, tiles, t);
        target.rows = TileTop(height, tiles, t + 1) - top;
        target.c = p_.c + (i + top) * p_.c_pitch + j + x;
        // Each depth block is summed by itself and then added: over a deep product (the gradient
        // through a vocabulary of 32,000) one running sum would lose a decimal digit.
        if (k > 0) {
          target.addend = target.c;
          target.addend_pitch = p_.c_pitch;
        } else if (p_.addend) {
          target.addend = p_.addend + (i + top) * p_.addend_pitch + j + x;
          target.addend_pitch = p_.addend_pitch;
        }
        for (int64_t r = 0; r < target.rows; ++r) {
          PrefetchRow(target.c + r * p_.c_pitch, target.columns);
        }
        kernel_.Run(panels + t * panel_, column, depth, target);
      }
    }
  }

  Product<T> p_;
  Kernel kernel_;
  int rows_, columns_;
  Barrier barrier_;
  bool is_whole_;
  int64_t row_blocks_, block_columns_, depth_, panel_, a_size_;
  int64_t b_block_;  // packed numbers of a block of B of one depth
  Packed* b_[2];
  Packed* a_;
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
void MultiplySerial(const Product<T>& product, char* memory, int64_t bytes);

/*! \brief Whole product on the thread pool. */
template <typename T>
void Multiply(const Product<T>& product);

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_GEMM_H_
