/* Linear layers over blocks of codes (linear.h) in integer arithmetic.
 *
 * Each row of activations is quantised when it comes, BLOCK features at a time, by the largest value
 * among them, so that one large value does not take the others' bits: to 8 bits for codes of 4 bits,
 * to 16 for codes of 8. Either way AVX2 can add up a block's products without overflow:
 *   4 bits   bytes times bytes, added up in 16 bits: BLOCK / 2 pairs of 15 * 127 are below 2^15
 *   8 bits   as 16 bits times 16 bits, added up in 32
 * and both cost as many instructions per bit of weight. A block's sum is exact; the scale of its
 * activations, its step and its offset follow in float32, block after block. So the bits of a result
 * depend on its row and its weights alone.
 *
 * Scratch, with rows cut into tiles: [tile][block] scales[rows], sums[rows] of the quantised
 * activations, float32, then their codes [rows][8][4] int8, or [rows][2][8][2] int16.
 */
#include "linear.h"

#include <math.h>

#include "vectors.h"
#include "weights.h"

#define TILE_ROWS 6
#define QUADS (BLOCK / 4)
#define AT_ONCE 12            /* blocks of a panel that stay in the first-level cache for all rows */
#define ROW_BYTES (256 << 10) /* of rows that are gone through at once: they stay in a cache */
#define MOST_TILES 64
#define SMALLEST 1e-30f

typedef int16_t swvec __attribute__((vector_size(32)));
typedef uint16_t hvec __attribute__((vector_size(32)));

static int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- activations ------------------------------------------------------------------------ */

struct tiles { /* all rows of a call, and where their scratch lies */
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

static int64_t first_row(const struct tiles *tiles, int64_t tile) {
  return tiles->rows * tile / tiles->count;
}

size_t int8_scratch(const struct linear *layer, int64_t rows) {
  const struct tiles tiles = tiles_in(layer, rows, NULL);
  return (size_t)rows * (sizeof(float) + (size_t)(tiles.blocks * tiles.size));
}

/* The largest size among them; NaN if one is not finite. */
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

/* codes[4][LANES] = x * inverse, to nearest */
INLINE void quantise(const float *x, int features, float inverse, ivec *codes) {
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  float values[BLOCK] = {0};
  memcpy(values, x, sizeof(float) * (size_t)features);
  EACH(i, 4) codes[i] = (ivec)(load(values + i * LANES) * splat(inverse) + splat(shift)) - (ivec)splat(shift);
}

void int8_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                  void *scratch, int thread, int num_threads) {
  const struct tiles tiles = tiles_in(layer, rows, scratch);
  const int64_t from = rows * thread / num_threads, to = rows * (thread + 1) / num_threads;
  const int is_half = layer->format == WEIGHT_BLOCKS4;
  for (int64_t row = from; row < to; row++) {
    const int64_t tile = ((row + 1) * tiles.count - 1) / rows, first = first_row(&tiles, tile);
    const int64_t height = first_row(&tiles, tile + 1) - first, r = row - first;
    const float *values = x + row * x_stride, largest = largest_of(values, layer->in_features);
    const int is_usable = largest > SMALLEST && largest < INFINITY;
    const float most = is_half ? 127.0f * 32767.0f : 32767.0f, unit = largest / most;
    tiles.units[row] = is_usable ? unit : largest * 0.0f;
    for (int64_t b = 0; b < tiles.blocks; b++) {
      const int64_t left = layer->in_features - b * BLOCK;
      const int features = left < BLOCK ? (int)left : BLOCK;
      char *block = tiles.codes + (first * tiles.blocks + b * height) * tiles.size;
      ivec codes[4];
      if (is_half) {
        const float here = is_usable ? largest_of(values + b * BLOCK, features) : 0.0f;
        const float ratio = here / (unit * 127.0f);
        int32_t scale = (int32_t)ratio; 
        scale += (float)scale < ratio;
        scale = scale > 32767 ? 32767 : scale;
        quantise(values + b * BLOCK, features, scale ? 1.0f / (unit * (float)scale) : 0.0f, codes);
        const int32_t twice = scale | scale << 16;
        const ivec total = codes[0] + codes[1] + codes[2] + codes[3];
        const float sum = (float)scale * sum_lanes(__builtin_convertvector(total, vec));
        const ivec quads = (codes[0] & 255) | (codes[1] & 255) << 8 | (codes[2] & 255) << 16 | codes[3] << 24;
        memcpy(block + r * 4, &twice, 4);
        memcpy(block + (height + r) * 4, &sum, 4);
        memcpy(block + height * 8 + r * 32, &quads, 32);
      } else {
        quantise(values + b * BLOCK, features, is_usable ? most / largest : 0.0f, codes);
        ivec pairs[2];
        EACH(c, 2) pairs[c] = (codes[c] & 0xffff) | codes[c + 2] << 16;
        memcpy(block + r * 64, pairs, 64);
      }
    }
  }
}

