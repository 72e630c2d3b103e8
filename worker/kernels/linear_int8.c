/* Linear layers over blocks of codes (linear.h) in integer arithmetic.
 *
 * Activations are quantised in each call, as finely as AVX2 can sum the products of a block:
 *   codes of 4 bits   times 8 bits: eight pairs of 2 * 15 * 127 fit into 16 bits. Each block of a
 *                     row has a scale of its own, so that one large value does not cost the others
 *                     their precision: the row's unit times 1 to 32767, by which the 16-bit sums
 *                     are multiplied while they are added up in 32 bits.
 *   codes of 8 bits   times 16 bits, which costs no more than times 8, in the row's unit.
 * A block's sum is exact. Step and offset are applied in float32, block by block, and the row's unit
 * at the end. So the bits of a result depend on its row and its weights alone.
 *
 * Scratch memory, with rows divided into tiles: units [rows], then [tile][block] of
 *   4 bits   scales [rows][2] int16, both the same; sums of the activations [rows] float32, for the
 *            offsets; [rows][8][4] int8
 *   8 bits   [rows][2][8][2] int16
 * Features q, q + 8, q + 16 and q + 24 of a block are adjacent; in 16 bits the first and the third,
 * and, 32 bytes later, the others.
 */
#include "linear.h"

#include <math.h>

#include "panels.h"
#include "vectors.h"
#include "weights.h"

#define TILE_ROWS 6
#define QUADS (BLOCK / 4)
#define AT_ONCE 12            /* most blocks of a panel that stay in the first-level cache */
#define ROW_BYTES (256 << 10) /* of rows processed at once: they stay in a cache */
#define MOST_TILES 64
#define MOST 32767.0f
#define SMALLEST 1e-30f /* smaller rows become zeros; above, a unit and its inverse are normal */

typedef int16_t short_vec __attribute__((vector_size(32)));
typedef uint16_t hvec __attribute__((vector_size(32)));

/* ---- activations ------------------------------------------------------------------------ */

struct tiles { /* all rows of a call, and their scratch memory */
  int64_t rows, count, blocks;
  int64_t size; /* bytes of one row's block */
  float *units; /* [rows] */
  char *codes;
};

static struct tiles tiles_in(const struct linear *layer, int64_t rows, const void *scratch) {
  const int64_t size = layer->format == WEIGHT_BLOCKS4 ? BLOCK + 8 : 2 * BLOCK;
  float *units = (float *)scratch;
  return (struct tiles){rows, divided(rows, TILE_ROWS), divided(layer->in_features, BLOCK), size,
                        units, (char *)(units + rows)};
}

static int64_t tile_start(const struct tiles *tiles, int64_t tile) {
  return tiles->rows * tile / tiles->count;
}

size_t int8_scratch(const struct linear *layer, int64_t rows) {
  const struct tiles tiles = tiles_in(layer, rows, NULL);
  return (size_t)rows * (sizeof(float) + (size_t)(tiles.blocks * tiles.size));
}

/* The largest absolute value; NaN if a value is not finite. */
static float largest_of(const float *x, int64_t features) {
  vec top = splat(0.0f), odds = splat(0.0f); /* odds: 0 or NaN */
  int64_t k = 0;
  for (; k + LANES <= features; k += LANES) {
    const vec value = load(x + k), size = (vec)((ivec)value & 0x7fffffff);
    top = pick(size > top, size, top);
    odds += value * splat(0.0f);
  }
  float largest = max_lanes(top), odd = sum_lanes(odds);
  for (; k < features; k++) {
    largest = x[k] > largest ? x[k] : -x[k] > largest ? -x[k] : largest;
    odd += x[k] * 0.0f;
  }
  return largest + odd;
}

