/* Linear layers over weights packed once: float32 and float16 weights, float32 arithmetic.
 *
 * Each thread computes its own run of panels (PANEL output features) for all rows. A slice, SLICE
 * input features of a panel, is read into the first-level cache once and used by one tile of up to
 * TILE_ROWS rows after the other; meanwhile the next slice is fetched. Long inputs and many rows are
 * cut further, so that the rows in use stay in the second-level cache.
 *
 * A result is one chain of fused multiply-adds, from the bias on, over the input features in their
 * order; a cut stores the chain's float32 value and takes it up again. So its bits depend on its row
 * and its weights alone: not on the other rows, the tile's shape, or the number of threads.
 */
#include "linear.h"

#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

#define TILE_ROWS 6
#define SLICE 256             /* x PANEL floats: half of a first-level cache */
#define LONGEST 1024          /* input features that are gone through at once */
#define ROW_BYTES (256 << 10) /* of rows that are gone through at once */
#define ALONE (1 << 17)       /* activations that one thread prepares before the others start */

struct tile { /* [rows][features] x [features][PANEL]; `start` is where the sums begin */
  const float *x, *start;
  float *out;
  int64_t x_stride, start_stride, out_stride;
};

INLINE void load_panel(const void *weight, int k, int format, vec w[2]) {
#ifdef __F16C__
  if (format == WEIGHT_FLOAT16) {
    const __m128i *half = (const __m128i *)weight + 2 * k;
    w[0] = _mm256_cvtph_ps(half[0]);
    w[1] = _mm256_cvtph_ps(half[1]);
    return;
  }
#endif
  (void)format;
  w[0] = ((const vec *)weight)[2 * k];
  w[1] = ((const vec *)weight)[2 * k + 1];
  IN_REGISTER(w[0]); /* else they are read from memory again for every row */
  IN_REGISTER(w[1]);
}

/* `rows` and `format` are constants where it is called; fetches 32 bytes of `ahead` per feature */
INLINE void multiply(int rows, int format, const struct tile *t, const void *weight, int features,
                     const char *ahead) {
  vec sums[TILE_ROWS][2], w[2];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < 2; c++) sums[r][c] = load(t->start + r * t->start_stride + c * LANES);
  const float *x = t->x;
  const int64_t stride = t->x_stride;
  int k = 0;
  for (; k + 4 <= features; k += 4) {
    if (ahead) {
      __builtin_prefetch(ahead + k * 32, 0, 2);
      __builtin_prefetch(ahead + k * 32 + 64, 0, 2);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      load_panel(weight, k + j, format, w);
      for (int r = 0; r < rows; r++) {
        const vec value = splat(x[r * stride + k + j]);
        sums[r][0] = fma8(value, w[0], sums[r][0]);
        sums[r][1] = fma8(value, w[1], sums[r][1]);
      }
    }
  }
  for (; k < features; k++) {
    load_panel(weight, k, format, w);
    for (int r = 0; r < rows; r++) {
      const vec value = splat(x[r * stride + k]);
      sums[r][0] = fma8(value, w[0], sums[r][0]);
      sums[r][1] = fma8(value, w[1], sums[r][1]);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < 2; c++) store(t->out + r * t->out_stride + c * LANES, sums[r][c]);
}

INLINE void multiply_rows(int rows, int format, const struct tile *t, const void *weight,
                          int features, const char *ahead) {
  switch (rows) {
    case 1: multiply(1, format, t, weight, features, ahead); break;
    case 2: multiply(2, format, t, weight, features, ahead); break;
    case 3: multiply(3, format, t, weight, features, ahead); break;
    case 4: multiply(4, format, t, weight, features, ahead); break;
    case 5: multiply(5, format, t, weight, features, ahead); break;
    default: multiply(6, format, t, weight, features, ahead);
  }
}

static void multiply_float32(int rows, const struct tile *t, const void *weight, int features,
                             const char *ahead) {
  multiply_rows(rows, WEIGHT_FLOAT32, t, weight, features, ahead);
}

static void multiply_float16(int rows, const struct tile *t, const void *weight, int features) {
  multiply_rows(rows, WEIGHT_FLOAT16, t, weight, features, NULL);
}

#ifdef __F16C__
#define MULTIPLIES_FLOAT16 1
#else
#define MULTIPLIES_FLOAT16 0 /* widened first, always */
#endif

/* ---- a thread's share ------------------------------------------------------------------- */

struct piece { /* one slice of one panel, for rows [first, last) */
  int64_t panel, feature, first, last;
  int features, is_start; /* is_start: nothing has been summed yet */
};

