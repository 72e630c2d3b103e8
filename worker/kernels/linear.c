/* Linear layers over packed weights, in float32 arithmetic, whatever the storage of the weights.
 *
 * Threads divide the panels (PANEL output features; panels.h). Each thread copies the rows into the
 * order in which they are read, as many as fit into a second-level cache, and goes through its
 * panels. A slice of a panel's input features at a time is widened to float32, if it is stored
 * narrower, and stays in the first-level cache for all rows: tiles of up to TILE_ROWS rows are
 * multiplied with it, their sums in registers, while the next slice is prefetched.
 *
 * A result is one chain of fused multiply-adds, starting from the bias, over the input features in
 * order; between slices the chain's float32 value is stored and loaded again. So its bits depend on
 * its row and its weights alone: not on the other rows, the tile's shape, or the number of threads.
 */
#include "linear.h"

#include "panels.h"
#include "vectors.h"
#include "weights.h"

#define TILE_ROWS 6
#define SLICE 192             /* input features; x PANEL floats are a third of a first-level cache */
#define LONGEST 1024          /* input features processed at once */
#define ROW_FLOATS (64 << 10) /* of rows processed at once */
#define MOST_ROWS 128

/* sums[rows][PANEL] += x[features][rows] * weight[features][PANEL], one feature after the other.
 * `rows` is a constant at each call. Prefetches a line of `ahead` for every four features. */
INLINE void multiply(int rows, const float *x, const vec *weight, int features, float *to,
                     const char *ahead) {
  vec sums[TILE_ROWS][2];
  EACH(r, rows) EACH(c, 2) sums[r][c] = load(to + r * PANEL + c * LANES);
  int k = 0;
  for (; k + 4 <= features; k += 4) {
    __builtin_prefetch(ahead + k * 16, 0, 2);
#pragma GCC unroll 4
    for (int j = k; j < k + 4; j++) {
      vec w[2] = {weight[2 * j], weight[2 * j + 1]};
      IN_REGISTER(w[0]); /* else they are loaded again for every row */
      IN_REGISTER(w[1]);
      EACH(r, rows) {
        const vec value = splat(x[j * rows + r]);
        sums[r][0] = fma8(value, w[0], sums[r][0]);
        sums[r][1] = fma8(value, w[1], sums[r][1]);
      }
    }
  }
  for (; k < features; k++) {
    EACH(r, rows) {
      const vec value = splat(x[k * rows + r]);
      sums[r][0] = fma8(value, weight[2 * k], sums[r][0]);
      sums[r][1] = fma8(value, weight[2 * k + 1], sums[r][1]);
    }
  }
  EACH(r, rows) EACH(c, 2) store(to + r * PANEL + c * LANES, sums[r][c]);
}

NOINLINE void multiply_tile(int rows, const float *x, const float *weight, int features, float *to,
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

/* The length of about equal parts of at most `most` features, a multiple of BLOCK. */
static int64_t cut(int64_t features, int64_t most) {
  return divided(divided(features, divided(features, most)), BLOCK) * BLOCK;
}

/* Some rows, divided into `tiles` of about the same height. */
struct rows {
  int64_t count, tiles;
};

static int64_t tile_start(struct rows rows, int64_t tile) { return rows.count * tile / rows.tiles; }

INLINE void pack_tile(int rows, const float *x, int64_t x_stride, int64_t features, float *packed) {
  for (int64_t k = 0; k < features; k++) EACH(r, rows) packed[k * rows + r] = x[r * x_stride + k];
}

/* x[rows][features] -> [tiles][features][rows of the tile] */
static void pack_rows(const float *x, int64_t x_stride, struct rows rows, int64_t features,
                      float *packed) {
  for (int64_t tile = 0; tile < rows.tiles; tile++) {
    const int64_t row = tile_start(rows, tile), count = tile_start(rows, tile + 1) - row;
    const float *from = x + row * x_stride;
    switch (count) {
      case 1: pack_tile(1, from, x_stride, features, packed); break;
      case 2: pack_tile(2, from, x_stride, features, packed); break;
      case 3: pack_tile(3, from, x_stride, features, packed); break;
      case 4: pack_tile(4, from, x_stride, features, packed); break;
      case 5: pack_tile(5, from, x_stride, features, packed); break;
      default: pack_tile(6, from, x_stride, features, packed);
    }
    packed += features * count;
  }
}

/* sums[rows][PANEL] += packed rows * a panel's `features` from `stored` on; `next` is read next. */
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
      if (tile + 1 >= size / 16) ahead = (const char *)weight; /* the next slice is fetched */
    }
  }
}