/* Block `b` of a row, in place; the last one, padded with zeros, in `copy`. */
INLINE const float *block_of(const float *x, int64_t features, int64_t b, float *copy) {
  const int64_t left = features - b * BLOCK;
  if (left >= BLOCK) return x + b * BLOCK;
  memset(copy, 0, sizeof(float) * BLOCK);
  memcpy(copy, x + b * BLOCK, sizeof(float) * (size_t)left);
  return copy;
}

INLINE float largest_of_block(const float *x) {
  vec sizes[4];
  EACH(i, 4) sizes[i] = (vec)((ivec)load(x + i * LANES) & 0x7fffffff);
  return max_lanes(larger(larger(sizes[0], sizes[1]), larger(sizes[2], sizes[3])));
}

/* codes[4][LANES] = x * inverse, rounded to nearest */
INLINE void quantise(const float *x, float inverse, ivec *codes) {
  const vec shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
  EACH(i, 4) codes[i] = (ivec)(load(x + i * LANES) * splat(inverse) + shift) - (ivec)shift;
}

/* For each block the smallest multiple of `unit` of which 127 reach its `largest`; its inverse. */
INLINE void scale_blocks(vec largest, float unit, ivec *scales, vec *inverses) {
  const vec ratio = smaller(largest / splat(unit * 127.0f), splat(MOST));
  ivec scale = __builtin_convertvector(ratio, ivec);
  scale -= __builtin_convertvector(scale, vec) < ratio; /* "true" is -1 */
  *scales = scale;
  *inverses = (vec)((ivec)(splat(1.0f) / (splat(unit) * __builtin_convertvector(scale, vec))) &
                    (scale > 0));
}

/* The r-th row of a tile of `height` rows, with codes stored by block. Zeros if `unit` is 0. */
static void quantise_row8(const float *x, int64_t features, int64_t blocks, float unit, char *codes,
                          int64_t height, int64_t r) {
  float copy[BLOCK];
  for (int64_t first = 0; first < blocks; first += LANES) {
    const int count = blocks - first < LANES ? (int)(blocks - first) : LANES;
    ivec scales = {0};
    vec largest = splat(0.0f), inverses = splat(0.0f);
    for (int i = 0; i < count; i++)
      largest[i] = largest_of_block(block_of(x, features, first + i, copy));
    if (unit > 0.0f) scale_blocks(largest, unit, &scales, &inverses);
    for (int i = 0; i < count; i++, codes += height * (BLOCK + 8)) {
      ivec four[4];
      quantise(block_of(x, features, first + i, copy), inverses[i], four);
      const ivec total = four[0] + four[1] + four[2] + four[3];
      const float sum = (float)scales[i] * sum_lanes(__builtin_convertvector(total, vec));
      const int32_t twice = scales[i] | scales[i] << 16;
      const ivec bytes = (four[0] & 255) | (four[1] & 255) << 8 | (four[2] & 255) << 16 |
                         four[3] << 24;
      memcpy(codes + r * 4, &twice, 4);
      memcpy(codes + (height + r) * 4, &sum, 4);
      memcpy(codes + height * 8 + r * BLOCK, &bytes, BLOCK);
    }
  }
}

static void quantise_row16(const float *x, int64_t features, int64_t blocks, float inverse,
                           char *codes, int64_t height, int64_t r) {
  float copy[BLOCK];
  for (int64_t b = 0; b < blocks; b++, codes += height * 2 * BLOCK) {
    ivec four[4], pairs[2];
    quantise(block_of(x, features, b, copy), inverse, four);
    EACH(c, 2) pairs[c] = (four[c] & 0xffff) | four[c + 2] << 16;
    memcpy(codes + r * 2 * BLOCK, pairs, 2 * BLOCK);
  }
}

