/* Linear layers over int8 weights (linear.h): 8 bits per weight, 7 per activation.
 *
 * Weights have one scale per output feature. Each row of activations is quantised when it comes, GROUP
 * features at a time, by the largest value among them, so that one large value does not take the
 * others' bits. Codes are -63 to 63, kept as 1 to 127: then a byte times a byte, twice, fits the 16
 * bits in which AVX2 adds such pairs (2 * 127 * 127 < 2^15). What the offset of 64 adds lies ready
 * with the weights, as the start of every sum. A group's sum is exact; groups are added up in float32
 * in their order. So the bits of a result depend on its row and its weights alone.
 *
 * Scratch, with rows cut into tiles: scales [tile][group][rows of the tile], then
 * codes [tile][group][QUADS][rows of the tile][4].
 */
#include "linear.h"

#include "vectors.h"

#define TILE_ROWS 5
#define GROUP 64 /* input features that share a scale of activations */
#define QUADS (GROUP / 4)
#define AT_ONCE 8 /* groups of a panel that stay in the first-level cache for all rows */
#define ROW_BYTES (256 << 10) /* of rows that are gone through at once: they stay in a cache */
#define MOST_TILES 64
#define OFFSET 64
#define LARGEST 63.0f
#define SMALLEST 1e-36f /* LARGEST / SMALLEST is finite */
#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

struct group { /* of a panel */
  int32_t start[PANEL]; /* -OFFSET times the sum of its weights */
  int8_t weight[QUADS][PANEL][4];
};

static int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t groups_of(const struct linear *layer) { return divided(layer->in_features, GROUP); }

/* ---- activations ------------------------------------------------------------------------ */

struct tiles { /* all rows of a call, and where their scratch lies */
  int64_t rows, count, groups;
  float *scales;
  uint8_t *codes;
};

static struct tiles tiles_in(const struct linear *layer, int64_t rows, const void *scratch) {
  const int64_t groups = groups_of(layer);
  float *scales = (float *)scratch;
  uint8_t *codes = (uint8_t *)scratch + ALIGNED(sizeof(float) * (size_t)(rows * groups));
  return (struct tiles){rows, divided(rows, TILE_ROWS), groups, scales, codes};
}

static int64_t tile_start(const struct tiles *tiles, int64_t tile) {
  return tiles->rows * tile / tiles->count;
}

size_t int8_scratch(const struct linear *layer, int64_t rows) {
  const int64_t groups = groups_of(layer);
  return ALIGNED(sizeof(float) * (size_t)(rows * groups)) + (size_t)(rows * groups * GROUP);
}

/* Quantise `features` <= GROUP values to codes `stride` quads apart; returns their scale. Values of
 * which one is not finite get the scale NaN, so that whoever looks for such rows finds it; those too
 * small to be divided by become zeros. */
static float quantise(const float *x, int features, uint8_t *to, int64_t stride) {
  const float shift = 12582912.0f + OFFSET; /* 1.5 * 2^23: adding it rounds to an integer */
  float values[GROUP] = {0};
  memcpy(values, x, sizeof(float) * (size_t)features);
  vec top = splat(0.0f), odds = splat(0.0f);
  for (int k = 0; k < GROUP; k += LANES) {
    const vec value = load(values + k), size = (vec)((ivec)value & 0x7fffffff);
    top = pick(size > top, size, top);
    odds += value * splat(0.0f);
  }
  const float largest = max_lanes(top), odd = sum_lanes(odds); /* odd: 0, or NaN */
  const int is_usable = odd == 0 && largest > SMALLEST;
  const vec inverse = splat(is_usable ? LARGEST / largest : 0.0f);
  uint8_t codes[GROUP];
  for (int k = 0; k < GROUP; k += LANES) {
    const vec value = is_usable ? load(values + k) : splat(0.0f);
    const ivec code = (ivec)(value * inverse + splat(shift)); /* the low bits of the mantissa */
    for (int i = 0; i < LANES; i++) codes[k + i] = (uint8_t)code[i];
  }
  for (int q = 0; q < QUADS; q++) memcpy(to + q * stride * 4, codes + q * 4, 4);
  return is_usable ? largest / LARGEST : odd;
}

void int8_prepare(const struct linear *layer, const float *x, int64_t x_stride, int64_t rows,
                  void *scratch, struct team team) {
  const struct tiles tiles = tiles_in(layer, rows, scratch);
  const int64_t from = first_row(team, rows), to = end_row(team, rows);
  for (int64_t row = from; row < to; row++) {
    const int64_t tile = ((row + 1) * tiles.count - 1) / rows, first = tile_start(&tiles, tile);
    const int64_t height = tile_start(&tiles, tile + 1) - first;
    for (int64_t group = 0; group < tiles.groups; group++) {
      const int64_t left = layer->in_features - group * GROUP;
      const int64_t place = first * tiles.groups + group * height; /* in rows of one group */
      tiles.scales[place + row - first] =
          quantise(x + row * x_stride + group * GROUP, left < GROUP ? (int)left : GROUP,
                   tiles.codes + place * GROUP + (row - first) * 4, height);
    }
  }
}

/* ---- products --------------------------------------------------------------------------- */

/* sums[rows][PANEL] += scale * codes * weights, one group after the other; `rows` is a constant where
 * it is called. Fetches a quarter of as much from `ahead` on. */
