// Vectors of one instruction set, for row_ops_impl.h: loads and stores, the exponential, conversions between stored
// types, transposition. VIOLIN_VECTOR_BYTES is set by the file that is compiled. Internal linkage, for the reason given
// there.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "violin/kernels/cpu/row_ops.h"

namespace violin::kernels::cpu {
namespace {

// -- Vectors --------------------------------------------------------------------------------------------------------

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Type __attribute__((vector_size(VIOLIN_VECTOR_BYTES), aligned(4)));
  typedef std::int32_t Bits __attribute__((vector_size(VIOLIN_VECTOR_BYTES), aligned(4)));
};
template <>
struct VectorOf<double> {
  typedef double Type __attribute__((vector_size(VIOLIN_VECTOR_BYTES), aligned(8)));
  typedef std::int64_t Bits __attribute__((vector_size(VIOLIN_VECTOR_BYTES), aligned(8)));
};
template <class T>
using Vec = typename VectorOf<T>::Type;
template <class T>
using BitsOf = typename VectorOf<T>::Bits;
template <class T>
constexpr int64_t kWidth = VIOLIN_VECTOR_BYTES / sizeof(T);
template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <class T>
inline void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof(v));
}

template <class T>
inline Vec<T> fill(T x) {
  return Vec<T>{} + x;
}

// The first n elements, zero behind them; touches no memory behind p + n.
template <class T>
inline Vec<T> load_first(const T* p, int64_t n) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, float>) {
    return reinterpret_cast<Vec<T>>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
  }
#endif
  Vec<T> v{};
  std::memcpy(&v, p, n * sizeof(T));
  return v;
}

template <class T>
inline void store_first(T* p, Vec<T> v, int64_t n) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m512>(v));
    return;
  }
#endif
  std::memcpy(p, &v, n * sizeof(T));
}

// For results that are too large to stay in cache: whole lines go to memory without being read first. Such stores are
// made visible to other threads by finish_stores().
template <class T>
inline void store_once(T* p, Vec<T> v) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, float>) {
    if (reinterpret_cast<std::uintptr_t>(p) % sizeof(v) == 0) {
      _mm512_stream_ps(p, reinterpret_cast<__m512>(v));
      return;
    }
  }
#endif
  store(p, v);
}
inline void finish_stores() {
#ifdef __AVX512F__
  _mm_sfence();
#endif
}

template <class T>
inline Vec<T> iota() {
  Vec<T> v;
  for (int64_t i = 0; i < kWidth<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}

// A value as it is rounded to T: without this the compiler may fuse the product behind it with a later addition, and
// the same expression would have different values in different places.
template <class T>
inline Vec<T> rounded(Vec<T> v) {
#ifdef __aarch64__
  asm("" : "+w"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#else
#error "rounded() needs the letter of this architecture's vector registers"
#endif
  return v;
}

// b where it is greater, else a: so a NaN in b is dropped.
template <class T>
inline Vec<T> max(Vec<T> a, Vec<T> b) {
  return b > a ? b : a;
}

// Folds a vector in halves, so the order of the operations is fixed.
template <class T, class Fold>
inline T horizontal(Vec<T> v, const Fold& fold) {
  T s[kWidth<T>];
  std::memcpy(s, &v, sizeof(v));
  for (int64_t step = kWidth<T> / 2; step > 0; step /= 2) {
    for (int64_t i = 0; i < step; ++i) s[i] = fold(s[i], s[i + step]);
  }
  return s[0];
}

template <class T>
inline T horizontal_max(Vec<T> v) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, float>) return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#endif
  return horizontal<T>(v, [](T a, T b) { return b > a ? b : a; });
}

template <class T>
inline T horizontal_sum(Vec<T> v) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, float>) return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#endif
  return horizontal<T>(v, [](T a, T b) { return a + b; });
}

