#include "kernels/product/amx_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define RELAX_DISC_HAS_TILES 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
// GCC 12 takes what its own header leaves undefined for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#else
#define RELAX_DISC_HAS_TILES 0
#endif

namespace relax_disc {

#if RELAX_DISC_HAS_TILES

// The library is made for every processor with AVX-512; these functions run where `HasAmx()`.
#define RELAX_DISC_TILES __attribute__((target("amx-tile,amx-bf16")))

namespace {

using Packed = AmxKernel::Packed;
using Bfloat16 = uint16_t;

constexpr int kParts = 3;
constexpr int64_t kSide = 16;  // rows and columns of a tile of C
constexpr int64_t kStep = AmxKernel::kDepthUnit;
constexpr int64_t kTile = kSide * kStep;  // numbers of a tile of A or B: 1 KiB
constexpr int64_t kPart = 2 * kTile;      // of one part of a step of a panel
constexpr int64_t kStepSize = kParts * kPart;

/*! \brief Whether processor and system have tiles that nobody forbids; Linux must be asked. */
bool AskForTiles() {
  const char* chosen = std::getenv("RELAX_DISC_AMX");
  if (chosen != nullptr && std::strcmp(chosen, "0") == 0) return false;
  constexpr unsigned kBfloat16Tiles = 1u << 22, kTiles = 1u << 24;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kBfloat16Tiles) == 0 || (d & kTiles) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of Linux, for the whole process
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

/*! \brief Bytes of memory that tiles are configured by. */
struct Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Configuration) == 64);

/*! \brief Rows of A, or columns of B, with numbers that have no parts: a bit each. */
using Others = uint32_t;

/*! \brief Where a panel keeps them. */
inline Others* OthersOf(Packed* panel, int64_t depth) {
  auto* parts = reinterpret_cast<Bfloat16*>(panel);
  return reinterpret_cast<Others*>(parts + AmxKernel::Steps(depth) * kStepSize);
}
inline Others OthersOf(const Packed* panel, int64_t depth) {
  return *OthersOf(const_cast<Packed*>(panel), depth);
}

/*! \brief Lanes of the first `count` of 16. */
inline __mmask16 First(int64_t count) {
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(count, 0, kSide)) - 1);
}

/*! \brief The bfloat16 in the lower, or upper, half of each lane as float32. */
inline __m512 Lower(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline __m512 Upper(__m512i x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

/*! \brief The upper halves of both: `low`'s in the lower half of each lane. */
inline __m512i Pair(__m512 low, __m512 high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(low), 16),
                                 _mm512_castps_si512(high));
}

/*! \brief The nearest bfloat16, of two as near the larger; infinities and NaN become anything. */
inline __m512 Round(__m512 x) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  return Upper(_mm512_add_epi32(_mm512_castps_si512(x), half));
}

/*!
 * \brief Cut the numbers of two vectors into parts, which sum up to them.
 *
 * Each lane holds the parts of both: `low`'s in its lower half. So two halves of a row of A lie in
 * turns, and two rows of B, as the tiles take pairs of steps of depth.
 *
 * \param target The first parts; the others lie `kPart` apart.
 * \return Lanes of which either number has no such parts: then `SplitOthers` is to follow.
 */
inline __mmask16 Split(__m512 low, __m512 high, Bfloat16* target) {
#pragma GCC unroll 2
  for (int part = 0; part < kParts - 1; ++part) {
    const __m512 first = Round(low), second = Round(high);
    _mm512_store_si512(target + part * kPart, Pair(first, second));
    low = _mm512_sub_ps(low, first);
    high = _mm512_sub_ps(high, second);
  }
  _mm512_store_si512(target + (kParts - 1) * kPart, Pair(low, high));
  // At most 8 bits are left.  Of infinities, NaN and what was rounded to infinity NaN is left.
  return _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q);
}

/*!
 * \brief `Split` where some numbers have no parts.
 *
 * The first part of infinities and NaN is the same, and a finite number is cut off there, which
 * would be rounded to infinity.
 */
void SplitOthers(__m512 low, __m512 high, Bfloat16* target) {
  const auto cut = [](__m512* x) {
    constexpr int kNan = 0x81, kInfinity = 0x18;  // of VFPCLASSPS
    const __mmask16 is_nan = _mm512_fpclass_ps_mask(*x, kNan);
    const __mmask16 is_infinite = _mm512_fpclass_ps_mask(*x, kInfinity);
    const __m512 rounded = Round(*x), below = Upper(_mm512_castps_si512(*x));
    __m512 first =
        _mm512_mask_mov_ps(rounded, _mm512_fpclass_ps_mask(rounded, kInfinity), below);
    first = _mm512_mask_mov_ps(first, is_nan, _mm512_set1_ps(std::nanf("")));
    *x = _mm512_maskz_sub_ps(~(is_nan | is_infinite), *x, first);
    return first;
  };
  for (int part = 0; part < kParts; ++part) {
    const __m512 first = cut(&low), second = cut(&high);
    _mm512_store_si512(target + part * kPart, Pair(first, second));
  }
}

