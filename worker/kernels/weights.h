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

INLINE void widen_codes(__m128i codes, const vec d[2], const vec m[2], float *to) {
  store(to, fma8(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)), d[0], m[0]));
  store(to + LANES, fma8(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(codes, codes))), d[1], m[1]));
}

/* [features][PANEL] as float32: `stored` itself, or what has been put into `to` */
static const float *widen_panel(int64_t format, const void *stored, int features, float *to) {
  if (format == WEIGHT_FLOAT32) return stored;
  if (format == WEIGHT_BLOCKS4) {
    const __m128i *p = stored, low = _mm_set1_epi8(15);
    for (int k = 0; k < features; k += BLOCK, p += 4 + BLOCK / 2) {
      const vec d[2] = {_mm256_cvtph_ps(p[0]), _mm256_cvtph_ps(p[1])};
      const vec m[2] = {_mm256_cvtph_ps(p[2]), _mm256_cvtph_ps(p[3])};
      for (int j = 0; j < BLOCK / 2; j++) {
        float *here = to + (k + 2 * j) * PANEL;
        widen_codes(_mm_and_si128(p[4 + j], low), d, m, here);
        widen_codes(_mm_and_si128(_mm_srli_epi16(p[4 + j], 4), low), d, m, here + PANEL);
      }
    }
  } else if (format == WEIGHT_BLOCKS8) {
    const __m128i *p = stored;
    for (int k = 0; k < features; k += BLOCK, p += 2 + BLOCK) {
      const vec d[2] = {_mm256_cvtph_ps(p[0]), _mm256_cvtph_ps(p[1])};
      for (int j = 0; j < BLOCK; j++) {
        float *here = to + (k + j) * PANEL;
        store(here, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(p[2 + j])) * d[0]);
        store(here + LANES, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(p[2 + j], p[2 + j]))) * d[1]);
      }
    }
  } else {
    widen(stored, to, features * PANEL, format == WEIGHT_FLOAT16 ? FLOAT16 : BFLOAT16);
  }
  return to;
}