static void piece_of_rows(const struct linear *layer, const float *x, int64_t x_stride, float *out,
                          int64_t out_stride, int accumulate, const struct piece *p) {
  const int64_t rows = p->last - p->first, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t left = layer->out_features - p->panel * PANEL;
  const int width = left < PANEL ? (int)left : PANEL;
  const int is_half = layer->format == WEIGHT_FLOAT16, size = is_half ? 2 : 4;
  const int64_t offset = (p->panel * layer->in_features + p->feature) * PANEL * size;
  const char *weight = (const char *)layer->weight + offset;
  const char *next = weight + p->features * PANEL * size;
  const float *bias = layer->bias + p->panel * PANEL;
  float widened[SLICE * PANEL] __attribute__((aligned(64)));
  float copy[TILE_ROWS * PANEL] __attribute__((aligned(64)));
  int directly_half = 0;
  if (is_half) {
    directly_half = MULTIPLIES_FLOAT16 && tiles == 1;
    if (!directly_half) {
      widen(weight, widened, p->features * PANEL, FLOAT16);
      weight = (const char *)widened;
    }
  }
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t row = p->first + rows * i / tiles, end = p->first + rows * (i + 1) / tiles;
    const int count = (int)(end - row);
    float *to = out + row * out_stride + p->panel * PANEL;
    struct tile t = {x + row * x_stride + p->feature, to, to, x_stride, out_stride, out_stride};
    const int copies = width < PANEL || (p->is_start && accumulate);
    if (copies) { /* a panel that is not full must not touch what lies behind it */
      for (int r = 0; r < count; r++)
        for (int c = 0; c < width; c++) {
          const float before = p->is_start && !accumulate ? 0.0f : to[r * out_stride + c];
          copy[r * PANEL + c] = p->is_start ? before + bias[c] : before;
        }
      t.start = t.out = copy;
      t.start_stride = t.out_stride = PANEL;
    } else if (p->is_start) {
      t.start = bias;
      t.start_stride = 0;
    }
    if (directly_half) {
      multiply_float16(count, &t, weight, p->features);
    } else { /* the first tiles fetch the next slice; alone, the hardware does it better */
      const char *ahead = tiles > 1 && i < size / 2 ? next + i * p->features * 32 : NULL;
      multiply_float32(count, &t, weight, p->features, ahead);
    }
    if (copies)
      for (int r = 0; r < count; r++)
        memcpy(to + r * out_stride, copy + r * PANEL, sizeof(float) * (size_t)width);
  }
}

static int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

void linear_share(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                  float *out, int64_t out_stride, int accumulate, const void *scratch, int thread,
                  int num_threads) {
  if (layer->format == WEIGHT_INT8) {
    int8_share(layer, rows, out, out_stride, accumulate, scratch, thread, num_threads);
    return;
  }
  const int64_t panels = divided(layer->out_features, PANEL), features = layer->in_features;
  const int64_t from = panels * thread / num_threads, to = panels * (thread + 1) / num_threads;
  const int64_t longest = divided(features, divided(features, LONGEST));
  const int64_t slice = divided(longest, divided(longest, SLICE));
  const int64_t fitting = ROW_BYTES / (4 * longest), blocks = divided(rows, fitting);
  for (int64_t begin = 0; begin < features; begin += longest) {
    const int64_t stop = begin + longest < features ? begin + longest : features;
    for (int64_t block = 0; block < blocks; block++)
      for (int64_t panel = from; panel < to; panel++)
        for (int64_t feature = begin; feature < stop; feature += slice) {
          const struct piece p = {
              .panel = panel,
              .feature = feature,
              .first = rows * block / blocks,
              .last = rows * (block + 1) / blocks,
              .features = (int)(feature + slice < stop ? slice : stop - feature),
              .is_start = feature == 0,
          };
          piece_of_rows(layer, x, x_stride, out, out_stride, accumulate, &p);
        }
  }
}

size_t linear_scratch(const struct linear *layer, int64_t rows) {
  return layer->format == WEIGHT_INT8 ? int8_scratch(layer, rows) : 0;
}

void linear_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                    void *scratch, int thread, int num_threads) {
  if (layer->format == WEIGHT_INT8)
    int8_prepare(layer, x, x_stride, rows, scratch, thread, num_threads);
}

void linear(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows, float *out,
            int64_t out_stride, int accumulate, void *scratch, int num_threads) {
  const int is_prepared = rows * layer->in_features < ALONE; /* a barrier would cost more */
  if (is_prepared) linear_prepare(layer, x, x_stride, rows, scratch, 0, 1);
#pragma omp parallel num_threads(num_threads)
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    if (layer->format == WEIGHT_INT8 && !is_prepared) {
      linear_prepare(layer, x, x_stride, rows, scratch, thread, threads);
#pragma omp barrier
    }
    linear_share(layer, x, x_stride, rows, out, out_stride, accumulate, scratch, thread, threads);
  }
}