void int8_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                  void *scratch, struct team team) {
  const struct tiles tiles = tiles_in(layer, rows, scratch);
  const int64_t from = first_row(team, rows), to = end_row(team, rows);
  const int64_t features = layer->in_features;
  const int is_half = layer->format == WEIGHT_BLOCKS4;
  for (int64_t row = from; row < to; row++) {
    const int64_t tile = ((row + 1) * tiles.count - 1) / rows, first = tile_start(&tiles, tile);
    const int64_t height = tile_start(&tiles, tile + 1) - first, r = row - first;
    const float *values = x + row * x_stride, largest = largest_of(values, features);
    const int is_usable = largest > SMALLEST && largest < INFINITY;
    const float unit = is_usable ? largest / (is_half ? 127.0f * MOST : MOST) : 0.0f;
    char *codes = tiles.codes + first * tiles.blocks * tiles.size;
    tiles.units[row] = is_usable ? unit : largest * 0.0f; /* NaN for rows that are not finite */
    if (is_half)
      quantise_row8(values, features, tiles.blocks, unit, codes, height, r);
    else
      quantise_row16(values, features, tiles.blocks, is_usable ? MOST / largest : 0.0f, codes,
                     height, r);
  }
}

/* ---- products --------------------------------------------------------------------------- */