/* ---- products --------------------------------------------------------------------------- */

#ifdef __AVX2__
/* sums of two products of bytes, the first ones unsigned; of four bits, so none saturates */
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

INLINE ivec everywhere(const char *four_bytes) {
  int32_t value;
  memcpy(&value, four_bytes, sizeof value);
  return (ivec){value, value, value, value, value, value, value, value};
}

struct widened { /* a block of weights: what is multiplied with four bytes of activations each */
  vec d[2], m[2];
  hvec codes[2 * QUADS][2];
};

INLINE void widen_codes(int is_half, int blocks, const char *stored, struct widened *to,
                        const char *ahead) {
  for (int b = 0; b < blocks; b++, to++) {
    float d[PANEL], m[PANEL];
    stored = load_steps(is_half ? WEIGHT_BLOCKS4 : WEIGHT_BLOCKS8, stored, d, m);
    EACH(c, 2) to->d[c] = load(d + c * LANES), to->m[c] = load(m + c * LANES);
    const int lines = is_half ? 5 : 9;
    EACH(i, lines) __builtin_prefetch(ahead + 64 * i, 0, 2);
    ahead += is_half ? 320 : 544;
    EACH(q, QUADS) {
      hvec both[2];
      if (is_half) {
        memcpy(both, stored + q * 32, 32);
        to->codes[q][0] = both[0] & 0x0f0f;
        to->codes[q][1] = (both[0] >> 4) & 0x0f0f;
      } else {
        EACH(c, 2) {
          memcpy(&both[c], stored + (c * QUADS + q) * 32, 32);
          to->codes[q][c] = (hvec)((swvec)(both[c] << 8) >> 8);
          to->codes[QUADS + q][c] = (hvec)((swvec)both[c] >> 8);
        }
      }
    }
    stored += is_half ? 256 : 512;
  }
}

/* to[rows][PANEL] += blocks of activations times blocks of weights, one block after the other;
 * `rows` and `is_half` (4 bits a weight) are constants where it is called. */
INLINE void multiply(int is_half, int rows, int blocks, const char *x, const struct widened *weight,
                     float *to) {
  const int steps = is_half ? QUADS : 2 * QUADS;
  vec total[TILE_ROWS][2];
  EACH(r, rows) EACH(c, 2) total[r][c] = load(to + r * PANEL + c * LANES);
  for (int b = 0; b < blocks; b++, weight++) {
    const char *scales = x;
    if (is_half) x += 8 * rows;
    ivec sums[TILE_ROWS][2];
    EACH(r, rows) EACH(c, 2) sums[r][c] = (ivec){0};
    EACH(s, steps) {
      hvec w[2] = {weight->codes[s][0], weight->codes[s][1]};
      IN_REGISTER(w[0]); /* else they are read again for every row */
      IN_REGISTER(w[1]);
      EACH(r, rows) {
        const ivec value = everywhere(x + (r * steps + s) * 4);
        EACH(c, 2) {
          if (is_half)
            sums[r][c] = (ivec)((hvec)sums[r][c] + bytes_times(w[c], value));
          else
            sums[r][c] += pairs_times(w[c], value);
          IN_REGISTER(sums[r][c]);
        }
      }
    }
    EACH(r, rows) {
      EACH(c, 2) {
        if (is_half) {
          const vec offset = (vec)everywhere(scales + (rows + r) * 4);
          total[r][c] = fma8(offset, weight->m[c], total[r][c]);
          sums[r][c] = pairs_times((hvec)sums[r][c], everywhere(scales + r * 4));
        }
        total[r][c] = fma8(__builtin_convertvector(sums[r][c], vec), weight->d[c], total[r][c]);
      }
    }
    x += rows * BLOCK * (is_half ? 1 : 2);
  }
  EACH(r, rows) EACH(c, 2) store(to + r * PANEL + c * LANES, total[r][c]);
}

