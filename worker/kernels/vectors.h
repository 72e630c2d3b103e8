/* Vectors of eight floats, an exponential, and the 16-bit formats, for all kernels.
 *
 * Explicit vectors, by extensions of gcc and clang, so that every sum has one fixed order; x86
 * intrinsics only where the generic form is slow.
 */
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define LANES 8
#define INLINE static inline __attribute__((always_inline))
/* A hot loop in a function of its own, so that it can use all registers. */
#define NOINLINE static __attribute__((noinline))

/* Forces the compiler to have the vector in a register at this point. */
#ifdef __AVX__
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v)
#endif

/* A short loop, unrolled before arrays are assigned to registers; else they stay in memory. */
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

enum { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

typedef float vec __attribute__((vector_size(32)));
typedef float vec_unaligned __attribute__((vector_size(32), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(32)));

INLINE vec load(const float *p) { return *(const vec_unaligned *)p; }
INLINE void store(float *p, vec a) { *(vec_unaligned *)p = a; }
INLINE vec splat(float a) { return (vec){a, a, a, a, a, a, a, a}; }
INLINE vec pick(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

/* a > b ? a : b, b where either is NaN */
INLINE vec larger(vec a, vec b) {
#ifdef __AVX__
  return _mm256_max_ps(a, b);
#else
  return pick(a > b, a, b);
#endif
}

INLINE vec smaller(vec a, vec b) { /* a < b ? a : b */
#ifdef __AVX__
  return _mm256_min_ps(a, b);
#else
  return pick(a < b, a, b);
#endif
}

INLINE vec fma8(vec a, vec b, vec c) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c; /* fused or not, but the same everywhere */
#endif
}

/* ((a0+a1)+(a2+a3)) + ((a4+a5)+(a6+a7)) of each of four vectors */
INLINE void sum_lanes4(const vec a[4], float *out) {
#ifdef __AVX__
  __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
#else
  for (int i = 0; i < 4; i++)
    out[i] = ((a[i][0] + a[i][1]) + (a[i][2] + a[i][3])) +
             ((a[i][4] + a[i][5]) + (a[i][6] + a[i][7]));
#endif
}

INLINE float sum_lanes(vec a) { /* in the same order */
#ifdef __AVX__
  a = _mm256_hadd_ps(a, a);
  a = _mm256_hadd_ps(a, a);
  return a[0] + a[4];
#else
  return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
#endif
}

INLINE float max_lanes(vec a) {
#ifdef __AVX__
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return m[1] > m[0] ? m[1] : m[0];
#else
  float m = a[0];
  for (int i = 1; i < LANES; i++)
    if (a[i] > m) m = a[i];
  return m;
#endif
}

/* e^x to about 1e-7; 0 below -87; the argument is split as n ln 2 + r (Cephes, expf) */
INLINE vec exp8(vec x) {
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  ivec tiny = x < splat(-87.0f);
  x = smaller(splat(88.0f), x);
  vec shifted = fma8(x, splat(1.44269504088896341f), splat(shift));
  vec n = shifted - splat(shift);
  vec r = fma8(n, splat(-0.693359375f), x);
  r = fma8(n, splat(2.12194440e-4f), r);
  vec p = splat(1.9875691500e-4f);
  p = fma8(p, r, splat(1.3981999507e-3f));
  p = fma8(p, r, splat(8.3334519073e-3f));
  p = fma8(p, r, splat(4.1665795894e-2f));
  p = fma8(p, r, splat(1.6666665459e-1f));
  p = fma8(p, r, splat(5.0000001201e-1f));
  p = fma8(p, r * r, r + splat(1.0f));
  ivec exponent = ((ivec)shifted - (ivec)splat(shift) + 127) << 23;
  return (vec)(~tiny & (ivec)(p * (vec)exponent));
}

/* cap * tanh(x / cap) */
INLINE vec soft_cap(vec x, float cap) {
  vec e = exp8(x * splat(2.0f / cap));
  return splat(cap) * (splat(1.0f) - splat(2.0f) / (e + splat(1.0f)));
}

/* ---- 16-bit formats --------------------------------------------------------------------- */

INLINE float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

INLINE float from_bfloat16(uint16_t half) { return as_float((uint32_t)half << 16); }

INLINE uint16_t to_bfloat16(float value) { /* to nearest, ties to even; NaN stays NaN */
  const uint32_t bits = as_bits(value);
  if (value != value) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* float16 in plain C, after Marat Dukhan's FP16 (MIT): compilers before gcc 12 lack _Float16 */
INLINE float from_float16(uint16_t half) {
  const uint32_t wide = (uint32_t)half << 16, twice = wide + wide;
  const float normal = as_float((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
  const float subnormal = as_float((twice >> 17) | (126u << 23)) - 0.5f;
  return as_float((wide & 0x80000000u) | as_bits(twice < (1u << 27) ? subnormal : normal));
}

INLINE uint16_t to_float16(float value) { /* to nearest, ties to even; a NaN keeps what fits */
  const uint32_t bits = as_bits(value), twice = bits + bits, sign = bits & 0x80000000u;
  if (twice > 0xff000000u) return (uint16_t)((sign >> 16) | 0x7e00 | (bits >> 13 & 0x3ff));
  uint32_t bias = twice & 0xff000000u;
  if (bias < 0x71000000u) bias = 0x71000000u;
  const float scaled = as_float(bits & 0x7fffffffu) * 0x1.0p+112f * 0x1.0p-110f;
  const uint32_t rounded = as_bits(as_float((bias >> 1) + 0x07800000u) + scaled);
  return (uint16_t)((sign >> 16) | (((rounded >> 13) & 0x7c00u) + (rounded & 0xfffu)));
}

#ifdef __F16C__
#define LOADS_FLOAT16 1 /* as fast as floats */
#else
#define LOADS_FLOAT16 0
#endif

INLINE vec load_float16(const uint16_t *p) {
#ifdef __F16C__
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  vec values;
  for (int i = 0; i < LANES; i++) values[i] = from_float16(p[i]);
  return values;
#endif
}

INLINE void store_float16(uint16_t *p, vec values) { /* the bits of to_float16 */
#ifdef __F16C__
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < LANES; i++) p[i] = to_float16(values[i]);
#endif
}

static void widen(const void *from, float *to, int n, int dtype) {
  const uint16_t *p = from;
  int i = 0;
  if (dtype == FLOAT32) {
    memcpy(to, from, sizeof(float) * (size_t)n);
  } else if (dtype == BFLOAT16) {
    for (; i < n; i++) to[i] = from_bfloat16(p[i]);
  } else {
#pragma GCC unroll 4
    for (; i + LANES <= n; i += LANES) store(to + i, load_float16(p + i));
    for (; i < n; i++) to[i] = from_float16(p[i]);
  }
}

static void narrow(const float *from, void *to, int n, int dtype) {
  uint16_t *p = to;
  int i = 0;
  if (dtype == FLOAT32) {
    memcpy(to, from, sizeof(float) * (size_t)n);
  } else if (dtype == BFLOAT16) {
    for (; i < n; i++) p[i] = to_bfloat16(from[i]);
  } else {
    for (; i + LANES <= n; i += LANES) store_float16(p + i, load(from + i));
    for (; i < n; i++) p[i] = to_float16(from[i]);
  }
}