inline void FillZero(Bfloat16* row) {
  for (int part = 0; part < kParts; ++part) std::memset(row + part * kPart, 0, 2 * kStep);
}

/*! \brief Rows of [rows, columns], at most 32 by 32, that are contiguous: its own, or a copy's. */
Matrix<float> ByRows(const Matrix<float>& from, int64_t rows, int64_t columns, float* copy) {
  if (from.column == 1) return from;
  if (from.row == 1) {
    CopyTransposed(from.data, from.column, rows, columns, copy, kStep);
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) copy[i * kStep + j] = *from.At(i, j).data;
    }
  }
  return {copy, kStep, 1};
}

/*! \brief Elements of a row that are asked for ahead. */
constexpr int64_t kAhead = 4 * kStep;

/*!
 * \brief Cut one step of depth of a tile row of A into parts.
 * \param load Half 0 or 1 of the step of a row.
 */
template <typename Load>
inline Others PackRows(int64_t rows, Bfloat16* target, const Load& load) {
  Others others = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 first = load(r, 0), second = load(r, 1);
    if (__builtin_expect(Split(first, second, target + r * kStep) != 0, 0)) {
      SplitOthers(first, second, target + r * kStep);
      others |= Others{1} << r;
    }
  }
  for (int64_t r = rows; r % kSide != 0; ++r) FillZero(target + r * kStep);
  return others;
}

/*!
 * \brief Cut one step of depth of a tile column of B into parts.
 * \param load The 16 columns from j on of row k of the step.
 */
template <typename Load>
inline Others PackColumns(int64_t columns, Bfloat16* target, const Load& load) {
  Others others = 0;
  for (int64_t j = 0; j < columns; j += kSide) {
    for (int64_t k = 0; k < kSide; ++k) {
      const __m512 first = load(k, j), second = load(k + kSide, j);
      const __mmask16 found = Split(first, second, target + (j + k) * kStep);
      if (__builtin_expect(found != 0, 0)) {
        SplitOthers(first, second, target + (j + k) * kStep);
        others |= static_cast<Others>(found) << j;
      }
    }
  }
  return others;
}

Others PackStepOfA(const Matrix<float>& a, int64_t rows, int64_t depth, Bfloat16* target) {
  alignas(64) float copy[AmxKernel::kRows * kStep];
  const Matrix<float> source = ByRows(a, rows, depth, copy);
  const __mmask16 lanes[2] = {First(depth), First(depth - kSide)};
  const bool asks = a.column == 1;
  return PackRows(rows, target, [&](int64_t r, int half) {
    const float* row = source.data + r * source.row + half * kSide;
    if (asks) __builtin_prefetch(row + kAhead);
    return _mm512_maskz_loadu_ps(lanes[half], row);
  });
}

Others PackStepOfB(const Matrix<float>& b, int64_t depth, int64_t columns, Bfloat16* target) {
  alignas(64) float copy[kStep * AmxKernel::kColumns];
  const Matrix<float> source = ByRows(b, depth, columns, copy);
  if (b.column == 1) {  // the next tile column: the hardware does not guess rows far apart
    for (int64_t k = 0; k < depth; ++k) {
      PrefetchRow(b.data + k * b.row + AmxKernel::kColumns, AmxKernel::kColumns);
    }
  }
  return PackColumns(columns, target, [&](int64_t k, int64_t j) {
    return _mm512_maskz_loadu_ps(k < depth ? First(columns - j) : 0,
                                 source.data + k * source.row + j);
  });
}

/*! \brief 32 numbers, all of them zero, where windows lie outside. */
alignas(64) constexpr float kNothing[kStep] = {};