#define EACH_HEIGHT(is_half)                                            \
  switch (rows) {                                                      \
    case 1: multiply(is_half, 1, blocks, x, weight, to); break;  \
    case 2: multiply(is_half, 2, blocks, x, weight, to); break;  \
    case 3: multiply(is_half, 3, blocks, x, weight, to); break;  \
    case 4: multiply(is_half, 4, blocks, x, weight, to); break;  \
    case 5: multiply(is_half, 5, blocks, x, weight, to); break;  \
    default: multiply(is_half, 6, blocks, x, weight, to);        \
  }

static void multiply4(int rows, int blocks, const char *x, const struct widened *weight, float *to) {
  EACH_HEIGHT(1)
}

static void multiply8(int rows, int blocks, const char *x, const struct widened *weight, float *to) {
  EACH_HEIGHT(0)
}

/* one panel of tiles [begin, end): out = products + bias, plus what is there if `accumulate` */
static void panel_of_tiles(const struct linear *layer, int64_t panel, const struct tiles *tiles,
                           int64_t begin, int64_t end, float *out, int64_t out_stride,
                           int accumulate) {
  const int64_t size = panel_bytes(layer->format, BLOCK);
  const char *weight = (const char *)layer->weight + panel * tiles->blocks * size;
  float sums[MOST_TILES * TILE_ROWS * PANEL] __attribute__((aligned(64)));
  const int64_t top = first_row(tiles, begin), rows = first_row(tiles, end) - top;
  memset(sums, 0, sizeof(float) * (size_t)(rows * PANEL));
  struct widened widened[AT_ONCE];
  for (int64_t b = 0; b < tiles->blocks; b += AT_ONCE) {
    const int blocks = (int)(tiles->blocks - b < AT_ONCE ? tiles->blocks - b : AT_ONCE);
    const char *stored = weight + b * size;
    const char *ahead = stored + blocks * size;
    if (layer->format == WEIGHT_BLOCKS4) widen_codes(1, blocks, stored, widened, ahead);
    else widen_codes(0, blocks, stored, widened, ahead);
    for (int64_t tile = begin; tile < end; tile++) {
      const int64_t first = first_row(tiles, tile), height = first_row(tiles, tile + 1) - first;
      const char *x = tiles->codes + (first * tiles->blocks + b * height) * tiles->size;
      (layer->format == WEIGHT_BLOCKS4 ? multiply4 : multiply8)(
          (int)height, blocks, x, widened, sums + (first - top) * PANEL);
    }
  }
  const float *bias = layer->bias + panel * PANEL;
  const int64_t left = layer->out_features - panel * PANEL;
  const int width = left < PANEL ? (int)left : PANEL;
  for (int64_t r = 0; r < rows; r++) {
    float *to = out + (top + r) * out_stride + panel * PANEL, results[PANEL] = {0};
    if (accumulate) memcpy(results, to, sizeof(float) * (size_t)width);
    for (int c = 0; c < PANEL; c++) results[c] = sums[r * PANEL + c] * tiles->units[top + r] + (results[c] + bias[c]);
    memcpy(to, results, sizeof(float) * (size_t)width);
  }
}

void int8_share(const struct linear *layer, int64_t rows, float *out, int64_t out_stride,
                int accumulate, const void *scratch, int thread, int num_threads) {
  const struct tiles tiles = tiles_in(layer, rows, scratch);
  const int64_t panels = divided(layer->out_features, PANEL);
  const int64_t from = panels * thread / num_threads, to = panels * (thread + 1) / num_threads;
  const int64_t fitting = ROW_BYTES / (TILE_ROWS * tiles.size * tiles.blocks) + 1;
  const int64_t at_once = fitting < MOST_TILES ? fitting : MOST_TILES;
  for (int64_t begin = 0; begin < tiles.count; begin += at_once) {
    const int64_t end = begin + at_once < tiles.count ? begin + at_once : tiles.count;
    for (int64_t panel = from; panel < to; panel++)
      panel_of_tiles(layer, panel, &tiles, begin, end, out, out_stride, accumulate);
  }
}
