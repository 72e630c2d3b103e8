/* Paged attention on the CPU: the two inner loops of worker/attention/cpu.py.
 *
 * write_kv copies new keys and values into their slots of the pool; attend computes causal
 * attention of ragged queries over the pages that the block tables name. All strides are in
 * elements. K and V may be float32, float16 or bfloat16; arithmetic is float32.
 *
 * The result for a token depends on its query, its position and its keys alone, to the last bit,
 * never on what else is in the batch or on how its prompt was cut into chunks. Three things make it
 * so: keys are taken in blocks of KEYS by absolute position; every dot product, maximum and sum has
 * one fixed order of operations whatever the tile's shape (vectors are written out here, so no
 * compiler reassociates); and what a tile computes beyond a token's own keys has weight exactly 0.
 */
#include "vectors.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#define KEYS 64      /* keys per block of the online softmax */
#define TILE_ROWS 24 /* (query token, grouped head) pairs that share one pass over the keys */
#define NEVER_SEEN -1e30f /* a row maximum before the first visible key: finite, so no inf - inf */

/* ---- tiles ------------------------------------------------------------------------------ */

/* scores[r][0..3] = q[r] . k[0..3] for `rows` rows; `rows` is a constant where it is called */
INLINE void dot_tile(int rows, const float *q, int dim, const float *const *k, float *scores) {
  vec sums[3][4] = {{{0}}};
  for (int d = 0; d < dim; d += LANES)
    for (int c = 0; c < 4; c++) {
      vec key = load(k[c] + d);
      for (int r = 0; r < rows; r++) sums[r][c] = fma8(load(q + r * dim + d), key, sums[r][c]);
    }
  for (int r = 0; r < rows; r++) sum_lanes4(sums[r], scores + r * KEYS);
}

/* out[r] = out[r] * decay[r] + sum over keys of weight[r][key] * v[key], `vecs` vectors wide */
INLINE void mix_tile(int rows, int vecs, const float *weights, const float *decay,
                     const float *const *v, int keys, int d, float *out, int dim) {
  vec sums[3][4];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < vecs; c++)
      sums[r][c] = load(out + r * dim + d + c * LANES) * splat(decay[r]);
  for (int j = 0; j < keys; j++) {
    const float *value = v[j] + d;
    for (int c = 0; c < vecs; c++) {
      vec part = load(value + c * LANES);
      for (int r = 0; r < rows; r++)
        sums[r][c] = fma8(splat(weights[r * KEYS + j]), part, sums[r][c]);
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < vecs; c++) store(out + r * dim + d + c * LANES, sums[r][c]);
}

INLINE void mix_rows(int rows, const float *weights, const float *decay, const float *const *v,
                     int keys, float *out, int dim) {
  int d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES)
    mix_tile(rows, 4, weights, decay, v, keys, d, out, dim);
  for (; d < dim; d += LANES) mix_tile(rows, 1, weights, decay, v, keys, d, out, dim);
}

/* ---- the interface: mirrored by ctypes structures in cpu.py ------------------------------ */

struct kv_layer { /* pages [block][K,V][kv_head][page_size][head_dim] of one layer */
  void *pages;
  int64_t block_stride; /* elements; inner dimensions are contiguous */
  int64_t num_kv_heads, page_size, head_dim, dtype;
};

struct queries {
  const void *q; /* [T][num_heads][head_dim], elements of a head contiguous */
  int64_t token_stride, head_stride, num_heads;
  void *out; /* [T][num_heads][head_dim] contiguous */
  const float *sinks; /* [num_heads] or NULL */
  float scaling, softcap; /* softcap 0 = none */
  int64_t sliding_window; /* 0 = none; counts the current token */
};

struct tables {
  int64_t num_requests;
  const int32_t *query_start_loc, *seq_lens, *table_start, *blocks, *first_positions;
};

