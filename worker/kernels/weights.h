/* Storage of weights, and widening them to float32; linear.h describes the layouts.
 *
 * In blocks, BLOCK input features of an output feature share a step d and an offset m, in float16: a
 * weight is d * code + m, rounded once, as in GGUF's formats Q4_1 and Q8_0.
 */
#pragma once
#include "linear.h"
#include "vectors.h"

/* Bytes of `features` input features of a panel. */
INLINE int64_t panel_bytes(int64_t format, int64_t features) {
  switch (format) {
    case WEIGHT_FLOAT32: return features * PANEL * 4;
    case WEIGHT_BLOCKS4: return features * (PANEL / 2 + 4 * PANEL / BLOCK);
    case WEIGHT_BLOCKS8: return features * (PANEL + 2 * PANEL / BLOCK);
    default: return features * PANEL * 2;
  }
}

typedef uint32_t uvec __attribute__((vector_size(32)));

/* Loads a block's steps and offsets, [PANEL] each; returns the address of its codes. */
INLINE const char *load_steps(int64_t format, const char *block, float *d, float *m) {
  widen(block, d, PANEL, FLOAT16);
  if (format == WEIGHT_BLOCKS4) {
    widen(block + 2 * PANEL, m, PANEL, FLOAT16);
    return block + 4 * PANEL;
  }
  for (int i = 0; i < PANEL; i += LANES) store(m + i, splat(0.0f));
  return block + 2 * PANEL;
}

/* [BLOCK][PANEL] as float32. d times a code is exact: fusing the addition makes no difference. */
INLINE void widen_block(int64_t format, const char *block, float *to) {
  const int is_half = format == WEIGHT_BLOCKS4; /* a byte */
  float d[PANEL], m[PANEL];
  const char *codes = load_steps(format, block, d, m);
  EACH(c, 2) {
    const vec step = load(d + c * LANES), offset = load(m + c * LANES);
    EACH(q, 8) {
      uvec quad; /* of each of LANES output features */
      memcpy(&quad, codes + (is_half ? 0 : c * BLOCK * LANES) + q * 4 * LANES, sizeof quad);
      EACH(i, 4) {
        const ivec code = is_half ? (ivec)(quad >> (8 * i + 4 * c) & 15)
                                  : (ivec)(quad << (24 - 8 * i)) >> 24;
        const vec value = __builtin_convertvector(code, vec);
        store(to + (q + 8 * i) * PANEL + c * LANES, fma8(value, step, offset));
      }
    }
  }
}

/* [features][PANEL] as float32: `stored` itself, or widened into `to`. */
static inline const float *widen_panel(int64_t format, const void *stored, int features, float *to) {
  const char *block = stored;
  if (format == WEIGHT_FLOAT32) return stored;
  if (format == WEIGHT_BLOCKS4) {
    for (int k = 0; k < features; k += BLOCK, block += panel_bytes(WEIGHT_BLOCKS4, BLOCK))
      widen_block(WEIGHT_BLOCKS4, block, to + k * PANEL);
  } else if (format == WEIGHT_BLOCKS8) {
    for (int k = 0; k < features; k += BLOCK, block += panel_bytes(WEIGHT_BLOCKS8, BLOCK))
      widen_block(WEIGHT_BLOCKS8, block, to + k * PANEL);
  } else {
    widen(stored, to, features * PANEL, format == WEIGHT_FLOAT16 ? FLOAT16 : BFLOAT16);
  }
  return to;
}
