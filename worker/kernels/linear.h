/* Linear layers over packed weights: the interface for other C files.
 *
 * A panel is PANEL output features; the last one is padded with zeros. The layouts of weights:
 *   float32, float16, bfloat16   [panel][in_features][PANEL]
 *   blocks4   [panel][block]: d[PANEL], m[PANEL] float16; [8][PANEL / 2][4] bytes: the code of an
 *             output feature in the low half, of the one PANEL / 2 later in the high half
 *   blocks8   [panel][block]: d[PANEL] float16; [halves of the panel][8][PANEL / 2][4] int8
 * where [q][][i] is input feature q + 8 i of the block. Weights start at a multiple of 64 bytes.
 * int8 pads the last block with zeros, float32 has whole blocks only.
 * Activations and results are float32; strides are in elements.
 */
#pragma once
#include "threads.h"

#include <stddef.h>
#include <stdint.h>

#define PANEL 16

#define BLOCK 32

enum {
  WEIGHT_FLOAT32 = 0,
  WEIGHT_FLOAT16 = 1,
  WEIGHT_BFLOAT16 = 2,
  WEIGHT_BLOCKS4 = 3,
  WEIGHT_BLOCKS8 = 4,
};

struct linear { /* mirrored by a ctypes structure in packed_linear.py */
  const void *weight;
  const float *bias; /* [panels * PANEL]; zeros if there is none */
  int64_t in_features, out_features, format;
  int64_t is_int8; /* multiplies codes of blocks as integers; else all arithmetic is float32 */
};

/* Bytes of scratch memory for a call with `rows` rows, aligned to 64; 0 except for int8. */
size_t linear_scratch(const struct linear *layer, int64_t rows);

/* out[rows][out_features] = x[rows][in_features] W^T + bias, plus `out` if `accumulate`. Opens a
 * parallel region of its own. */
void linear(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows, float *out,
            int64_t out_stride, int accumulate, void *scratch, int num_threads);

/* The same inside a caller's parallel region, for `count` layers over the same x with adjacent
 * results: each thread calls prepare, which works on its own rows of x (first_row to end_row), and,
 * after a barrier, share, which needs another barrier after it. All layers of a call need the same
 * preparation. */
void linear_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                    void *scratch, struct team team);
void linear_share(const struct linear *const *layers, int count, const float *x, int64_t x_stride,
                  int64_t rows, float *out, int64_t out_stride, int accumulate,
                  const void *scratch, struct team team);

/* How prepare converts x: the same for layers for which this is equal. */
enum preparation { AS_IT_IS, AS_8_BITS, AS_16_BITS };
enum preparation preparation_of(const struct linear *layer);

/* int8, in linear_int8.c */
size_t int8_scratch(const struct linear *layer, int64_t rows);
void int8_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                  void *scratch, struct team team);
void int8_share(const struct linear *const *layers, int count, int64_t rows, float *out,
                int64_t out_stride, int accumulate, const void *scratch, struct team team);