// -- Exponential ----------------------------------------------------------------------------------------------------
// x log2(e) = n + r with n whole and |r| <= 1/2; 2^r by a polynomial of degree 6 (relative error 2e-9, minimax with
// p(0) = 1), 2^n by the exponent field. Arguments are at most a little above 0. 0 gives exactly 1, -inf 0, and NaN
// stays NaN.

inline Vec<float> exp_vector(Vec<float> x) {
  constexpr float kLog2E = 1.44269504F;
  // Adding 1.5 * 2^23 leaves the nearest whole number in the low bits of the mantissa.
  constexpr float kMagic = 12582912.0F;
  // Below this, 2^-125, the result would soon be subnormal: it is 0, and such lanes are kept away from instructions
  // that would stall on them.
  constexpr float kLowest = -86.643F;
#ifdef __AVX512F__
  const __mmask16 is_normal =
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(kLowest), _CMP_NLT_UQ);  // NaN passes
  x = reinterpret_cast<Vec<float>>(_mm512_mask_mov_ps(_mm512_set1_ps(kLowest), is_normal, reinterpret_cast<__m512>(x)));
#else
  const auto is_zero = x < kLowest;
  x = is_zero ? fill(kLowest) : x;
#endif
  const Vec<float> shifted = x * kLog2E + kMagic;
  const Vec<float> n = shifted - kMagic;
  const Vec<float> r = x * kLog2E - n;
  Vec<float> p = fill(1.53533620e-4F);
  p = p * r + 1.33988739e-3F;
  p = p * r + 9.61843692e-3F;
  p = p * r + 5.55033237e-2F;
  p = p * r + 2.40226477e-1F;
  p = p * r + 6.93147182e-1F;
  p = p * r + 1.0F;
