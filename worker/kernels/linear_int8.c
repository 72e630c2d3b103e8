/* Linear layers over int8 weights (linear.h): 8 bits per weight, 16 per activation.
 *
 * Weights have one scale per output feature. Each row of activations is quantised when it comes, by
 * its own largest value, to 16 bits: multiplying 16-bit pairs into 32-bit sums is as fast here as
 * multiplying bytes, never saturates, and leaves the error to the weights alone. A sum over SLICE
 * features cannot overflow (512 * 127 * 32767 < 2^31) and is exact; slices are added up in float32
 * in their order. So the bits of a result depend on its row and its weights alone.
 *
 * Scratch: one scale per row, then the rows, [rows][features rounded up to PAD] int16.
 */
#include "linear.h"

#include "vectors.h"

#define TILE_ROWS 6
#define SLICE 512
#define PAD 16
#define ROW_BYTES (256 << 10) /* of rows that are gone through at once: they stay in a cache */
#define LARGEST 32767.0f
#define SMALLEST 1e-33f /* LARGEST / SMALLEST is finite */
#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

static int64_t padded(int64_t features) { return (features + PAD - 1) / PAD * PAD; }

size_t int8_scratch(const struct linear *layer, int64_t rows) {
  return ALIGNED(sizeof(float) * (size_t)rows) +
         sizeof(int16_t) * (size_t)(rows * padded(layer->in_features));
}

static int16_t *rows_in(const struct linear *layer, const void *scratch, int64_t rows, int64_t row) {
  int16_t *first = (int16_t *)((char *)scratch + ALIGNED(sizeof(float) * (size_t)rows));
  return first + row * padded(layer->in_features);
}

/* Quantise one row; returns its scale. One that is not finite gets the scale NaN, so that whoever
 * looks for such rows finds it; one too small to be divided by becomes zeros. */
static float quantise(const float *x, int64_t features, int16_t *to) {
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  vec top = splat(0.0f), odds = splat(0.0f);
  int64_t k = 0;
  for (; k + LANES <= features; k += LANES) {
    const vec value = load(x + k), size = (vec)((ivec)value & 0x7fffffff);
    top = pick(size > top, size, top);
    odds += value * splat(0.0f);
  }
  float largest = max_lanes(top), odd = sum_lanes(odds); /* odd: 0; NaN after infinity or NaN */
  for (; k < features; k++) {
    const float size = x[k] < 0 ? -x[k] : x[k];
    largest = size > largest ? size : largest;
    odd += x[k] * 0.0f;
  }
  const int is_usable = odd == 0 && largest > SMALLEST;
  const float inverse = is_usable ? LARGEST / largest : 0.0f;
  for (k = 0; k < features; k++)
    to[k] = is_usable ? (int16_t)(x[k] * inverse + shift - shift) : 0;
  for (; k < padded(features); k++) to[k] = 0;
  return is_usable ? largest / LARGEST : odd;
}

void int8_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                  void *scratch, int thread, int num_threads) {
  const int64_t from = rows * thread / num_threads, to = rows * (thread + 1) / num_threads;
  for (int64_t row = from; row < to; row++)
    ((float *)scratch)[row] =
        quantise(x + row * x_stride, layer->in_features, rows_in(layer, scratch, rows, row));
}

/* sums[r][c] of `pairs` pairs of features; `rows` is a constant where it is called */
INLINE void multiply(int rows, const int16_t *x, int64_t stride, const int8_t *weight, int pairs,
                     const char *ahead, ivec sums[TILE_ROWS][2]) {
#ifdef __AVX2__
  __m256i s[TILE_ROWS][2];
  for (int r = 0; r < rows; r++) s[r][0] = s[r][1] = _mm256_setzero_si256();
  for (int k = 0; k < pairs; k += 4) {
    if (ahead) __builtin_prefetch(ahead + k * 16, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m128i *packed = (const __m128i *)weight + (k + j) * 2;
      const __m256i w0 = _mm256_cvtepi8_epi16(packed[0]), w1 = _mm256_cvtepi8_epi16(packed[1]);
      for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * stride + 2 * (k + j), sizeof pair);
        const __m256i value = _mm256_set1_epi32(pair);
        s[r][0] = _mm256_add_epi32(s[r][0], _mm256_madd_epi16(value, w0));
        s[r][1] = _mm256_add_epi32(s[r][1], _mm256_madd_epi16(value, w1));
        IN_REGISTER(s[r][0]); /* else the sums are reordered, and do not fit the registers */
        IN_REGISTER(s[r][1]);
      }
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < 2; c++) sums[r][c] = (ivec)s[r][c];
#else
  (void)ahead;
  for (int r = 0; r < rows; r++) {
    int32_t s[PANEL] = {0};
    for (int k = 0; k < pairs; k++) {
      const int32_t first = x[r * stride + 2 * k], second = x[r * stride + 2 * k + 1];
      for (int c = 0; c < PANEL; c++)
        s[c] += first * weight[(k * PANEL + c) * 2] + second * weight[(k * PANEL + c) * 2 + 1];
    }
    memcpy(sums[r], s, sizeof s);
  }