#ifdef __AVX2__
/* sums of two products of bytes; those of `a` are unsigned, of 4 bits */
INLINE hvec bytes_times(hvec a, ivec b) {
  return (hvec)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
/* sums of two products of 16 bits, signed */
INLINE ivec pairs_times(hvec a, ivec b) {
  return (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
#else
INLINE hvec bytes_times(hvec a, ivec b) {
  uint8_t weights[32];
  int8_t codes[32];
  hvec sums;
  memcpy(weights, &a, 32);
  memcpy(codes, &b, 32);
  for (int i = 0; i < 16; i++)
    sums[i] = (uint16_t)(weights[2 * i] * codes[2 * i] + weights[2 * i + 1] * codes[2 * i + 1]);
  return sums;
}
INLINE ivec pairs_times(hvec a, ivec b) {
  int16_t weights[16], codes[16];
  ivec sums;
  memcpy(weights, &a, 32);
  memcpy(codes, &b, 32);
  for (int i = 0; i < 8; i++)
    sums[i] = weights[2 * i] * codes[2 * i] + weights[2 * i + 1] * codes[2 * i + 1];
  return sums;
}
#endif

INLINE void fetch_block(int64_t format, const char *block) {
  EACH(i, (int)panel_bytes(format, BLOCK) / 64 + 1) __builtin_prefetch(block + i * 64, 0, 2);
}

INLINE ivec everywhere(const char *four_bytes) {
  int32_t value;
  memcpy(&value, four_bytes, sizeof value);
  return (ivec){value, value, value, value, value, value, value, value};
}

/* Step `s` of a block's codes, to be multiplied with four bytes of activations each. */
INLINE void load_codes(int is_half, const char *codes, int s, hvec w[2]) {
  EACH(c, 2) {
    hvec four;
    memcpy(&four, codes + (is_half ? s : c * QUADS + s % QUADS) * 32, sizeof four);
    if (is_half) w[c] = (c ? four >> 4 : four) & 0x0f0f;
    else w[c] = (hvec)((short_vec)(s < QUADS ? four << 8 : four) >> 8); /* sign-extended */
  }
}

struct ready { /* a decoded block of weights */
  vec d[2], m[2];
  hvec codes[2 * QUADS][2];
};

/* Decodes blocks, which pays off if several tiles use them. Prefetches as many from `ahead` on. */
INLINE void make_ready(int64_t format, int blocks, const char *stored, struct ready *to,
                       const char *ahead) {
  const int is_half = format == WEIGHT_BLOCKS4, steps = is_half ? QUADS : 2 * QUADS;
  for (int b = 0; b < blocks; b++, to++) {
    fetch_block(format, ahead);
    const char *codes = load_steps(format, stored, (float *)to->d, (float *)to->m);
    EACH(s, steps) load_codes(is_half, codes, s, to->codes[s]);
    stored += panel_bytes(format, BLOCK);
    ahead += panel_bytes(format, BLOCK);
  }
}

/* to[rows][PANEL] += blocks of activations times blocks of weights, block by block. The weights are
 * decoded if `is_ready`; else as many are prefetched from `ahead` on. The last four arguments are
 * constants at each call. */
INLINE void multiply(int blocks, const char *x, const void *weights, float *to, const char *ahead,
                     int64_t format, int is_ready, int rows) {
  const int is_half = format == WEIGHT_BLOCKS4, steps = is_half ? QUADS : 2 * QUADS;
  const char *stored = weights;
  const struct ready *ready = weights;
  vec total[TILE_ROWS][2], d[2], m[2];
  EACH(r, rows) EACH(c, 2) total[r][c] = load(to + r * PANEL + c * LANES);
  for (int b = 0; b < blocks; b++) {
    const char *scales = x, *offsets = x + 4 * rows, *codes = NULL;
    if (is_half) x += 8 * rows;
    if (!is_ready) {
      fetch_block(format, ahead);
      codes = load_steps(format, stored, (float *)d, (float *)m);
    }
    ivec sums[TILE_ROWS][2];
    EACH(r, rows) EACH(c, 2) sums[r][c] = (ivec){0};
    EACH(s, steps) {
      hvec w[2];
      if (is_ready) EACH(c, 2) w[c] = ready->codes[s][c];
      else load_codes(is_half, codes, s, w);
      IN_REGISTER(w[0]); /* else they are loaded again for every row */
      IN_REGISTER(w[1]);
      EACH(r, rows) {
        const ivec value = everywhere(x + (r * steps + s) * 4);
        EACH(c, 2) {
          if (is_half) sums[r][c] = (ivec)((hvec)sums[r][c] + bytes_times(w[c], value));
          else sums[r][c] += pairs_times(w[c], value);
          IN_REGISTER(sums[r][c]); /* else sums are reordered, and do not fit into registers */
        }
      }
    }
    EACH(r, rows) EACH(c, 2) {
      if (is_half) {
        const vec offset = (vec)everywhere(offsets + r * 4);
        total[r][c] = fma8(offset, is_ready ? ready->m[c] : m[c], total[r][c]);
        sums[r][c] = pairs_times((hvec)sums[r][c], everywhere(scales + r * 4));
      }
      const vec sum = __builtin_convertvector(sums[r][c], vec);
      total[r][c] = fma8(sum, is_ready ? ready->d[c] : d[c], total[r][c]);
    }
    x += rows * steps * 4;
    ready++;
    stored += panel_bytes(format, BLOCK);
    ahead += panel_bytes(format, BLOCK);
  }
  EACH(r, rows) EACH(c, 2) store(to + r * PANEL + c * LANES, total[r][c]);
}

#define MULTIPLY(name, ...)                                                                \
  static void name(int rows, int blocks, const char *x, const void *weights, float *to,    \
                   const char *ahead) {                                                    \
    switch (rows) {                                                                        \
      case 1: multiply(blocks, x, weights, to, ahead, __VA_ARGS__, 1); break;              \
      case 2: multiply(blocks, x, weights, to, ahead, __VA_ARGS__, 2); break;              \
      case 3: multiply(blocks, x, weights, to, ahead, __VA_ARGS__, 3); break;              \
      case 4: multiply(blocks, x, weights, to, ahead, __VA_ARGS__, 4); break;              \
      case 5: multiply(blocks, x, weights, to, ahead, __VA_ARGS__, 5); break;              \
      default: multiply(blocks, x, weights, to, ahead, __VA_ARGS__, 6);                    \
    }                                                                                      \
  }
MULTIPLY(multiply_stored4, WEIGHT_BLOCKS4, 0)
MULTIPLY(multiply_ready4, WEIGHT_BLOCKS4, 1)
MULTIPLY(multiply_stored8, WEIGHT_BLOCKS8, 0)
MULTIPLY(multiply_ready8, WEIGHT_BLOCKS8, 1)

/* out[columns] = sums * unit + bias, plus `out` if `accumulate` */
INLINE void finish_sums(const float *sums, float unit, const float *bias, float *out, int columns,
                        int accumulate) {
  float results[PANEL] = {0}, *to = columns == PANEL ? out : results;
  if (accumulate && to != out) memcpy(results, out, sizeof(float) * (size_t)columns);
  EACH(c, 2) {
    const vec before = load(bias + c * LANES);
    store(to + c * LANES, fma8(load(sums + c * LANES), splat(unit),
                               accumulate ? load(to + c * LANES) + before : before));
  }
  if (to != out) memcpy(out, results, sizeof(float) * (size_t)columns);
}

/* One panel of tiles [begin, end): out = products + bias, plus `out` if `accumulate`. */
static void compute_panel(struct panel panel, const struct tiles *tiles, int64_t begin, int64_t end,
                          float *out, int64_t out_stride, int accumulate) {
  const struct linear *layer = panel.layer;
  const int is_half = layer->format == WEIGHT_BLOCKS4, is_ready = end - begin > 1;
  const int64_t size = panel_bytes(layer->format, BLOCK);
  const char *stored = (const char *)layer->weight + panel.index * tiles->blocks * size;
  const int64_t top = tile_start(tiles, begin), rows = tile_start(tiles, end) - top;
  const int64_t parts = divided(tiles->blocks, AT_ONCE);
  struct ready ready[AT_ONCE];
  float sums[MOST_TILES * TILE_ROWS * PANEL] __attribute__((aligned(64)));
  memset(sums, 0, sizeof(float) * (size_t)(rows * PANEL));
  for (int64_t part = 0; part < parts; part++) {
    const int64_t b = tiles->blocks * part / parts;
    const int blocks = (int)(tiles->blocks * (part + 1) / parts - b);
    const char *ahead = stored + blocks * size;
    if (is_ready && is_half) make_ready(WEIGHT_BLOCKS4, blocks, stored, ready, ahead);
    if (is_ready && !is_half) make_ready(WEIGHT_BLOCKS8, blocks, stored, ready, ahead);
    for (int64_t tile = begin; tile < end; tile++) {
      const int64_t first = tile_start(tiles, tile), height = tile_start(tiles, tile + 1) - first;
      const char *x = tiles->codes + (first * tiles->blocks + b * height) * tiles->size;
      float *to = sums + (first - top) * PANEL;
      if (is_ready)
        (is_half ? multiply_ready4 : multiply_ready8)((int)height, blocks, x, ready, to, ahead);
      else
        (is_half ? multiply_stored4 : multiply_stored8)((int)height, blocks, x, stored, to, ahead);
    }
    stored += blocks * size;
  }
  for (int64_t r = 0; r < rows; r++)
    finish_sums(sums + r * PANEL, tiles->units[top + r], layer->bias + panel.index * PANEL,
                out + (top + r) * out_stride + panel.first_column, panel.columns, accumulate);
}

void int8_share(const struct linear *const *layers, int count, int64_t rows, float *out,
                int64_t out_stride, int accumulate, const void *scratch, struct team team) {
  const struct tiles tiles = tiles_in(*layers, rows, scratch);
  const int64_t fitting = ROW_BYTES / (TILE_ROWS * tiles.size * tiles.blocks) + 1;
  const int64_t at_once = fitting < MOST_TILES ? fitting : MOST_TILES;
  const int64_t blocks = divided(tiles.count, at_once), panels = count_panels(layers, count);
  struct pieces pieces = share_panels(team, blocks * panels, rows);
  int64_t piece;
  while ((piece = next_piece(team, &pieces)) >= 0) {
    const int64_t block = piece / panels;
    compute_panel(panel_of(layers, piece % panels), &tiles, tiles.count * block / blocks,
                  tiles.count * (block + 1) / blocks, out, out_stride, accumulate);
  }
}