/*! \brief Add to the sums of C [32, 32] as the tiles do, where numbers have no parts. */
void SumVectors(const Bfloat16* a, const Bfloat16* b, int64_t depth, float* sums) {
  constexpr int64_t kHalves = AmxKernel::kColumns / kSide;
  for (int64_t k = 0; k < depth; ++k) {
    const int64_t step = k / kStep * kStepSize, at = k % kSide;
    const bool is_upper = k % kStep >= kSide;
    const auto join = [&](const auto& pair) {
      const auto part = [&](int i) { return is_upper ? Upper(pair(i)) : Lower(pair(i)); };
      // The small ones first: the largest number's first two parts sum up to infinity.
      return _mm512_add_ps(_mm512_add_ps(part(2), part(1)), part(0));
    };
    __m512 row[kHalves];
    for (int64_t half = 0; half < kHalves; ++half) {
      const Bfloat16* pairs = b + step + half * kTile + at * kStep;
      row[half] = join([&](int part) { return _mm512_load_si512(pairs + part * kPart); });
    }
    for (int64_t r = 0; r < AmxKernel::kRows; ++r) {
      const Bfloat16* pair = a + step + r * kStep + 2 * at;
      const __m512 number = join([&](int part) {
        int32_t bits;
        std::memcpy(&bits, pair + part * kPart, sizeof(bits));
        return _mm512_set1_epi32(bits);
      });
      for (int64_t half = 0; half < kHalves; ++half) {
        float* sum = sums + r * AmxKernel::kColumns + half * kSide;
        _mm512_store_ps(sum, _mm512_fmadd_ps(number, row[half], _mm512_load_ps(sum)));
      }
    }
  }
}

// Tiles 0 to 3 sum up C, 4 and 5 hold A, 6 and 7 hold B.
#define RELAX_DISC_LOAD(tile, from, part) \
  _tile_loadd(tile, (from) + (part) * kPart + (tile) % 2 * kTile, 64)

/*! \brief Sums of two by two tiles; a load is asked for while the tiles that do not wait run. */
RELAX_DISC_TILES void SumFour(const Bfloat16* a, const Bfloat16* b, int64_t steps,
                              const LinesAhead& ahead) {
  const char* next = ahead.from;
  for (int64_t step = 0; step < steps; ++step, a += kStepSize, b += kStepSize) {
    for (int64_t line = 0; line < ahead.lines; ++line, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
#define RELAX_DISC_NEXT(first, second, from, part, with_first, with_second) \
  RELAX_DISC_LOAD(first, from, part);                                       \
  _tile_dpbf16ps(0, 4, 6);                                                  \
  _tile_dpbf16ps with_first;                                                \
  RELAX_DISC_LOAD(second, from, part);                                      \
  _tile_dpbf16ps with_second;                                               \
  _tile_dpbf16ps(3, 5, 7)
#define RELAX_DISC_NEXT_A(part) RELAX_DISC_NEXT(4, 5, a, part, (1, 4, 7), (2, 5, 6))
#define RELAX_DISC_NEXT_B(part) RELAX_DISC_NEXT(6, 7, b, part, (2, 5, 6), (1, 4, 7))
    RELAX_DISC_LOAD(4, a, 0);
    RELAX_DISC_LOAD(5, a, 0);
    RELAX_DISC_NEXT_B(2);
    RELAX_DISC_NEXT_B(0);
    RELAX_DISC_NEXT_B(1);
    RELAX_DISC_NEXT_A(1);
    RELAX_DISC_NEXT_B(0);
    RELAX_DISC_NEXT_A(2);
#undef RELAX_DISC_NEXT_B
#undef RELAX_DISC_NEXT_A
#undef RELAX_DISC_NEXT
  }
}

/*! \brief Sums of fewer tiles, in the same order. */
template <bool IsHigh, bool IsWide>
RELAX_DISC_TILES void SumFewer(const Bfloat16* a, const Bfloat16* b, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step, a += kStepSize, b += kStepSize) {
#define RELAX_DISC_PRODUCTS(of_a, of_b)              \
  RELAX_DISC_LOAD(4, a, of_a);                       \
  RELAX_DISC_LOAD(6, b, of_b);                       \
  if constexpr (IsHigh) RELAX_DISC_LOAD(5, a, of_a); \
  if constexpr (IsWide) RELAX_DISC_LOAD(7, b, of_b); \
  _tile_dpbf16ps(0, 4, 6);                           \
  if constexpr (IsWide) _tile_dpbf16ps(1, 4, 7);     \
  if constexpr (IsHigh) _tile_dpbf16ps(2, 5, 6);
    RELAX_DISC_PRODUCTS(0, 2)
    RELAX_DISC_PRODUCTS(0, 0)
    RELAX_DISC_PRODUCTS(0, 1)
    RELAX_DISC_PRODUCTS(1, 1)
    RELAX_DISC_PRODUCTS(1, 0)
    RELAX_DISC_PRODUCTS(2, 0)
#undef RELAX_DISC_PRODUCTS
  }
}

RELAX_DISC_TILES inline void ZeroTiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

