/* Linear layers over weights packed once, in float32 arithmetic, whatever the weights are stored as.
 *
 * Each thread computes its own run of panels (PANEL output features) for all rows. The rows are
 * copied once into the order in which they are read, as many of them as a second-level cache holds.
 * Of a panel a slice of its input features at a time is widened to float32, if it is stored as less,
 * and stays in the first-level cache for all rows: tiles of up to TILE_ROWS rows are multiplied with
 * it, their sums in registers, while the next slice is fetched.
 *
 * A result is one chain of fused multiply-adds, from the bias on, over the input features in their
 * order; a cut stores the chain's float32 value and takes it up again. So its bits depend on its row
 * and its weights alone: not on the other rows, the tile's shape, or the number of threads.
 */
#include "linear.h"

#include "threads.h"
#include "vectors.h"
#include "weights.h"

#define TILE_ROWS 6
#define SLICE 192             /* input features; x PANEL floats are a third of a first-level cache */
#define LONGEST 1024          /* input features that are gone through at once */
#define ROW_FLOATS (64 << 10) /* of rows that are gone through at once */
#define MOST_ROWS 128
#define ALONE (1 << 17)       /* activations that one thread prepares before the others start */

/* sums[rows][PANEL] += x[features][rows] * weight[features][PANEL], one feature after the other.
 * `rows` is a constant where it is called. Fetches a line of `ahead` for every four features. */
INLINE void multiply(int rows, const float *x, const vec *weight, int features, float *to,
                     const char *ahead) {
  vec sums[TILE_ROWS][2];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < 2; c++) sums[r][c] = load(to + r * PANEL + c * LANES);
  int k = 0;
  for (; k + 4 <= features; k += 4) {
    __builtin_prefetch(ahead + k * 16, 0, 2);
#pragma GCC unroll 4
    for (int j = k; j < k + 4; j++) {
      vec w[2] = {weight[2 * j], weight[2 * j + 1]};
      IN_REGISTER(w[0]); /* else they are read from memory again for every row */
      IN_REGISTER(w[1]);
      for (int r = 0; r < rows; r++) {
        const vec value = splat(x[j * rows + r]);
        sums[r][0] = fma8(value, w[0], sums[r][0]);
        sums[r][1] = fma8(value, w[1], sums[r][1]);
      }
    }
  }
  for (; k < features; k++)
    for (int r = 0; r < rows; r++) {
      const vec value = splat(x[k * rows + r]);
      sums[r][0] = fma8(value, weight[2 * k], sums[r][0]);
      sums[r][1] = fma8(value, weight[2 * k + 1], sums[r][1]);
    }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < 2; c++) store(to + r * PANEL + c * LANES, sums[r][c]);
}

static void multiply_tile(int rows, const float *x, const float *weight, int features, float *to,
                          const char *ahead) {
  const vec *w = (const vec *)weight;
  switch (rows) {
    case 1: multiply(1, x, w, features, to, ahead); break;
    case 2: multiply(2, x, w, features, to, ahead); break;
    case 3: multiply(3, x, w, features, to, ahead); break;
    case 4: multiply(4, x, w, features, to, ahead); break;
    case 5: multiply(5, x, w, features, to, ahead); break;
    default: multiply(6, x, w, features, to, ahead);
  }
}

/* ---- a thread's share ------------------------------------------------------------------- */

static int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* at most `most`, all about as long, a multiple of BLOCK */
static int64_t cut(int64_t features, int64_t most) {
  return divided(divided(features, divided(features, most)), BLOCK) * BLOCK;
}

/* some rows, cut into `tiles` of about the same height */
struct rows {
  int64_t count, tiles;
};

static int64_t tile_start(struct rows rows, int64_t tile) { return rows.count * tile / rows.tiles; }

/* x[rows][features] -> [tiles][features][rows of the tile] */
static void pack_rows(const float *x, int64_t x_stride, struct rows rows, int64_t features,
                      float *packed) {
  for (int64_t tile = 0; tile < rows.tiles; tile++) {
    const int64_t row = tile_start(rows, tile), count = tile_start(rows, tile + 1) - row;
    for (int64_t r = 0; r < count; r++)
      for (int64_t k = 0; k < features; k++) packed[k * count + r] = x[(row + r) * x_stride + k];
    packed += features * count;
  }
}