#endif
}

static __attribute__((noinline)) void multiply_rows(int rows, const int16_t *x, int64_t stride,
                                                    const int8_t *weight, int pairs,
                                                    const char *ahead, ivec sums[TILE_ROWS][2]) {
  switch (rows) {
    case 1: multiply(1, x, stride, weight, pairs, ahead, sums); break;
    case 2: multiply(2, x, stride, weight, pairs, ahead, sums); break;
    case 3: multiply(3, x, stride, weight, pairs, ahead, sums); break;
    case 4: multiply(4, x, stride, weight, pairs, ahead, sums); break;
    case 5: multiply(5, x, stride, weight, pairs, ahead, sums); break;
    default: multiply(6, x, stride, weight, pairs, ahead, sums);
  }
}

/* one slice of one panel, for rows [first, last) of `rows`: out = before + sums * scales */
static void slice_of_rows(const struct linear *layer, int64_t panel, int64_t feature, int features,
                          int64_t first, int64_t last, int64_t rows, float *out,
                          int64_t out_stride, int accumulate, const void *scratch) {
  const int64_t stride = padded(layer->in_features);
  const int64_t tiles = (last - first + TILE_ROWS - 1) / TILE_ROWS;
  const int8_t *weight = (const int8_t *)layer->weight + (panel * stride + feature) * PANEL;
  const float *scale = layer->scale + panel * PANEL, *bias = layer->bias + panel * PANEL;
  const int64_t left = layer->out_features - panel * PANEL;
  const int width = left < PANEL ? (int)left : PANEL;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t row = first + (last - first) * i / tiles;
    const int64_t end = first + (last - first) * (i + 1) / tiles;
    ivec sums[TILE_ROWS][2];
    const char *ahead = tiles > 1 && i == 0 ? (const char *)weight + features * PANEL : NULL;
    multiply_rows((int)(end - row), rows_in(layer, scratch, rows, row) + feature, stride, weight,
                  features / 2, ahead, sums);
    for (int64_t r = row; r < end; r++) {
      float *to = out + r * out_stride + panel * PANEL, copy[PANEL] = {0};
      float *place = width < PANEL ? copy : to;
      if (width < PANEL) memcpy(copy, to, sizeof(float) * (size_t)width);
      const vec of_row = splat(((const float *)scratch)[r]);
      for (int c = 0; c < 2; c++) {
        vec before = splat(0.0f);
        if (feature > 0 || accumulate) before = load(place + c * LANES);
        if (feature == 0) before += load(bias + c * LANES);
        const vec sum = __builtin_convertvector(sums[r - row][c], vec);
        store(place + c * LANES, fma8(sum, of_row * load(scale + c * LANES), before));
      }
      if (width < PANEL) memcpy(to, copy, sizeof(float) * (size_t)width);
    }
  }
}

void int8_share(const struct linear *layer, int64_t rows, float *out, int64_t out_stride,
                int accumulate, const void *scratch, int thread, int num_threads) {
  const int64_t panels = (layer->out_features + PANEL - 1) / PANEL;
  const int64_t from = panels * thread / num_threads, to = panels * (thread + 1) / num_threads;
  const int64_t features = padded(layer->in_features), fitting = ROW_BYTES / 2 / features + 1;
  const int64_t blocks = (rows + fitting - 1) / fitting;
  for (int64_t block = 0; block < blocks; block++)
    for (int64_t panel = from; panel < to; panel++)
      for (int64_t feature = 0; feature < features; feature += SLICE)
        slice_of_rows(layer, panel, feature,
                      (int)(features - feature < SLICE ? features - feature : SLICE),
                      rows * block / blocks, rows * (block + 1) / blocks, rows, out, out_stride,
                      accumulate, scratch);
}