/*! \brief Which of two by two tiles C has beside the first. */
struct Form {
  bool is_high, is_wide;
  explicit Form(const TileTarget<float>& target)
      : is_high(target.rows > kSide), is_wide(target.columns > kSide) {}
};

/*! \brief Add up some steps of depth. */
RELAX_DISC_TILES inline void SumTiles(const Bfloat16* a, const Bfloat16* b, int64_t steps,
                                      Form form, const LinesAhead& ahead) {
  if (form.is_high && form.is_wide) {
    SumFour(a, b, steps, ahead);
  } else if (form.is_high) {
    SumFewer<true, false>(a, b, steps);
  } else if (form.is_wide) {
    SumFewer<false, true>(a, b, steps);
  } else {
    SumFewer<false, false>(a, b, steps);
  }
}

RELAX_DISC_TILES inline void StoreTiles(Form form, float* sums, int64_t pitch) {
  const int64_t bytes = pitch * static_cast<int64_t>(sizeof(float));
  float* below = sums + kSide * pitch;
  _tile_stored(0, sums, bytes);
  if (form.is_wide) _tile_stored(1, sums + kSide, bytes);
  if (form.is_high) _tile_stored(2, below, bytes);
  if (form.is_high && form.is_wide) _tile_stored(3, below + kSide, bytes);
}
#undef RELAX_DISC_LOAD

/*! \brief C = sums [32, 32] + addend. */
void AddUp(const float* sums, const TileTarget<float>& target) {
  for (int64_t r = 0; r < target.rows; ++r) {
    for (int64_t j = 0; j < target.columns; j += kSide) {
      const __mmask16 lanes = First(target.columns - j);
      __m512 value = _mm512_load_ps(sums + r * AmxKernel::kColumns + j);
      if (target.addend != nullptr) {
        const float* addend = target.addend + r * target.addend_pitch + j;
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, addend));
      }
      _mm512_mask_storeu_ps(target.c + r * target.c_pitch + j, lanes, value);
    }
  }
}

/*! \brief Take those sums [32, 32] from others that numbers without parts have a share in. */
void Replace(float* sums, const float* others, Others rows, Others columns) {
  for (int r = 0; r < AmxKernel::kRows; ++r) {
    const Others lanes = (rows >> r & 1) != 0 ? ~Others{0} : columns;
    for (int64_t j = 0; j < AmxKernel::kColumns; j += kSide) {
      const int64_t at = r * AmxKernel::kColumns + j;
      _mm512_mask_store_ps(sums + at, static_cast<__mmask16>(lanes >> j),
                           _mm512_load_ps(others + at));
    }
  }
}

constexpr int64_t kSums = AmxKernel::kRows * AmxKernel::kColumns;

// Functions, since GCC 12 drops the attribute of constructors and destructors.
RELAX_DISC_TILES void Configure(void* before) {
  // Not on the stack: GCC takes the instruction to read its first 8 bytes alone.
  alignas(64) static constexpr Configuration configuration;
  _tile_storeconfig(before);
  _tile_loadconfig(&configuration);
}

RELAX_DISC_TILES void Restore(const void* before) { _tile_loadconfig(before); }

}  // namespace

bool HasAmx() {
  static const bool has = AskForTiles();
  return has;
}

AmxKernel::Scope::Scope() { Configure(before_); }

AmxKernel::Scope::~Scope() { Restore(before_); }

void AmxKernel::PackA(const Matrix<float>& a, int64_t rows, int64_t depth, int64_t tiles,
                      Packed* target, int64_t panel) {
  const auto pack = [&](int64_t t, int64_t k) {
    const int64_t top = Top(rows, tiles, t), height = Top(rows, tiles, t + 1) - top;
    auto* parts = reinterpret_cast<Bfloat16*>(target + t * panel) + k / kStep * kStepSize;
    return PackStepOfA(a.At(top, k), height, std::min(kStep, depth - k), parts);
  };
  for (int64_t t = 0; t < tiles; ++t) *OthersOf(target + t * panel, depth) = 0;
  if (a.column == 1) {  // as it lies in memory
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t k = 0; k < depth; k += kStep) *OthersOf(target + t * panel, depth) |= pack(t, k);
    }
  } else {
    for (int64_t k = 0; k < depth; k += kStep) {
      for (int64_t t = 0; t < tiles; ++t) *OthersOf(target + t * panel, depth) |= pack(t, k);
    }
  }
}

