/* How weights are stored, and widening them to float32 (linear.h says how they lie).
 *
 * In blocks, BLOCK input features of an output feature share a step d and an offset m, both float16:
 * a weight is d * code + m, rounded once, which is what the formats Q4_1 and Q8_0 of GGUF mean.
 */
#pragma once
#include "linear.h"
#include "vectors.h"

/* bytes of a panel's `features` input features */
INLINE int64_t panel_bytes(int64_t format, int64_t features) {
  switch (format) {
    case WEIGHT_FLOAT32: return features * PANEL * 4;
    case WEIGHT_BLOCKS4: return features * (PANEL / 2 + 4 * PANEL / BLOCK);
    case WEIGHT_BLOCKS8: return features * (PANEL + 2 * PANEL / BLOCK);
    default: return features * PANEL * 2;
  }
}

#if defined(__AVX2__) && defined(__F16C__)
INLINE void load_halves(const void *halves, vec to[2]) {
  const __m128i *p = halves;
  EACH(c, 2) to[c] = _mm256_cvtph_ps(p[c]);
}

/* PANEL codes, 0 to 15 or (`is_signed`) -127 to 127 */
INLINE void widen_codes(__m128i codes, int is_signed, const vec d[2], const vec m[2], float *to) {
  EACH(c, 2) {
    const __m128i part = c ? _mm_unpackhi_epi64(codes, codes) : codes;
    const __m256i wide = is_signed ? _mm256_cvtepi8_epi32(part) : _mm256_cvtepu8_epi32(part);
    store(to + c * LANES, fma8(_mm256_cvtepi32_ps(wide), d[c], m[c]));
  }
}

INLINE void widen_code_pairs(const void *codes, const vec d[2], const vec m[2], float *to) {
  const __m128i both = _mm_loadu_si128(codes), low = _mm_set1_epi8(15);
  widen_codes(_mm_and_si128(both, low), 0, d, m, to);
  widen_codes(_mm_and_si128(_mm_srli_epi16(both, 4), low), 0, d, m, to + PANEL);
}

INLINE void widen_bytes(const void *codes, const vec d[2], float *to) {
  const vec none[2] = {splat(0.0f), splat(0.0f)};
  widen_codes(_mm_loadu_si128(codes), 1, d, none, to);
}
#else
INLINE void load_halves(const void *halves, vec to[2]) {
  for (int i = 0; i < PANEL; i++)
    to[i / LANES][i % LANES] = from_float16(((const uint16_t *)halves)[i]);
}

/* d times a code is exact, so it makes no difference whether the addition is fused with it */
INLINE void widen_code_pairs(const void *codes, const vec d[2], const vec m[2], float *to) {
  for (int i = 0; i < PANEL; i++) {
    const int both = ((const uint8_t *)codes)[i];
    const float step = d[i / LANES][i % LANES], offset = m[i / LANES][i % LANES];
    to[i] = step * (float)(both & 15) + offset;
    to[PANEL + i] = step * (float)(both >> 4) + offset;
  }
}

INLINE void widen_bytes(const void *codes, const vec d[2], float *to) {
  for (int i = 0; i < PANEL; i++)
    to[i] = d[i / LANES][i % LANES] * (float)((const int8_t *)codes)[i];
}
#endif

/* [features][PANEL] as float32: `stored` itself, or what has been put into `to` */
static const float *widen_panel(int64_t format, const void *stored, int features, float *to) {
  const char *p = stored;
  const int halves = 2 * PANEL; /* bytes */
  vec d[2], m[2];
  if (format == WEIGHT_FLOAT32) return stored;
  if (format == WEIGHT_BLOCKS4) {
    for (int k = 0; k < features; k += BLOCK) {
      load_halves(p, d);
      load_halves(p + halves, m);
      p += 2 * halves;
      for (int j = 0; j < BLOCK; j += 2, p += PANEL)
        widen_code_pairs(p, d, m, to + (k + j) * PANEL);
    }
  } else if (format == WEIGHT_BLOCKS8) {
    for (int k = 0; k < features; k += BLOCK) {
      load_halves(p, d);
      p += halves;
      for (int j = 0; j < BLOCK; j++, p += PANEL) widen_bytes(p, d, to + (k + j) * PANEL);
    }
  } else {
    widen(stored, to, features * PANEL, format == WEIGHT_FLOAT16 ? FLOAT16 : BFLOAT16);
  }
  return to;
}