static int64_t itemsize(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

void write_kv(const struct kv_layer *kv, const void *k, const void *v, const int64_t strides[4],
              const int64_t *slot_mapping, int64_t num_tokens, int num_threads) {
  const int64_t size = itemsize(kv->dtype), run = kv->head_dim * size;
  const int64_t head = kv->page_size * run; /* bytes of one head's page */
#pragma omp parallel for num_threads(num_threads) if (num_tokens * kv->num_kv_heads > 512)
  for (int64_t t = 0; t < num_tokens; t++) {
    const int64_t block = slot_mapping[t] / kv->page_size, place = slot_mapping[t] % kv->page_size;
    char *to = (char *)kv->pages + block * kv->block_stride * size + place * run;
    for (int64_t h = 0; h < kv->num_kv_heads; h++) {
      const int64_t from_k = (t * strides[0] + h * strides[1]) * size;
      const int64_t from_v = (t * strides[2] + h * strides[3]) * size;
      memcpy(to + h * head, (const char *)k + from_k, (size_t)run);
      memcpy(to + (kv->num_kv_heads + h) * head, (const char *)v + from_v, (size_t)run);
    }
  }
}

/* what one thread works with; `dim` is head_dim rounded up to whole vectors */
struct scratch {
  float *q, *out, *keys, *values; /* [rows][dim] twice, [KEYS][dim] twice */
  float *scores;                  /* [rows][KEYS] */
  float *max, *sum, *decay;       /* [rows] */
};

static size_t scratch_floats(int rows, int dim) {
  return (size_t)rows * (2 * (size_t)dim + KEYS + 3) + 2 * KEYS * (size_t)dim;
}

static struct scratch scratch_in(float *memory, int rows, int dim) {
  struct scratch s;
  s.q = memory;
  s.out = s.q + rows * dim;
  s.keys = s.out + rows * dim;
  s.values = s.keys + KEYS * dim;
  s.scores = s.values + KEYS * dim;
  s.max = s.scores + rows * KEYS;
  s.sum = s.max + rows;
  s.decay = s.sum + rows;
  return s;
}

/* softmax weights of one row from its scores, in place; only keys in [from, to) are visible */
INLINE void weigh(float *scores, int keys, int from, int to, const struct queries *in,
                  float *max, float *sum, float *decay) {
  const ivec lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  vec top = splat(*max), total = splat(0.0f);
  for (int j = 0; j < keys; j += LANES) {
    vec s = load(scores + j) * splat(in->scaling);
    if (in->softcap != 0.0f) s = soft_cap(s, in->softcap);
    if (j < from || j + LANES > to) {
      ivec place = lanes + j;
      s = pick((place >= from) & (place < to), s, splat(-INFINITY));
    }
    store(scores + j, s);
    top = pick(s > top, s, top);
  }
  const float highest = max_lanes(top);
  for (int j = 0; j < keys; j += LANES) {
    vec weight = exp8(load(scores + j) - splat(highest));
    store(scores + j, weight);
    total = total + weight;
  }
  *decay = exp8(splat(*max - highest))[0];
  *sum = *sum * *decay + sum_lanes(total);
  *max = highest;
}

/* Point rows[j] at the keys (which = 0) or values (1) of position base + j, one head, for j from
 * `skip` to `span`. The rest, up to a multiple of four, repeats the first: weigh() hides it. */
INLINE void find_rows(const struct kv_layer *kv, const int32_t *table, int64_t table_position,
                      int64_t head, int64_t which, int64_t base, int skip, int span, int dim,
                      float *converted, const float **rows) {
  const int direct = kv->dtype == FLOAT32 && dim == kv->head_dim;
  const int64_t size = itemsize(kv->dtype);
  const int64_t offset = (which * kv->num_kv_heads + head) * kv->page_size * kv->head_dim;
  for (int j = skip; j < span;) {
    const int64_t place = base + j - table_position;
    const int64_t within = place % kv->page_size, block = table[place / kv->page_size];
    const int64_t left = kv->page_size - within;
    const int stop = left < span - j ? j + (int)left : span;
    const char *page = (const char *)kv->pages +
                       (block * kv->block_stride + offset + within * kv->head_dim) * size;
    for (; j < stop; j++, page += kv->head_dim * size) {
      if (direct) {
        rows[j] = (const float *)page;
      } else { /* the scratch starts zeroed, so what pads head_dim to whole vectors stays 0 */
        widen(page, converted + j * dim, (int)kv->head_dim, (int)kv->dtype);
        rows[j] = converted + j * dim;
      }
    }
  }
  for (int j = 0; j < skip; j++) rows[j] = rows[skip];
  for (int j = span; j % 4; j++) rows[j] = rows[skip];
}

/* one tile: `tokens` queries of request r from its query `first` on, and one kv head */
static void attend_tile(const struct kv_layer *kv, const struct queries *in,
                        const struct tables *tables, int64_t r, int64_t first, int tokens,
                        int64_t head, int dim, const struct scratch *s) {
  const int group = (int)(in->num_heads / kv->num_kv_heads), rows = tokens * group;
  const int64_t begin = tables->query_start_loc[r];
  const int64_t position = tables->seq_lens[r] - (tables->query_start_loc[r + 1] - begin) + first;
  const int64_t size = itemsize(kv->dtype), window = in->sliding_window;
  const int32_t *table = tables->blocks + tables->table_start[r];
  const int64_t table_position = tables->first_positions[r];

  for (int row = 0; row < rows; row++) {
    const int64_t token = begin + first + row / group, query_head = head * group + row % group;
    const int64_t at = token * in->token_stride + query_head * in->head_stride;
    widen((const char *)in->q + at * size, s->q + row * dim, (int)kv->head_dim, (int)kv->dtype);
    s->max[row] = in->sinks ? in->sinks[query_head] : NEVER_SEEN;
    s->sum[row] = in->sinks ? 1.0f : 0.0f;
  }
  memset(s->out, 0, sizeof(float) * (size_t)(rows * dim));

  const int64_t end = position + tokens; /* one past the last key that any row sees */
  const int64_t oldest = window && position - window + 1 > 0 ? position - window + 1 : 0;
  for (int64_t base = oldest / KEYS * KEYS; base < end; base += KEYS) {
    /* a sliding table may start inside the block: what lies before is outside of the window */
    const int skip = base < table_position ? (int)(table_position - base) : 0;
    const int span = base + KEYS < end ? KEYS : (int)(end - base);
    const float *pointers[KEYS];
    find_rows(kv, table, table_position, head, 0, base, skip, span, dim, s->keys, pointers);
    for (int j = 0; j < span; j += 4) {
      int row = 0;
      for (; row + 3 <= rows; row += 3)
        dot_tile(3, s->q + row * dim, dim, pointers + j, s->scores + row * KEYS + j);
      if (rows - row == 2)
        dot_tile(2, s->q + row * dim, dim, pointers + j, s->scores + row * KEYS + j);
      if (rows - row == 1)
        dot_tile(1, s->q + row * dim, dim, pointers + j, s->scores + row * KEYS + j);
    }
    for (int row = 0; row < rows; row++) {
      const int64_t own = position + row / group;
      const int64_t low = window && own - window + 1 > base ? own - window + 1 - base : 0;
      const int64_t high = own + 1 - base < span ? own + 1 - base : span;
      weigh(s->scores + row * KEYS, span, (int)low, (int)high, in, s->max + row, s->sum + row,
            s->decay + row);
    }

    find_rows(kv, table, table_position, head, 1, base, skip, span, dim, s->values, pointers);
    int row = 0;
    for (; row + 3 <= rows; row += 3)
      mix_rows(3, s->scores + row * KEYS, s->decay + row, pointers, span, s->out + row * dim, dim);
    if (rows - row == 2)
      mix_rows(2, s->scores + row * KEYS, s->decay + row, pointers, span, s->out + row * dim, dim);
    if (rows - row == 1)
      mix_rows(1, s->scores + row * KEYS, s->decay + row, pointers, span, s->out + row * dim, dim);
  }

  for (int row = 0; row < rows; row++) {
    const int64_t token = begin + first + row / group, query_head = head * group + row % group;
    const float scale = 1.0f / s->sum[row];
    for (int d = 0; d < kv->head_dim; d++) s->out[row * dim + d] *= scale;
    narrow(s->out + row * dim,
           (char *)in->out + (token * in->num_heads + query_head) * kv->head_dim * size,
           (int)kv->head_dim, (int)kv->dtype);
  }
}

/* Returns 0, or -1 when memory for the tiles is not to be had. */
int attend(const struct kv_layer *kv, const struct queries *in, const struct tables *tables,
           int num_threads) {
  const int group = (int)(in->num_heads / kv->num_kv_heads);
  const int tile = group < TILE_ROWS ? TILE_ROWS / group : 1; /* tokens of one tile */
  const int dim = (int)((kv->head_dim + LANES - 1) / LANES * LANES);
  const int64_t requests = tables->num_requests;
  int64_t *tile_start = malloc(sizeof(int64_t) * (size_t)(requests + 1));
  if (!tile_start) return -1;
  tile_start[0] = 0;
  for (int64_t r = 0; r < requests; r++) {
    const int64_t length = tables->query_start_loc[r + 1] - tables->query_start_loc[r];
    tile_start[r + 1] = tile_start[r] + (length + tile - 1) / tile;
  }
  const int64_t items = tile_start[requests] * kv->num_kv_heads;
  int failed = 0;
#pragma omp parallel num_threads(num_threads) if (items > 1)
  {
    float *memory = calloc(scratch_floats(tile * group, dim), sizeof(float));
    if (!memory) {
#pragma omp atomic write
      failed = 1;
    }
    const struct scratch s = scratch_in(memory, tile * group, dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; item++) {
      if (!memory) continue;
      /* the last tile of a request sees the most keys: start with it, for balance */
      const int64_t index = (items - 1 - item) / kv->num_kv_heads;
      int64_t low = 0, high = requests - 1; /* the request whose tiles include `index` */
      while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (tile_start[middle] <= index) low = middle;
        else high = middle - 1;
      }
      const int64_t first = (index - tile_start[low]) * tile;
      const int64_t length = tables->query_start_loc[low + 1] - tables->query_start_loc[low];
      const int tokens = length - first < tile ? (int)(length - first) : tile;
      attend_tile(kv, in, tables, low, first, tokens, (items - 1 - item) % kv->num_kv_heads, dim,
                  &s);
    }
    free(memory);
  }
  free(tile_start);
  return failed ? -1 : 0;
}
