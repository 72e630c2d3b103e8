/* Paged attention on the CPU: the loops of worker/attention/cpu.py.
 *
 * attend copies new keys and values into their slots of the pool, then computes causal
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
#define STREAMS 4    /* a block is read as this many runs of keys side by side */
#define RUN (KEYS / STREAMS)
#define TILE_ROWS 24 /* (query token, grouped head) pairs that share one pass over the keys */
#define NEVER_SEEN -1e30f /* a row maximum before the first visible key: finite, so no inf - inf */

/* Within a block the keys are ordered 0, 16, 32, 48, 1, 17, ...: place 4 i + c is key 16 c + i.
 * With pages of 16 tokens these are four pages side by side, each read from its begin to its end:
 * the CPU fetches ahead on each of them, which it does not on rows of one page in turn. */

/* ---- tiles ------------------------------------------------------------------------------ */

struct block { /* keys or values of a block: run c begins at first[c], a row each `stride` floats */
  const float *first[STREAMS];
  int64_t stride;
  int runs, length; /* how many, and the rows of each */
  int last;         /* rows of the last run */
  int ahead_runs;   /* of what is needed next, fetched meanwhile */
  const float *ahead[STREAMS];
};

/* row `i` of the runs that are needed next */
INLINE void fetch_ahead(const struct block *block, int i, int dim) {
  for (int c = 0; c < block->ahead_runs; c++)
    for (int d = 0; d < dim; d += 2 * LANES)
      __builtin_prefetch(block->ahead[c] + i * block->stride + d);
}

/* scores[r][4 i + c] = q[r] . k[c][i] for `rows` rows; what is no key gets any score. `rows` and
 * `runs` are constants where it is called. */
INLINE void dot_tile(int rows, int runs, const struct block *keys, const float *q, int dim,
                     float *scores) {
  for (int i = 0; i < keys->length; i++, scores += STREAMS) {
    const int64_t at = i * keys->stride;
    fetch_ahead(keys, i, dim);
    vec sums[3][STREAMS] = {{{0}}};
    for (int d = 0; d < dim; d += LANES) {
      vec query[3];
      for (int r = 0; r < rows; r++) {
        query[r] = load(q + r * dim + d);
        IN_REGISTER(query[r]);
      }
      for (int c = 0; c < runs; c++) {
        vec key = load(keys->first[c] + at + d);
        IN_REGISTER(key);
        for (int r = 0; r < rows; r++) sums[r][c] = fma8(query[r], key, sums[r][c]);
      }
    }
    for (int r = 0; r < rows; r++) sum_lanes4(sums[r], scores + r * KEYS);
  }
}

INLINE void dot_rows(int rows, const struct block *keys, const float *q, int dim, float *scores) {
  switch (keys->runs) {
    case 1: dot_tile(rows, 1, keys, q, dim, scores); break;
    case 2: dot_tile(rows, 2, keys, q, dim, scores); break;
    case 3: dot_tile(rows, 3, keys, q, dim, scores); break;
    default: dot_tile(rows, STREAMS, keys, q, dim, scores);
  }
}

/* out[r] += sum over the keys in [from, to) of each run, of weight * value; `vecs` vectors wide */
INLINE void mix_tile(int rows, int vecs, int runs, const struct block *values, int from, int to,
                     const float *weights, int d, float *out, int dim) {
  vec sums[3][4];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < vecs; c++) sums[r][c] = load(out + r * dim + d + c * LANES);
  for (int i = from; i < to; i++)
    for (int j = 0; j < runs; j++) {
      const float *value = values->first[j] + i * values->stride + d;
      vec weight[3];
      for (int r = 0; r < rows; r++) weight[r] = splat(weights[r * KEYS + i * STREAMS + j]);
      for (int c = 0; c < vecs; c++) {
        vec part = load(value + c * LANES);
        IN_REGISTER(part);
        for (int r = 0; r < rows; r++) sums[r][c] = fma8(weight[r], part, sums[r][c]);
      }
    }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < vecs; c++) store(out + r * dim + d + c * LANES, sums[r][c]);
}

INLINE void mix_runs(int rows, int runs, const struct block *values, int from, int to,
                     const float *weights, float *out, int dim) {
  for (int i = from; i < to; i += 4) { /* few at a time: they are read in two passes */
    const int stop = i + 4 < to ? i + 4 : to;
    for (int row = i; row < stop; row++) fetch_ahead(values, row, dim);
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
      mix_tile(rows, 4, runs, values, i, stop, weights, d, out, dim);
    for (; d < dim; d += LANES) mix_tile(rows, 1, runs, values, i, stop, weights, d, out, dim);
  }
}