void AmxKernel::PackA(const WindowMatrix& a, int64_t rows, int64_t depth, int64_t tiles,
                      Packed* target, int64_t panel) {
  const WindowGeometry& g = *a.geometry;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t top = Top(rows, tiles, t), height = Top(rows, tiles, t + 1) - top;
    Packed* packed = target + t * panel;
    const float* sources[kRows];
    int64_t last = -1;
    Others others = 0;
    for (int64_t k = 0; k < depth; k += kStep) {
      const int64_t tap = (a.column + k) / g.channels, channel = (a.column + k) % g.channels;
      if (tap != last) {
        WindowRows windows(g, a.row + top);
        for (int64_t r = 0; r < height; ++r) sources[r] = windows.Next(tap);
        last = tap;
      }
      Bfloat16* parts = reinterpret_cast<Bfloat16*>(packed) + k / kStep * kStepSize;
      others |= PackRows(height, parts, [&](int64_t r, int half) {
        const float* row = sources[r] == nullptr ? kNothing : sources[r] + channel;
        return _mm512_loadu_ps(row + half * kSide);
      });
    }
    *OthersOf(packed, depth) = others;
  }
}

void AmxKernel::PackB(const WindowMatrix& b, int64_t depth, int64_t, Packed* target) {
  const WindowGeometry& g = *b.geometry;
  const int64_t tap = b.column / g.channels, channel = b.column % g.channels;
  WindowRows windows(g, b.row);
  Others others = 0;
  for (int64_t k = 0; k < depth; k += kStep) {
    const float* sources[kStep];
    for (int64_t i = 0; i < kStep; ++i) {
      const float* row = k + i < depth ? windows.Next(tap) : nullptr;
      sources[i] = row == nullptr ? kNothing : row + channel;
    }
    Bfloat16* parts = reinterpret_cast<Bfloat16*>(target) + k / kStep * kStepSize;
    others |= PackColumns(kColumns, parts, [&](int64_t row, int64_t j) {
      return _mm512_loadu_ps(sources[row] + j);
    });
  }
  *OthersOf(target, depth) = others;
}

void AmxKernel::PackB(const Matrix<float>& b, int64_t depth, int64_t columns, Packed* target) {
  Others others = 0;
  for (int64_t k = 0; k < depth; k += kStep) {
    others |= PackStepOfB(b.At(k, 0), std::min(kStep, depth - k), columns,
                          reinterpret_cast<Bfloat16*>(target) + k / kStep * kStepSize);
  }
  *OthersOf(target, depth) = others;
}

RELAX_DISC_TILES void AmxKernel::Run(const Packed* a, const Packed* b, int64_t depth,
                                     const TileTarget<float>& target, const LinesAhead& ahead) {
  alignas(64) float sums[kSums];
  const auto* of_a = reinterpret_cast<const Bfloat16*>(a);
  const auto* of_b = reinterpret_cast<const Bfloat16*>(b);
  const Others rows = OthersOf(a, depth), columns = OthersOf(b, depth);
  const Form form(target);
  const bool is_c = target.rows == kRows && target.columns == kColumns && !target.addend &&
                    (rows | columns) == 0;
  ZeroTiles();
  SumTiles(of_a, of_b, Steps(depth), form, ahead);
  StoreTiles(form, is_c ? target.c : sums, is_c ? target.c_pitch : kColumns);
  if (is_c) return;
  if (__builtin_expect((rows | columns) != 0, 0)) {
    alignas(64) float others[kSums] = {};
    SumVectors(of_a, of_b, depth, others);
    Replace(sums, others, rows, columns);
  }
  AddUp(sums, target);
}

bool MayUseAmx(int64_t n, int64_t k) {
  // Measured with up to 1,024 rows: 64 by 64 takes 0.65 of the vectors' time, 32 by 32 1.04 of it.
  return std::min(n, k) >= 64 && HasAmx();
}

#else  // no matrix tiles for this target

bool HasAmx() { return false; }
bool MayUseAmx(int64_t, int64_t) { return false; }
AmxKernel::Scope::Scope() {}
AmxKernel::Scope::~Scope() {}
void AmxKernel::PackA(const Matrix<float>&, int64_t, int64_t, int64_t, Packed*, int64_t) {}
void AmxKernel::PackA(const WindowMatrix&, int64_t, int64_t, int64_t, Packed*, int64_t) {}
void AmxKernel::PackB(const Matrix<float>&, int64_t, int64_t, Packed*) {}
void AmxKernel::PackB(const WindowMatrix&, int64_t, int64_t, Packed*) {}
void AmxKernel::Run(const Packed*, const Packed*, int64_t, const TileTarget<float>&,
                    const LinesAhead&) {}

#endif

}  // namespace relax_disc