INLINE void multiply(int rows, int groups, const uint8_t *codes, const struct group *group,
                     const float *scales, float *sums, const char *ahead) {
#ifdef __AVX2__
  const __m256i ones = _mm256_set1_epi16(1);
  vec total[TILE_ROWS][2];
  EACH(r, rows) EACH(c, 2) total[r][c] = load(sums + r * PANEL + c * LANES);
  for (int g = 0; g < groups; g++, group++, codes += rows * GROUP, scales += rows) {
    const __m256i *start = (const __m256i *)group->start, *w = (const __m256i *)group->weight;
    __m256i s[TILE_ROWS][2];
    EACH(r, rows) EACH(c, 2) s[r][c] = start[c];
    for (int q = 0; q < QUADS; q += 4, ahead += 64) {
      __builtin_prefetch(ahead, 0, 2);
      EACH(j, 4) EACH(r, rows) {
        int32_t quad;
        memcpy(&quad, codes + ((q + j) * rows + r) * 4, sizeof quad);
        const __m256i value = _mm256_set1_epi32(quad);
        EACH(c, 2) {
          const __m256i pairs = _mm256_maddubs_epi16(value, w[2 * (q + j) + c]);
          s[r][c] = _mm256_add_epi32(s[r][c], _mm256_madd_epi16(ones, pairs));
          IN_REGISTER(s[r][c]); /* else the sums are reordered, and do not fit the registers */
        }
      }
    }
    EACH(r, rows) EACH(c, 2)
      total[r][c] = fma8(_mm256_cvtepi32_ps(s[r][c]), splat(scales[r]), total[r][c]);
  }
  EACH(r, rows) EACH(c, 2) store(sums + r * PANEL + c * LANES, total[r][c]);
#else
  (void)ahead;
  for (int g = 0; g < groups; g++, group++, codes += rows * GROUP, scales += rows)
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < PANEL; c++) {
        int32_t sum = group->start[c];
        for (int q = 0; q < QUADS; q++)
          for (int i = 0; i < 4; i++)
            sum += (int32_t)codes[(q * rows + r) * 4 + i] * group->weight[q][c][i];
        sums[r * PANEL + c] += (float)sum * scales[r];
      }
#endif
}

static void multiply_rows(int rows, int groups, const uint8_t *codes, const struct group *group,
                          const float *scales, float *sums, const char *ahead) {
  switch (rows) {
    case 1: multiply(1, groups, codes, group, scales, sums, ahead); break;
    case 2: multiply(2, groups, codes, group, scales, sums, ahead); break;
    case 3: multiply(3, groups, codes, group, scales, sums, ahead); break;
    case 4: multiply(4, groups, codes, group, scales, sums, ahead); break;
    default: multiply(5, groups, codes, group, scales, sums, ahead);
  }
}

/* one panel of tiles [begin, end): out = sums * scales + bias, plus what is there if `accumulate` */
static void panel_of_tiles(const struct linear *layer, int64_t panel, const struct tiles *tiles,
                           int64_t begin, int64_t end, float *out, int64_t out_stride,
                           int accumulate) {
  const struct group *weight = (const struct group *)layer->weight + panel * tiles->groups;
  float sums[MOST_TILES * TILE_ROWS * PANEL] __attribute__((aligned(64)));
  const int64_t top = tile_start(tiles, begin), rows = tile_start(tiles, end) - top;
  memset(sums, 0, sizeof(float) * (size_t)(rows * PANEL));
  for (int64_t g = 0; g < tiles->groups; g += AT_ONCE) {
    const int groups = (int)(tiles->groups - g < AT_ONCE ? tiles->groups - g : AT_ONCE);
    for (int64_t tile = begin; tile < end; tile++) {
      const int64_t first = tile_start(tiles, tile), height = tile_start(tiles, tile + 1) - first;
      const int64_t place = first * tiles->groups + g * height, past = tile - begin;
      /* the first tiles fetch the next groups, a quarter each; the others what is there already */
      const char *ahead = (const char *)(weight + g);
      if (past < 4) ahead += groups * (int64_t)(sizeof(struct group) + sizeof(struct group) / 4 * past);
      multiply_rows((int)height, groups, tiles->codes + place * GROUP, weight + g,
                      tiles->scales + place, sums + (first - top) * PANEL, ahead);
    }
  }
  const float *scale = layer->scale + panel * PANEL, *bias = layer->bias + panel * PANEL;
  const int64_t left = layer->out_features - panel * PANEL;
  const int width = left < PANEL ? (int)left : PANEL;
  for (int64_t r = 0; r < rows; r++) {
    float *to = out + (top + r) * out_stride + panel * PANEL, results[PANEL] = {0};
    if (accumulate) memcpy(results, to, sizeof(float) * (size_t)width);
    for (int c = 0; c < PANEL; c += LANES) {
      const vec before = load(results + c) + load(bias + c);
      store(results + c, fma8(load(sums + r * PANEL + c), load(scale + c), before));
    }
    memcpy(to, results, sizeof(float) * (size_t)width);
  }
}

void int8_share(const struct linear *layer, int64_t rows, float *out, int64_t out_stride,
                int accumulate, const void *scratch, struct team team) {
  const struct tiles tiles = tiles_in(layer, rows, scratch);
  const int64_t panels = divided(layer->out_features, PANEL);
  const int64_t from = first_row(team, panels), to = end_row(team, panels);
  const int64_t fitting = ROW_BYTES / (TILE_ROWS * GROUP * tiles.groups) + 1;
  const int64_t at_once = fitting < MOST_TILES ? fitting : MOST_TILES;
  for (int64_t begin = 0; begin < tiles.count; begin += at_once) {
    const int64_t end = begin + at_once < tiles.count ? begin + at_once : tiles.count;
    for (int64_t panel = from; panel < to; panel++)
      panel_of_tiles(layer, panel, &tiles, begin, end, out, out_stride, accumulate);
  }
}
