// What the CUDA C that TVM emits needs to compile with a C++ compiler, every access to memory watched.
//
// Pointers of a kernel are `emu::Pointer`, whose elements are `emu::Element`: reading one, or writing to it, tells
// device.cc the address, the size and the line.  What a thread keeps to itself (local arrays) is not watched.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

struct dim3 { unsigned x, y, z; };

namespace emu {
/*! \brief Memory that threads share: an argument of the kernel, or an array of the block. */
struct Region {
  const char* name;
  char* base;
  int64_t bytes;
  bool shared;
};
enum Kind { kRead, kWrite, kAtomic };
}  // namespace emu

extern "C" {
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
void emu_access(const emu::Region* region, const void* address, int bytes, emu::Kind kind, int line);
const emu::Region* emu_argument(const void* base);
const emu::Region* emu_shared_array(const char* name, int64_t bytes);  // negative: as the launch says
void emu_barrier(int line);
unsigned emu_active_lanes(void);
int emu_lane(void);
/*! Give a value to the lanes of `mask` and take that of the lane `source`. */
uint64_t emu_exchange(unsigned mask, uint64_t value, int source, int line);
/*! The lanes of `mask` whose predicate holds, a bit each. */
unsigned emu_ballot(unsigned mask, bool predicate, int line);
}

namespace emu {

template <typename T>
struct Element;

/*! \brief An index, and the line on which it is used. */
struct Index {
  int64_t value;
  int line;
  template <typename I>
  Index(I value, int line = __builtin_LINE()) : value(value), line(line) {}
};

template <typename T>
struct Pointer {
  T* at;
  const Region* region;  // null: a thread's own
  int line;

  Pointer(T* at, const Region* region, int line) : at(at), region(region), line(line) {}
  template <typename U>
  Pointer(U* own, int line = __builtin_LINE()) : at((T*)own), region(nullptr), line(line) {}
  template <typename U>
  Pointer(const Pointer<U>& other, int line = __builtin_LINE())
      : at((T*)other.at), region(other.region), line(line) {}

  Element<T> operator[](Index i) const { return {at + i.value, region, i.line}; }
  Element<T> operator*() const { return {at, region, line}; }
  T* operator->() const { return at; }  // TVM writes it for vectors in registers alone
  Pointer operator+(int64_t n) const { return {at + n, region, line}; }
  Pointer operator-(int64_t n) const { return {at - n, region, line}; }
};

template <typename T>
struct Element {
  T* at;
  const Region* region;
  int line;

  operator T() const {
    if (region != nullptr) emu_access(region, at, sizeof(T), kRead, line);
    return *at;
  }
  // `(float)x[i]` of a 16-bit number.
  template <typename N, std::enable_if_t<std::is_class_v<T> && std::is_arithmetic_v<N>, int> = 0>
  explicit operator N() const {
    return N(float(operator T()));
  }
  T operator=(T value) const {
    if (region != nullptr) emu_access(region, at, sizeof(T), kWrite, line);
    return *at = value;
  }
  T operator=(const Element& other) const { return *this = T(other); }
  Pointer<T> operator&() const { return {at, region, line}; }
};

template <typename T>
struct Argument {
  static T from(void* p) { return *(T*)p; }
};
template <typename T>
struct Argument<Pointer<T>> {
  static Pointer<T> from(void* p) { return {*(T**)p, emu_argument(*(void**)p), 0}; }
};

/*! \brief Call a kernel on the driver's array of pointers to arguments. */
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** p, std::index_sequence<I...>) {
  kernel(Argument<A>::from(p[I])...);
}
template <typename... A>
void call(void (*kernel)(A...), void** p) {
  call(kernel, p, std::index_sequence_for<A...>{});
}

// ---- numbers of 16 bits: computed in float32, rounded to even --------------------------------------

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float result;
  std::memcpy(&result, &wide, 4);
  return result;
}
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float from_half(uint16_t bits) {
  _Float16 result;
  std::memcpy(&result, &bits, 2);
  return result;
}
inline uint16_t to_half(float value) {
  const _Float16 narrow = value;
  uint16_t bits;
  std::memcpy(&bits, &narrow, 2);
  return bits;
}

