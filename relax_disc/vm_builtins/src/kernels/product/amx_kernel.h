// The kernel of float32 products on Intel's matrix tiles (AMX), which multiply bfloat16.
//
// Each number is the sum of three of bfloat16, which hold its 24 bits; of the nine products of two
// numbers' parts the six largest are summed up in float32.  What is left out is below 2^-22 of the
// product and 2^-25 on average, where float32 rounds to 2^-24; sums are shorter chains than with
// vectors: 32 steps of depth make one.  Measured on one Xeon, over ten sizes: errors of at most
// 0.78 of those of MKL's float32.
// Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations" (2019), section IV.
//
// Numbers below 2^-110 lose bits, as these tiles know no subnormal numbers.  Infinities, NaN and
// what bfloat16 rounds to infinity have no such parts: rows and columns with one of them are
// computed without the matrix unit, from numbers that were packed as they are.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_AMX_KERNEL_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_AMX_KERNEL_H_

#include <algorithm>
#include <cstdint>

#include "kernels/product/fma_kernel.h"
#include "kernels/product/window_matrix.h"

namespace relax_disc {

/*! \brief Whether processor and system have tiles, and RELAX_DISC_AMX=0 does not forbid them. */
bool HasAmx();

/*!
 * \brief Whether the tiles multiply `[m, k]` by `[k, n]`: packing must pay, and they exist.
 *
 * Not by the rows, though a few of them take up to twice the vectors' time: what a row becomes must
 * not depend on the others, as a budget may compute them in several turns.
 */
bool MayUseAmx(int64_t n, int64_t k);

/*! \brief Memory that is needed next, to be asked for meanwhile: so many lines in each step. */
struct LinesAhead {
  const char* from = nullptr;
  int64_t lines = 0;
};

/*! \brief See `FmaKernel`. */
class AmxKernel {
 public:
  using Element = float;
  struct Packed {
    uint16_t parts[3];  // of one number; in memory the same parts of a tile lie together
  };
  static constexpr int64_t kRows = 32, kColumns = 32;  // two by two tiles of 16 by 16
  static constexpr int64_t kRowUnit = 16;              // where rows are cut
  static constexpr int64_t kDepthUnit = 32;            // of one step
  static constexpr int64_t kMostDepth = 1024;
  // Of 4 to 12 tile rows, depths of 256 to 1,024 and blocks of B of 4 to 12 MiB, measured on a
  // Xeon over products of a Llama step, the fastest with blocks of no more than 6 MiB.
  static constexpr int64_t kBlockTiles = 6;
  static constexpr int64_t kBlockRowBytes = 3072;
  static constexpr bool kMayBePrivate = true;
  static constexpr int64_t kFlag = 32;  // at the end of a panel: where numbers have no parts

  template <typename Left>
  explicit AmxKernel(const Left&) {}

  /*! \brief The configuration of tiles; what was there before comes back. */
  class Scope {
   public:
    Scope();
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    alignas(64) unsigned char before_[64];
  };

  static int64_t Top(int64_t rows, int64_t tiles, int64_t index) {
    return TileTop(rows, tiles, index, kRowUnit);
  }
  static int64_t Steps(int64_t depth) { return (depth + kDepthUnit - 1) / kDepthUnit; }
  static int64_t PanelOfA(int64_t depth) { return Steps(depth) * kRows * kDepthUnit + kFlag; }
  static int64_t MostPanelOfA(int64_t k) { return PanelOfA(std::min(k, kMostDepth)); }
  static int64_t PanelOfB(int64_t depth) { return Steps(depth) * kColumns * kDepthUnit + kFlag; }
  static void PackA(const Matrix<float>& a, int64_t rows, int64_t depth, int64_t tiles,
                    Packed* target, int64_t panel);
  static void PackA(const WindowMatrix& a, int64_t rows, int64_t depth, int64_t tiles,
                    Packed* target, int64_t panel);
  static void PackB(const Matrix<float>& b, int64_t depth, int64_t columns, Packed* target);
  static void PackB(const WindowMatrix& b, int64_t depth, int64_t columns, Packed* target);
  static void Run(const Packed* a, const Packed* b, int64_t depth,
                  const TileTarget<float>& target, const LinesAhead& ahead = {});
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PRODUCT_AMX_KERNEL_H_