/* what lies behind the last key may be anything, and 0 times NaN is NaN: so it is left out */
INLINE void mix_rows(int rows, const struct block *values, const float *weights, float *out,
                     int dim) {
  for (int part = 0; part < 2; part++) {
    const int from = part ? values->last : 0, to = part ? values->length : values->last;
    switch (values->runs - part) {
      case 0: break;
      case 1: mix_runs(rows, 1, values, from, to, weights, out, dim); break;
      case 2: mix_runs(rows, 2, values, from, to, weights, out, dim); break;
      case 3: mix_runs(rows, 3, values, from, to, weights, out, dim); break;
      default: mix_runs(rows, STREAMS, values, from, to, weights, out, dim);
    }
  }
}

/* ---- the interface: mirrored by ctypes structures in cpu.py ------------------------------ */

struct kv_layer { /* pages [block][K,V][kv_head][page_size][head_dim] of one layer */
  void *pages;
  int64_t block_stride; /* elements; inner dimensions are contiguous */
  int64_t num_kv_heads, page_size, head_dim, dtype;
};

struct new_kv { /* [T][num_kv_heads][head_dim], elements of a head contiguous */
  const void *k, *v;
  int64_t strides[4];          /* token and head of k, token and head of v */
  const int64_t *slot_mapping; /* [T] */
  int64_t num_tokens;
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

static void write_kv(const struct kv_layer *kv, const struct new_kv *new, int num_threads) {
  const int64_t size = itemsize(kv->dtype), run = kv->head_dim * size;
  const int64_t head = kv->page_size * run; /* bytes of one head's page */
#pragma omp parallel for num_threads(num_threads) if (new->num_tokens * kv->num_kv_heads > 512)
  for (int64_t t = 0; t < new->num_tokens; t++) {
    const int64_t slot = new->slot_mapping[t];
    const int64_t block = slot / kv->page_size, place = slot % kv->page_size;
    char *to = (char *)kv->pages + block * kv->block_stride * size + place * run;
    for (int64_t h = 0; h < kv->num_kv_heads; h++) {
      const int64_t from_k = (t * new->strides[0] + h * new->strides[1]) * size;
      const int64_t from_v = (t * new->strides[2] + h * new->strides[3]) * size;
      memcpy(to + h * head, (const char *)new->k + from_k, (size_t)run);
      memcpy(to + (kv->num_kv_heads + h) * head, (const char *)new->v + from_v, (size_t)run);
    }
  }
}

/* what one thread works with; `dim` is head_dim rounded up to whole vectors */
struct scratch {
  float *q, *out;   /* [rows][dim] each */
  float *copy;      /* [KEYS][dim] */
  float *scores;    /* [rows][KEYS] */
  float *max, *sum; /* [rows] each */
};

static size_t scratch_floats(int rows, int dim) {
  return (size_t)rows * (2 * (size_t)dim + KEYS + 2) + KEYS * (size_t)dim;
}

static struct scratch scratch_in(float *memory, int rows, int dim) {
  struct scratch s;
  s.q = memory;
  s.out = s.q + rows * dim;
  s.copy = s.out + rows * dim;
  s.scores = s.copy + KEYS * dim;
  s.max = s.scores + rows * KEYS;
  s.sum = s.max + rows;
  return s;
}

/* Softmax weights of one row from its scores, in place; only keys in [from, to) are visible.
 * Returns what earlier sums are to be multiplied with. */
INLINE float weigh(float *scores, int places, int from, int to, const struct queries *in,
                   float *max, float *sum) {
  vec top = splat(*max), total = splat(0.0f);
  ivec key = {0, RUN, 2 * RUN, 3 * RUN, 1, RUN + 1, 2 * RUN + 1, 3 * RUN + 1};
  const int all = from <= 0 && to >= KEYS;
  for (int j = 0; j < places; j += LANES, key += LANES / STREAMS) {
    vec s = load(scores + j) * splat(in->scaling);
    if (in->softcap != 0.0f) s = soft_cap(s, in->softcap);
    if (!all) s = pick((key >= from) & (key < to), s, splat(-INFINITY));
    store(scores + j, s);
    top = pick(s > top, s, top);
  }
  const float highest = max_lanes(top);
  for (int j = 0; j < places; j += LANES) {
    vec weight = exp8(load(scores + j) - splat(highest));
    store(scores + j, weight);
    total = total + weight;
  }
  const float decay = exp8(splat(*max - highest))[0];
  *sum = *sum * decay + sum_lanes(total);
  *max = highest;
  return decay;
}

INLINE int is_in_place(const struct kv_layer *kv, int dim) {
  return kv->dtype == FLOAT32 && dim == kv->head_dim && kv->page_size % RUN == 0;
}

/* Keys (which = 0) or values (1) of positions base + `skip` .. base + `span`, one head: in place
 * where the pool's floats can be read as they lie, else converted into `copy` [KEYS][dim], with
 * zeros for what is missing. */
INLINE void find_block(const struct kv_layer *kv, const int32_t *table, int64_t table_position,
                       int64_t head, int which, int64_t base, int skip, int span, int dim,
                       float *copy, struct block *found) {
  const int64_t size = itemsize(kv->dtype), run = kv->head_dim * size;
  const int64_t page_size = kv->page_size, block_bytes = kv->block_stride * size;
  const char *pages = (const char *)kv->pages + (which * kv->num_kv_heads + head) * page_size * run;
  found->runs = (span + RUN - 1) / RUN;
  found->length = span < RUN ? span : RUN;
  found->last = span - (found->runs - 1) * RUN;
  found->ahead_runs = 0;
  if (is_in_place(kv, dim) && skip == 0) {
    found->stride = kv->head_dim;
    for (int c = 0; c < found->runs; c++) {
      const int64_t place = base + c * RUN - table_position;
      const char *page = pages + table[place / page_size] * block_bytes;
      found->first[c] = (const float *)(page + place % page_size * run);
    }
    return;
  }
  found->stride = dim;
  for (int c = 0; c < found->runs; c++) found->first[c] = copy + c * RUN * dim;
  memset(copy, 0, sizeof(float) * (size_t)(found->runs * RUN * dim));
  for (int j = skip; j < span; j++) {
    const int64_t place = base + j - table_position;
    const char *page = pages + table[place / page_size] * block_bytes;
    widen(page + place % page_size * run, copy + j * dim, (int)kv->head_dim, (int)kv->dtype);
  }
}

/* while `block` is read, fetch `next` */
INLINE void fetch_while(struct block *block, const struct block *next) {
  block->ahead_runs = next->runs;
  for (int c = 0; c < next->runs; c++) block->ahead[c] = next->first[c];
}

/* calls f(3, row), then f(2, row) or f(1, row), so that row counts are constants inside */
#define BY_THREES(rows, f)                                                                        \
  do {                                                                                            \
    int row = 0;                                                                                  \
    for (; row + 3 <= (rows); row += 3) f(3, row);                                                \
    if ((rows) - row == 2) f(2, row);                                                             \
    if ((rows) - row == 1) f(1, row);                                                             \
  } while (0)

/* `tokens` queries of request r from its query `first` on, and one kv head */
struct tile {
  int64_t request, first, head;
  int tokens;
};

/* Add the keys in [from, to) to the rows' sums: s->out and s->sum, with weights relative to s->max */
static void attend_keys(const struct kv_layer *kv, const struct queries *in,
                        const struct tables *tables, struct tile tile, int64_t position,
                        int64_t from, int64_t to, int dim, const struct scratch *s) {
  const int group = (int)(in->num_heads / kv->num_kv_heads), rows = tile.tokens * group;
  const int64_t window = in->sliding_window;
  const int32_t *table = tables->blocks + tables->table_start[tile.request];
  const int64_t table_position = tables->first_positions[tile.request];

  struct block keys, values, next;
  int is_found = 0; /* the block of keys that comes, with the values before it */
  for (int64_t base = from / KEYS * KEYS; base < to; base += KEYS) {
    /* a sliding table may start inside the block: what lies before is outside of the window */
    const int skip = base < table_position ? (int)(table_position - base) : 0;
    const int span = base + KEYS < to ? KEYS : (int)(to - base);
    const int in_place = is_in_place(kv, dim) && skip == 0;
    if (is_found)
      keys = next;
    else
      find_block(kv, table, table_position, tile.head, 0, base, skip, span, dim, s->copy, &keys);
    if (in_place) {
      find_block(kv, table, table_position, tile.head, 1, base, skip, span, dim, s->copy, &values);
      fetch_while(&keys, &values);
    }
#define DOT(n, row)                                                                               \
  do {                                                                                            \
    dot_rows(n, &keys, s->q + row * dim, dim, s->scores + row * KEYS);                            \
    keys.ahead_runs = 0; /* the first rows have fetched it */                                     \
  } while (0)
    BY_THREES(rows, DOT);

    for (int row = 0; row < rows; row++) {
      const int64_t own = position + row / group;
      const int64_t low = window && own - window + 1 > base ? own - window + 1 - base : 0;
      const int64_t high = own + 1 - base < span ? own + 1 - base : span;
      const float decay = weigh(s->scores + row * KEYS, keys.length * STREAMS, (int)low, (int)high, in,
                                s->max + row, s->sum + row);
      for (int d = 0; d < dim; d += LANES)
        store(s->out + row * dim + d, load(s->out + row * dim + d) * splat(decay));
    }

    if (!in_place)
      find_block(kv, table, table_position, tile.head, 1, base, skip, span, dim, s->copy, &values);
    is_found = in_place && base + KEYS < to;
    if (is_found) {
      const int rest = to - base - KEYS < KEYS ? (int)(to - base - KEYS) : KEYS;
      find_block(kv, table, table_position, tile.head, 0, base + KEYS, 0, rest, dim, s->copy, &next);
      fetch_while(&values, &next);
    }
#define MIX(n, row)                                                                               \
  do {                                                                                            \
    mix_rows(n, &values, s->scores + row * KEYS, s->out + row * dim, dim);                        \
    values.ahead_runs = 0;                                                                        \
  } while (0)
    BY_THREES(rows, MIX);
  }
}

/* one tile: all of its keys */
static void attend_tile(const struct kv_layer *kv, const struct queries *in,
                        const struct tables *tables, struct tile tile, int dim,
                        const struct scratch *s) {
  const int group = (int)(in->num_heads / kv->num_kv_heads), rows = tile.tokens * group;
  const int64_t begin = tables->query_start_loc[tile.request];
  const int64_t length = tables->query_start_loc[tile.request + 1] - begin;
  const int64_t position = tables->seq_lens[tile.request] - length + tile.first;
  const int64_t size = itemsize(kv->dtype), window = in->sliding_window;

  for (int row = 0; row < rows; row++) {
    const int64_t token = begin + tile.first + row / group;
    const int64_t query_head = tile.head * group + row % group;
    const int64_t at = token * in->token_stride + query_head * in->head_stride;
    widen((const char *)in->q + at * size, s->q + row * dim, (int)kv->head_dim, (int)kv->dtype);
    s->max[row] = in->sinks ? in->sinks[query_head] : NEVER_SEEN;
    s->sum[row] = in->sinks ? 1.0f : 0.0f;
  }
  memset(s->out, 0, sizeof(float) * (size_t)(rows * dim));
  const int64_t end = position + tile.tokens; /* one past the last key that any row sees */
  const int64_t oldest = window && position - window + 1 > 0 ? position - window + 1 : 0;
  attend_keys(kv, in, tables, tile, position, oldest, end, dim, s);

  for (int row = 0; row < rows; row++) {
    const int64_t token = begin + tile.first + row / group;
    const int64_t query_head = tile.head * group + row % group;
    const float scale = 1.0f / s->sum[row];
    for (int d = 0; d < kv->head_dim; d++) s->out[row * dim + d] *= scale;
    narrow(s->out + row * dim,
           (char *)in->out + (token * in->num_heads + query_head) * kv->head_dim * size,
           (int)kv->head_dim, (int)kv->dtype);
  }
}

/* Returns 0, or -1 when memory for the tiles is not to be had. */
int attend(const struct kv_layer *kv, const struct new_kv *new, const struct queries *in,
           const struct tables *tables, int num_threads) {
  const int group = (int)(in->num_heads / kv->num_kv_heads);
  const int tile = group < TILE_ROWS ? TILE_ROWS / group : 1; /* tokens of one tile */
  const int dim = (int)((kv->head_dim + LANES - 1) / LANES * LANES);
  const int64_t requests = tables->num_requests;
  int64_t *tile_start = malloc(sizeof(int64_t) * (size_t)(requests + 1));
  if (!tile_start) return -1;
  write_kv(kv, new, num_threads);
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
      const struct tile tile = {low, first, (items - 1 - item) % kv->num_kv_heads, tokens};
      attend_tile(kv, in, tables, tile, dim, &s);
    }
    free(memory);
  }
  free(tile_start);
  return failed ? -1 : 0;
}