/* sums[rows][PANEL] = `out` if `is_added`, else 0, plus `bias` unless NULL */
static void begin_sums(float *sums, int64_t rows, const float *out, int64_t out_stride,
                       int columns, int is_added, const float *bias) {
  const vec none = splat(0.0f);
  for (int64_t r = 0; r < rows; r++, sums += PANEL, out += out_stride) {
    if (!is_added || columns < PANEL) EACH(c, 2) store(sums + c * LANES, none);
    if (is_added && columns < PANEL) memcpy(sums, out, sizeof(float) * (size_t)columns);
    const float *before = is_added && columns == PANEL ? out : sums;
    EACH(c, 2) {
      const vec value = load(before + c * LANES);
      store(sums + c * LANES, bias ? value + load(bias + c * LANES) : value);
    }
  }
}

static void end_sums(const float *sums, int64_t rows, float *out, int64_t out_stride, int columns) {
  for (int64_t r = 0; r < rows; r++, sums += PANEL, out += out_stride)
    if (columns == PANEL) EACH(c, 2) store(out + c * LANES, load(sums + c * LANES));
    else memcpy(out, sums, sizeof(float) * (size_t)columns);
}

/* Some consecutive rows, and a range of their features. */
struct block {
  struct rows rows;
  const float *packed;
  int64_t begin, width;
};

/* One panel; the block's results go to `out`. */
static void compute_panel(struct panel panel, const struct block *block, float *out,
                          int64_t out_stride, int accumulate) {
  const struct linear *layer = panel.layer;
  const int64_t size = panel_bytes(layer->format, 1), stride = layer->in_features * size;
  const char *stored = (const char *)layer->weight + panel.index * stride + block->begin * size;
  const int is_start = block->begin == 0;
  float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
  out += panel.first_column;
  begin_sums(sums, block->rows.count, out, out_stride, panel.columns, !is_start || accumulate,
             is_start ? layer->bias + panel.index * PANEL : NULL);
  multiply_panel(layer->format, stored, stored + stride, block->rows, block->packed, block->width,
                 sums);
  end_sums(sums, block->rows.count, out, out_stride, panel.columns);
}

void linear_share(const struct linear *const *layers, int count, const float *x, int64_t x_stride,
                  int64_t rows, float *out, int64_t out_stride, int accumulate,
                  const void *scratch, struct team team) {
  if (preparation_of(*layers) != AS_IT_IS) {
    int8_share(layers, count, rows, out, out_stride, accumulate, scratch, team);
    return;
  }
  const int64_t features = layers[0]->in_features, longest = cut(features, LONGEST);
  const int64_t fitting = ROW_FLOATS / longest < MOST_ROWS ? ROW_FLOATS / longest : MOST_ROWS;
  const int64_t blocks = divided(rows, fitting), panels = count_panels(layers, count);
  float packed[ROW_FLOATS] __attribute__((aligned(64)));
  for (int64_t begin = 0; begin < features; begin += longest) {
    if (begin) team_barrier(team); /* another thread may have a panel's next range of features */
    const int64_t width = begin + longest < features ? longest : features - begin;
    struct block block = {{0, 0}, packed, begin, width};
    struct pieces pieces = share_panels(team, blocks * panels, rows);
    int64_t piece, first = 0, of_block = -1;
    while ((piece = next_piece(team, &pieces)) >= 0) {
      if (piece / panels != of_block) {
        of_block = piece / panels;
        first = rows * of_block / blocks;
        const int64_t height = rows * (of_block + 1) / blocks - first;
        block.rows = (struct rows){height, divided(height, TILE_ROWS)};
        pack_rows(x + first * x_stride + begin, x_stride, block.rows, width, packed);
      }
      compute_panel(panel_of(layers, piece % panels), &block, out + first * out_stride, out_stride,
                    accumulate);
    }
  }
}

enum preparation preparation_of(const struct linear *layer) {
  if (!layer->is_int8) return AS_IT_IS;
  return layer->format == WEIGHT_BLOCKS4 ? AS_8_BITS : AS_16_BITS;
}

size_t linear_scratch(const struct linear *layer, int64_t rows) {
  return layer->is_int8 ? int8_scratch(layer, rows) : 0;
}

void linear_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                    void *scratch, struct team team) {
  if (layer->is_int8) int8_prepare(layer, x, x_stride, rows, scratch, team);
}

void linear(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows, float *out,
            int64_t out_stride, int accumulate, void *scratch, int num_threads) {
  struct barrier barrier = {0};
#pragma omp parallel num_threads(num_threads)
  {
    const struct team team = team_in(&barrier);
    linear_prepare(layer, x, x_stride, rows, scratch, team);
    if (preparation_of(layer) != AS_IT_IS) team_barrier(team);
    linear_share(&layer, 1, x, x_stride, rows, out, out_stride, accumulate, scratch, team);
  }
}