template <float (*widen)(uint16_t), uint16_t (*narrow)(float)>
struct Short {
  uint16_t bits;
  Short() = default;
  template <typename N>
  Short(N value) : bits(narrow(float(value))) {}
  operator float() const { return widen(bits); }
  friend Short operator+(Short a, Short b) { return float(a) + float(b); }
  friend Short operator-(Short a, Short b) { return float(a) - float(b); }
  friend Short operator*(Short a, Short b) { return float(a) * float(b); }
  friend Short operator/(Short a, Short b) { return float(a) / float(b); }
  friend Short operator-(Short a) { return -float(a); }
};

}  // namespace emu

using half = emu::Short<emu::from_half, emu::to_half>;
using __half = half;
using nv_bfloat16 = emu::Short<emu::from_bfloat16, emu::to_bfloat16>;
using __nv_bfloat16 = nv_bfloat16;
inline half __float2half_rn(float x) { return x; }
inline nv_bfloat16 __float2bfloat16_rn(float x) { return x; }

#define EMU_VECTORS(T, NAME)                                                                \
  struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                                        \
  struct NAME##3 { T x, y, z; };                                                            \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) NAME##4 { T x, y, z, w; };         \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                        \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(signed char, char)
EMU_VECTORS(unsigned char, uchar)
struct half2 { half x, y; };
struct alignas(8) half4 { half x, y, z, w; };
struct nv_bfloat162 { nv_bfloat16 x, y; };
struct alignas(8) nv_bfloat164 { nv_bfloat16 x, y, z, w; };
using __nv_bfloat162 = nv_bfloat162;

#define __global__
#define __device__
#define __host__
#define __restrict__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __syncthreads() emu_barrier(__LINE__)
#define __activemask() emu_active_lanes()
#define __ballot_sync(mask, predicate) emu_ballot(mask, predicate, __LINE__)
#define __ffs(bits) __builtin_ffs(bits)
#define __pack_half2_is_host 1
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF double(INFINITY)
#define CUDART_NAN double(NAN)
#define EMU_SHARED(T, NAME, COUNT) \
  emu::Pointer<T> NAME = emu::shared_array<T>(#NAME, int64_t(sizeof(T)) * (COUNT), __LINE__)

namespace emu {
template <typename T>
Pointer<T> shared_array(const char* name, int64_t bytes, int line) {
  const Region* region = emu_shared_array(name, bytes);
  return {(T*)region->base, region, line};
}
}  // namespace emu

// ---- functions of CUDA's mathematics that the C++ library has under other names --------------------

inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
#define EMU_LESSER_AND_GREATER(T)                    \
  inline T max(T a, T b) { return a > b ? a : b; }   \
  inline T min(T a, T b) { return a < b ? a : b; }
EMU_LESSER_AND_GREATER(int)
EMU_LESSER_AND_GREATER(unsigned)
EMU_LESSER_AND_GREATER(int64_t)
EMU_LESSER_AND_GREATER(uint64_t)
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t(a) * b) >> 32; }
template <typename T>
T __ldg(const emu::Pointer<T>& p) { return *p; }

// ---- shuffles and atomics --------------------------------------------------------------------------

namespace emu {
template <typename T>
T shuffle(unsigned mask, T value, int source, int line) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = emu_exchange(mask, bits, source, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace emu

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = emu_lane(), last = lane | (width - 1), source = lane + int(delta);
  return emu::shuffle(mask, value, source > last ? lane : source, line);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = emu_lane(), first = lane & ~(width - 1), source = lane - int(delta);
  return emu::shuffle(mask, value, source < first ? lane : source, line);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const int first = emu_lane() & ~(width - 1);
  return emu::shuffle(mask, value, first + (source & (width - 1)), line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
  const int lane = emu_lane(), source = lane ^ bits;
  return emu::shuffle(mask, value, source / width == lane / width ? source : lane, line);
}
template <typename T, typename V>
T atomicAdd(emu::Pointer<T> p, V value) {
  emu_access(p.region, p.at, sizeof(T), emu::kAtomic, p.line);
  return std::exchange(*p.at, T(*p.at + T(value)));
}
