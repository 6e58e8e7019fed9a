// Dropout of attention's weights by numbers of Philox4x32-10, drawn where they are used.
//
// The numbers are those of `frontend/random_ops.py` for a tensor [batch, heads, queries, keys]: the
// counter is the element's index there, so a weight is kept or dropped whatever block it is in,
// in the backward pass as in the forward one, and in packed rows as in padded ones.
#ifndef RELAX_DISC_VM_BUILTINS_KERNELS_PHILOX_H_
#define RELAX_DISC_VM_BUILTINS_KERNELS_PHILOX_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/product/gemm_tile.h"

namespace relax_disc {

constexpr int kMantissaBits = 24;

/*! \brief Words of as many counters as a register holds; the upper halves of lanes are waste. */
typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint32_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));
constexpr int64_t kWordLanes = kVectorBytes / 8;

/*! \brief Whole products of the lower halves of lanes. */
inline Words MultiplyLow(Words a, Words b) {
#if defined(__AVX512F__)
  return (Words)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

/*! \brief Key, offset and stream of the numbers of one operator. */
struct Philox {
  static constexpr int kRounds = 10;
  static constexpr uint32_t kMultiplier[2] = {0xD2511F53u, 0xCD9E8D57u};
  static constexpr uint32_t kWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};

  uint32_t key[2], offset[2], stream;

  Philox(uint64_t seed, uint64_t step, int64_t stream)
      : key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        offset{static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32)},
        stream(static_cast<uint32_t>(stream)) {}

  /*! \brief The first words for some counters. */
  Words First(Words index) const {
    Words a = index, b = (index >> 32) ^ stream;
    Words c = Words{} + offset[0], d = Words{} + offset[1];
    for (int k = 0; k < kRounds; ++k) {
      const uint32_t first = key[0] + kWeyl[0] * k, second = key[1] + kWeyl[1] * k;
      const Words p = MultiplyLow(a, Words{} + kMultiplier[0]);
      const Words q = MultiplyLow(c, Words{} + kMultiplier[1]);
      a = (q >> 32) ^ b ^ first;
      b = q;
      c = (p >> 32) ^ d ^ second;
      d = p;
    }
    return a;
  }
};

/*! \brief What weights are multiplied by: 0 with probability p, else 1 / (1 - p). */
template <typename T>
struct Dropout {
  static constexpr int64_t kMostKeys = kDepth;  // of one row at a time

  Philox philox{0, 0, 0};
  double p = 0;
  int64_t heads = 0, queries = 0, keys = 0;  // of the tensor of weights
  int64_t batch = 0;                         // that the first of the tensors at hand is
  const int64_t* query_places = nullptr;     // positions of packed queries in their sequences
  const int64_t* key_places = nullptr;       // and of packed keys

  bool Drops() const { return p > 0; }

  /*! \brief The factors of `count` weights of row i from key `first` on. */
  void Factors(int64_t b, int64_t h, int64_t i, int64_t first, int64_t count, T* factors) const {
    const uint32_t least =
        static_cast<uint32_t>(std::ceil(std::ldexp(static_cast<float>(p), kMantissaBits)));
    const T kept = static_cast<T>(1.0 / (1.0 - p));
    const int64_t query = query_places ? query_places[i] : i;
    const int64_t row = (((batch + b) * heads + h) * queries + query) * keys;
    uint32_t words[kMostKeys];
    for (int64_t j = 0; j < count; j += kWordLanes) {
      const Words drawn = philox.First(Index(first + j, std::min(kWordLanes, count - j)) + row);
      const HalfWords low = __builtin_convertvector(drawn, HalfWords);
      std::memcpy(words + j, &low, sizeof(low));
    }
    for (int64_t j = 0; j < count; ++j) {
      factors[j] = words[j] >> (32 - kMantissaBits) >= least ? kept : T(0);
    }
  }

  /*! \brief Places of some keys, from `first` on, in a row of weights. */
  Words Index(int64_t first, int64_t count) const {
    Words index{};
    if (key_places == nullptr) {
      for (int l = 0; l < kWordLanes; ++l) index[l] = l;
      return index + first;
    }
    if (count < kWordLanes) {
      for (int l = 0; l < count; ++l) index[l] = key_places[first + l];
      return index;
    }
    std::memcpy(&index, key_places + first, sizeof(index));
    return index;
  }

  /*! \brief The same for one sequence of a packed batch: from which query and key on it is. */
  Dropout Sequence(int64_t sequence, int64_t query, int64_t key) const {
    Dropout part = *this;
    part.batch = sequence;
    if (query_places != nullptr) part.query_places += query;
    if (key_places != nullptr) part.key_places += key;
    return part;
  }
};

}  // namespace relax_disc

#endif  // RELAX_DISC_VM_BUILTINS_KERNELS_PHILOX_H_