#ifdef __AVX512F__
  return reinterpret_cast<Vec<float>>(
      _mm512_maskz_scalef_ps(is_normal, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  const BitsOf<float> bits = reinterpret_cast<BitsOf<float>>(p) + (reinterpret_cast<BitsOf<float>>(shifted) << 23);
  return is_zero ? Vec<float>{} : reinterpret_cast<Vec<float>>(bits);
#endif
}

inline Vec<double> exp_vector(Vec<double> x) {
  for (int64_t i = 0; i < kWidth<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <class T>
inline T exp_scalar(T x) {
  return exp_vector(fill(x))[0];
}

// -- Conversions ----------------------------------------------------------------------------------------------------

inline float to_real(float x) {
  return x;
}
inline double to_real(double x) {
  return x;
}
inline float to_real(BFloat16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}
inline float to_real(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  // Shifted into place the exponent is 112 too small, which one exact product mends, subnormal numbers included.
  std::uint32_t bits = magnitude << 13;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  f *= 0x1p112F;
  if (magnitude >= 0x7c00u) {  // infinity and NaN
    bits = 0x7f800000u | (magnitude << 13);
    std::memcpy(&f, &bits, sizeof(f));
  }
  std::memcpy(&bits, &f, sizeof(bits));
  bits |= sign;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

template <class To, class From>
inline To convert(From x);
template <>
inline float convert<float, float>(float x) {
  return x;
}
template <>
inline double convert<double, double>(double x) {
  return x;
}
template <>
inline BFloat16 convert<BFloat16, float>(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline Float16 convert<Float16, float>(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (bits >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (bits < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the mantissa so that the addition itself rounds to nearest even.
    float f;
    std::memcpy(&f, &bits, sizeof(f));
    f += 0.5F;
    std::memcpy(&bits, &f, sizeof(bits));
    return {static_cast<std::uint16_t>(sign | (bits - 0x3f000000u))};
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);  // rebias by -112 and round to nearest even
  return {static_cast<std::uint16_t>(sign | (bits >> 13))};
}

// Source to Operand: the same type, or widened.
template <class Operand, class Source>
inline Operand to_operand(Source x) {
  if constexpr (std::is_same_v<Operand, Source>) {
    return x;
  } else {
    return to_real(x);
  }
}

// kWidth elements of any stored type as a vector, and back.
template <class Real, class Stored>
inline Vec<Real> load_as(const Stored* p) {
  if constexpr (std::is_same_v<Real, Stored>) {
    return load(p);
  } else if constexpr (std::is_same_v<Stored, BFloat16>) {
    typedef std::uint16_t Half __attribute__((vector_size(VIOLIN_VECTOR_BYTES / 2), aligned(2)));
    typedef std::uint32_t Wide __attribute__((vector_size(VIOLIN_VECTOR_BYTES), aligned(4)));
    Half h;
    std::memcpy(&h, p, sizeof(h));
    return reinterpret_cast<Vec<Real>>(__builtin_convertvector(h, Wide) << 16);
  } else {
    Vec<Real> v;
    for (int64_t i = 0; i < kWidth<Real>; ++i) v[i] = to_real(p[i]);
    return v;
  }
}

template <class Real, class Stored>
inline void store_as(Stored* p, Vec<Real> v) {
  if constexpr (std::is_same_v<Real, Stored>) {
    store(p, v);
  } else if constexpr (std::is_same_v<Stored, BFloat16>) {
    typedef std::uint16_t Half __attribute__((vector_size(VIOLIN_VECTOR_BYTES / 2), aligned(2)));
    typedef std::uint32_t Wide __attribute__((vector_size(VIOLIN_VECTOR_BYTES), aligned(4)));
    const Wide bits = reinterpret_cast<Wide>(v);
    const Wide rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Wide result = (bits & 0x7fffffffu) > 0x7f800000u ? ((bits >> 16) | 0x40u) : rounded;
    const Half h = __builtin_convertvector(result, Half);
    std::memcpy(p, &h, sizeof(h));
  } else {
    for (int64_t i = 0; i < kWidth<Real>; ++i) p[i] = convert<Stored>(v[i]);
  }
}

// -- Transposition --------------------------------------------------------------------------------------------------
// Squares of kWidth x kWidth go through registers: log2(kWidth) rounds of interleaving rows i and i + kWidth/2.

template <class T, std::size_t... I>
inline void interleave(Vec<T> a, Vec<T> b, Vec<T>& low, Vec<T>& high, std::index_sequence<I...>) {
  constexpr int64_t w = kWidth<T>;
  low = __builtin_shufflevector(a, b, (I / 2 + (I % 2) * w)...);
  high = __builtin_shufflevector(a, b, (w / 2 + I / 2 + (I % 2) * w)...);
}

template <class T>
inline void transpose_square(Vec<T> (&rows)[kWidth<T>]) {
  constexpr int64_t w = kWidth<T>;
  for (int64_t round = 1; round < w; round *= 2) {
    Vec<T> next[w];
    for (int64_t i = 0; i < w / 2; ++i) {
      interleave<T>(rows[i], rows[i + w / 2], next[2 * i], next[2 * i + 1], std::make_index_sequence<w>());
    }
    for (int64_t i = 0; i < w; ++i) rows[i] = next[i];
  }
}

// out[c, r] = in[r, c] for whole squares; what is left over at the right and at the bottom one by one.
// `read(r, c)` gives kWidth elements of a row, `write(c, r, v)` takes kWidth elements of a row of the result.
template <class T, class Read, class Write, class One>
inline void transpose_blocks(int64_t rows, int64_t columns, const Read& read, const Write& write, const One& one) {
  constexpr int64_t w = kWidth<T>;
  int64_t r = 0;
  for (; r + w <= rows; r += w) {
    int64_t c = 0;
    for (; c + w <= columns; c += w) {
      Vec<T> square[w];
      for (int64_t i = 0; i < w; ++i) square[i] = read(r + i, c);
      transpose_square<T>(square);
      for (int64_t i = 0; i < w; ++i) write(c + i, r, square[i]);
    }
    for (; c < columns; ++c) {
      for (int64_t i = 0; i < w; ++i) one(r + i, c);
    }
  }
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) one(r, c);
  }
}

}  // namespace
}  // namespace violin::kernels::cpu