/* sums[rows][PANEL] += packed rows * a panel's `features` from `stored` on; `next` is what follows */
static void multiply_panel(int64_t format, const char *stored, const char *next, struct rows rows,
                           const float *packed, int64_t features, float *sums) {
  float widened[SLICE * PANEL] __attribute__((aligned(64)));
  const int64_t slice = cut(features, SLICE), size = panel_bytes(format, 1);
  for (int64_t k = 0; k < features; k += slice) {
    const int64_t width = k + slice < features ? slice : features - k;
    const float *weight = widen_panel(format, stored + k * size, (int)width, widened);
    const char *ahead = k + slice < features ? stored + (k + slice) * size : next;
    for (int64_t tile = 0; tile < rows.tiles; tile++) {
      const int64_t row = tile_start(rows, tile), count = tile_start(rows, tile + 1) - row;
      multiply_tile((int)count, packed + row * features + k * count, weight, (int)width,
                    sums + row * PANEL, ahead);
      if (ahead != (const char *)weight) ahead += width * 16;
      if (tile + 1 >= size / 16) ahead = (const char *)weight; /* the next slice has been fetched */
    }
  }
}

void linear_share(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                  float *out, int64_t out_stride, int accumulate, const void *scratch, int thread,
                  int num_threads) {
  if (layer->is_int8) {
    int8_share(layer, rows, out, out_stride, accumulate, scratch, thread, num_threads);
    return;
  }
  const int64_t panels = divided(layer->out_features, PANEL), features = layer->in_features;
  const int64_t from = panels * thread / num_threads, to = panels * (thread + 1) / num_threads;
  const int64_t size = panel_bytes(layer->format, 1), longest = cut(features, LONGEST);
  const int64_t fitting = ROW_FLOATS / longest < MOST_ROWS ? ROW_FLOATS / longest : MOST_ROWS;
  const int64_t blocks = divided(rows, fitting);
  float packed[ROW_FLOATS] __attribute__((aligned(64)));
  float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
  for (int64_t begin = 0; begin < features; begin += longest) {
    const int64_t width = begin + longest < features ? longest : features - begin;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
      const struct rows here = {count, divided(count, TILE_ROWS)};
      pack_rows(x + first * x_stride + begin, x_stride, here, width, packed);
      for (int64_t panel = from; panel < to; panel++) {
        const char *stored = (const char *)layer->weight + (panel * features + begin) * size;
        float *place = out + first * out_stride + panel * PANEL;
        const int64_t left = layer->out_features - panel * PANEL;
        const int columns = left < PANEL ? (int)left : PANEL;
        const float *bias = layer->bias + panel * PANEL;
        const int is_start = begin == 0, is_added = !is_start || accumulate;
        for (int64_t r = 0; r < count; r++)
          for (int c = 0; c < columns; c++) {
            const float before = is_added ? place[r * out_stride + c] : 0.0f;
            sums[r * PANEL + c] = is_start ? before + bias[c] : before;
          }
        multiply_panel(layer->format, stored, stored + features * size, here, packed, width, sums);
        for (int64_t r = 0; r < count; r++)
          memcpy(place + r * out_stride, sums + r * PANEL, sizeof(float) * (size_t)columns);
      }
    }
  }
}

size_t linear_scratch(const struct linear *layer, int64_t rows) {
  return layer->is_int8 ? int8_scratch(layer, rows) : 0;
}

void linear_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                    void *scratch, int thread, int num_threads) {
  if (layer->is_int8)
    int8_prepare(layer, x, x_stride, rows, scratch, thread, num_threads);
}

void linear(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows, float *out,
            int64_t out_stride, int accumulate, void *scratch, int num_threads) {
  const int is_prepared = rows * layer->in_features < ALONE; /* a barrier would cost more */
  if (is_prepared) linear_prepare(layer, x, x_stride, rows, scratch, 0, 1);
#pragma omp parallel num_threads(num_threads)
  {
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    if (layer->is_int8 && !is_prepared) {
      linear_prepare(layer, x, x_stride, rows, scratch, thread, threads);
#pragma omp barrier
    }
    linear_share(layer, x, x_stride, rows, out, out_stride, accumulate, scratch, thread, threads);
  }
}
