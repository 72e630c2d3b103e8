/* Paged attention on the CPU: the kernel behind worker/attention/cpu.py.
 *
 * It writes new keys and values into their slots of the pool, then computes causal attention of
 * ragged queries over the pages in the block tables. All strides are in elements. Queries and the
 * pool may independently be float32, float16 or bfloat16: new keys and values are rounded to the
 * pool's type when they are written. Arithmetic is float32.
 *
 * The result for a token depends on its query, its position and its keys alone, to the last bit,
 * never on the rest of the batch or on how its prompt was cut into chunks, for three reasons: keys
 * are processed in blocks of KEYS by absolute position; every dot product, maximum and sum has one
 * fixed order of operations whatever the tile's shape (vectors are explicit here, so no compiler
 * reassociates); and what a tile computes beyond a token's own keys has weight exactly 0.
 */
#include "paged.h"
#include "paged_tiles.h"

#include <stdlib.h>

#define TILE_ROWS 24 /* (query token, query head) pairs that share one pass over the keys */
#define LINE 16 /* floats of a cache line: threads write to separate lines */
#define NEVER_SEEN -1e30f /* row maximum before the first visible key: finite, so no inf - inf */

static int64_t itemsize(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

#define AT_ONCE 64 /* numbers */

/* Converts `n` numbers. */
static void convert(const char *from, int64_t from_dtype, char *to, int64_t to_dtype, int64_t n) {
  if (from_dtype == to_dtype) {
    memcpy(to, from, (size_t)(n * itemsize(to_dtype)));
    return;
  }
  float some[AT_ONCE];
  for (int64_t i = 0; i < n; i += AT_ONCE) {
    const int count = n - i < AT_ONCE ? (int)(n - i) : AT_ONCE;
    widen(from + i * itemsize(from_dtype), some, count, (int)from_dtype);
    narrow(some, to + i * itemsize(to_dtype), count, (int)to_dtype);
  }
}

void write_kv(const struct kv_layer *kv, const struct new_kv *new, const struct tables *tables,
              int64_t first, int64_t end) {
  const int64_t size = itemsize(kv->dtype), run = kv->head_dim * size;
  const int64_t head = kv->page_size * run; /* bytes of one head's page */
  const int64_t new_size = itemsize(new->dtype);
  for (int64_t t = first; t < end; t++) {
    const int64_t slot = tables->slot_mapping[t];
    const int64_t block = slot / kv->page_size, place = slot % kv->page_size;
    char *to = (char *)kv->pages + block * kv->block_stride * size + place * run;
    for (int64_t h = 0; h < kv->num_kv_heads; h++) {
      const int64_t from_k = (t * new->strides[0] + h * new->strides[1]) * new_size;
      const int64_t from_v = (t * new->strides[2] + h * new->strides[3]) * new_size;
      convert((const char *)new->k + from_k, new->dtype, to + h * head, kv->dtype, kv->head_dim);
      convert((const char *)new->v + from_v, new->dtype, to + (kv->num_kv_heads + h) * head,
              kv->dtype, kv->head_dim);
    }
  }
}

/* Memory of one thread; `dim` is head_dim rounded up to whole vectors. */
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

/* The keys of head 0 at positions base .. base + span, in place: each run is within a page. */
INLINE struct block block_at(const struct kv_layer *kv, const int32_t *table,
                             int64_t table_position, int64_t base, int span) {
  const int64_t size = itemsize(kv->dtype);
  struct block found = {.stride = kv->head_dim * size, .dtype = (int)kv->dtype};
  found.runs = (span + RUN - 1) / RUN;
  found.length = span < RUN ? span : RUN;
  found.last = span - (found.runs - 1) * RUN;
  for (int c = 0; c < found.runs; c++) {
    const int64_t place = base + c * RUN - table_position;
    const int64_t page = table[place / kv->page_size] * kv->block_stride;
    found.first[c] =
        (const char *)kv->pages + (page + place % kv->page_size * kv->head_dim) * size;
  }
  return found;
}

/* The same block's keys (which = 0) or values (1) of another head. */
INLINE struct block part_of(const struct kv_layer *kv, const struct block *block, int which,
                            int64_t head) {
  struct block part = *block;
  const int64_t apart = (which * kv->num_kv_heads + head) * kv->page_size * block->stride;
  for (int c = 0; c < part.runs; c++) part.first[c] += apart;
  return part;
}

/* Keys or values at positions base + `skip` .. base + `span`, converted into `copy` [KEYS][dim],
 * page by page; zeros before them. The end of a row after head_dim was zero and stays so. */
static struct block converted(const struct kv_layer *kv, const int32_t *table,
                              int64_t table_position, int which, int64_t head, int64_t base,
                              int skip, int span, int dim, float *copy) {
  const int64_t row_bytes = dim * (int64_t)sizeof(float);
  struct block found = {.stride = row_bytes, .dtype = FLOAT32, .runs = (span + RUN - 1) / RUN};
  found.length = span < RUN ? span : RUN;
  found.last = span - (found.runs - 1) * RUN;
  for (int c = 0; c < found.runs; c++) found.first[c] = (const char *)(copy + c * RUN * dim);
  memset(copy, 0, (size_t)(skip * row_bytes));
  const int64_t size = itemsize(kv->dtype), run = kv->head_dim * size;
  const char *pages =
      (const char *)kv->pages + (which * kv->num_kv_heads + head) * kv->page_size * run;
  for (int j = skip, count; j < span; j += count) {
    const int64_t place = base + j - table_position, within = place % kv->page_size;
    const int64_t page = table[place / kv->page_size] * kv->block_stride;
    const char *from = pages + page * size + within * run;
    count = span - j < kv->page_size - within ? span - j : (int)(kv->page_size - within);
    if (dim == kv->head_dim) widen(from, copy + j * dim, count * dim, (int)kv->dtype);
    else
      for (int i = 0; i < count; i++)
        widen(from + i * run, copy + (j + i) * dim, (int)kv->head_dim, (int)kv->dtype);
  }
  return found;
}

/* `tokens` queries of a request from its query `first` on, and `heads` kv heads from `head` on. */
struct tile {
  int64_t request, first, head;
  int heads, tokens;
};

/* Whether blocks are read in place. For float16 that is faster even if 24 rows read them, and
 * convert every number eight times: half as many bytes stay in the first-level cache. */
INLINE int is_in_place(const struct kv_layer *kv, int dim) {
  return dim == kv->head_dim &&
         (kv->dtype == FLOAT32 || (kv->dtype == FLOAT16 && LOADS_FLOAT16));
}

/* Adds the keys in [from, to) to the rows' sums s->out and s->sum, with weights relative to s->max.
 * Within a block, heads are processed in turn: their pages are adjacent, prefetched one ahead. */
static void attend_keys(const struct kv_layer *kv, const struct queries *in,
                        const struct tables *tables, struct tile tile, int64_t position,
                        int64_t from, int64_t to, int dim, const struct scratch *s) {
  const int group = (int)(in->num_heads / kv->num_kv_heads), rows = tile.tokens * group;
  const int64_t window = in->call.sliding_window;
  const int32_t *table = tables->blocks + tables->table_start[tile.request];
  const int64_t table_position = tables->first_positions[tile.request];

  struct block next = {.runs = 0}; /* the next block, in place */
  for (int64_t base = from / KEYS * KEYS; base < to; base += KEYS) {
    /* a sliding table may start inside the block; keys before it are outside the window */
    const int skip = base < table_position ? (int)(table_position - base) : 0;
    const int span = base + KEYS < to ? KEYS : (int)(to - base);
    const int in_runs = kv->page_size % RUN == 0 && skip == 0;
    struct block here = next;
    if (in_runs && !here.runs) here = block_at(kv, table, table_position, base, span);
    next.runs = 0;
    if (in_runs && base + KEYS < to) {
      const int rest = to - base - KEYS < KEYS ? (int)(to - base - KEYS) : KEYS;
      next = block_at(kv, table, table_position, base + KEYS, rest);
    }
    /* the parts of a block in memory order: keys of all heads, then values */
    for (int which = 0; which < 2; which++)
      for (int h = 0; h < tile.heads; h++) {
        const int64_t head = tile.head + h;
        struct block part;
        if (in_runs && is_in_place(kv, dim))
          part = part_of(kv, &here, which, head);
        else
          part = converted(kv, table, table_position, which, head, base, skip, span, dim, s->copy);
        if (in_runs) {
          if (h + 1 < tile.heads)
            fetch_while(&part, part_of(kv, &here, which, head + 1));
          else if (which == 0)
            fetch_while(&part, part_of(kv, &here, 1, tile.head));
          else
            fetch_while(&part, part_of(kv, &next, 0, tile.head));
        }
        const int first = h * rows;
        float *scores = s->scores + first * KEYS, *out = s->out + first * dim;
        if (which) {
          mix_block(&part, scores, out, rows, dim);
          continue;
        }
        dot_block(&part, s->q + first * dim, rows, dim, scores);
        for (int row = 0; row < rows; row++) {
          const int64_t own = position + row / group;
          const int64_t low = window && own - window + 1 > base ? own - window + 1 - base : 0;
          const int64_t high = own + 1 - base < span ? own + 1 - base : span;
          const float decay = weigh(scores + row * KEYS, part.length * STREAMS, (int)low, (int)high,
                                    in->call.scaling, in->call.softcap, s->max + first + row,
                                    s->sum + first + row);
          for (int d = 0; d < dim && decay < 1.0f; d += LANES)
            store(out + row * dim + d, load(out + row * dim + d) * splat(decay));
        }
      }
  }
}

/* One tile, over all of its keys. */
static void attend_tile(const struct kv_layer *kv, const struct queries *in,
                        const struct tables *tables, struct tile tile, int dim,
                        const struct scratch *s) {
  const int group = (int)(in->num_heads / kv->num_kv_heads), rows = tile.tokens * group;
  const int64_t begin = tables->query_start_loc[tile.request];
  const int64_t length = tables->query_start_loc[tile.request + 1] - begin;
  const int64_t position = tables->seq_lens[tile.request] - length + tile.first;
  const int64_t size = itemsize(in->dtype), window = in->call.sliding_window;

  for (int row = 0; row < rows * tile.heads; row++) {
    const int64_t token = begin + tile.first + row % rows / group;
    const int64_t query_head = (tile.head + row / rows) * group + row % group;
    const int64_t at = token * in->token_stride + query_head * in->head_stride;
    widen((const char *)in->q + at * size, s->q + row * dim, (int)kv->head_dim, (int)in->dtype);
    s->max[row] = in->call.sinks ? in->call.sinks[query_head] : NEVER_SEEN;
    s->sum[row] = in->call.sinks ? 1.0f : 0.0f;
  }
  memset(s->out, 0, sizeof(float) * (size_t)(rows * tile.heads * dim));
  const int64_t end = position + tile.tokens; /* one past the last key that any row sees */
  const int64_t oldest = window && position - window + 1 > 0 ? position - window + 1 : 0;
  attend_keys(kv, in, tables, tile, position, oldest, end, dim, s);

  for (int row = 0; row < rows * tile.heads; row++) {
    const int64_t token = begin + tile.first + row % rows / group;
    const int64_t query_head = (tile.head + row / rows) * group + row % group;
    const float scale = 1.0f / s->sum[row];
    for (int d = 0; d < kv->head_dim; d++) s->out[row * dim + d] *= scale;
    narrow(s->out + row * dim,
           (char *)in->out + (token * in->num_heads + query_head) * kv->head_dim * size,
           (int)kv->head_dim, (int)in->dtype);
  }
}

/* All kv heads of some queries: at once if they are few rows, else one after another. */
static void attend_heads(const struct kv_layer *kv, const struct queries *in,
                         const struct tables *tables, struct tile tile, int dim,
                         const struct scratch *s) {
  const int rows = tile.tokens * (int)(in->num_heads / kv->num_kv_heads), end = tile.heads;
  const int at_once = rows * end <= TILE_ROWS ? end : 1;
  tile.heads = at_once;
  for (int head = 0; head < end; head += at_once, tile.head += at_once)
    attend_tile(kv, in, tables, tile, dim, s);
}

static int padded_dim(int64_t head_dim) { return (int)((head_dim + LANES - 1) / LANES * LANES); }

int share_out(struct sharing *sharing, const struct tables *tables, int64_t num_heads,
              int64_t num_kv_heads, int64_t head_dim, int num_threads) {
  const int group = (int)(num_heads / num_kv_heads);
  const int64_t requests = tables->num_requests;
  sharing->most_tokens = group < TILE_ROWS ? TILE_ROWS / group : 1;
  sharing->most_rows = group < TILE_ROWS ? TILE_ROWS : group;
  sharing->num_floats =
      (scratch_floats(sharing->most_rows, padded_dim(head_dim)) + LINE - 1) / LINE * LINE;
  sharing->tile_start = malloc(sizeof(int64_t) * (size_t)(requests + 1));
  sharing->scratch = calloc((size_t)num_threads * sharing->num_floats, sizeof(float));
  if (!sharing->tile_start || !sharing->scratch) {
    end_sharing(sharing);
    return -1;
  }
  int64_t *start = sharing->tile_start;
  start[0] = 0;
  for (int64_t r = 0; r < requests; r++) {
    const int64_t length = tables->query_start_loc[r + 1] - tables->query_start_loc[r];
    start[r + 1] = start[r] + (length + sharing->most_tokens - 1) / sharing->most_tokens;
  }
  /* few tiles: each head becomes an item, so that all threads have work */
  sharing->shares = start[requests] < 4 * num_threads ? (int)num_kv_heads : 1;
  sharing->items = start[requests] * sharing->shares;
  begin_sharing(sharing);
  return 0;
}

void begin_sharing(struct sharing *sharing) {
  atomic_store_explicit(&sharing->next, 0, memory_order_relaxed);
}

void end_sharing(struct sharing *sharing) {
  free(sharing->tile_start);
  free(sharing->scratch);
}

void attend_share(struct team team, const struct kv_layer *kv, const struct queries *in,
                  const struct tables *tables, struct sharing *sharing) {
  const int dim = padded_dim(kv->head_dim), heads_at_once = (int)kv->num_kv_heads / sharing->shares;
  const struct scratch s = scratch_in(
      sharing->scratch + (size_t)team.thread * sharing->num_floats, sharing->most_rows, dim);
  for (;;) {
    const int64_t item = atomic_fetch_add_explicit(&sharing->next, 1, memory_order_relaxed);
    if (item >= sharing->items) return;
    /* the last tile of a request has the most keys: start with it, for balance */
    const int64_t place = sharing->items - 1 - item, index = place / sharing->shares;
    int64_t low = 0, high = tables->num_requests - 1; /* search the request of tile `index` */
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (sharing->tile_start[middle] <= index) low = middle;
      else high = middle - 1;
    }
    const int64_t first = (index - sharing->tile_start[low]) * sharing->most_tokens;
    const int64_t left =
        tables->query_start_loc[low + 1] - tables->query_start_loc[low] - first;
    const int tokens = left < sharing->most_tokens ? (int)left : sharing->most_tokens;
    const struct tile tile = {low, first, place % sharing->shares, heads_at_once, tokens};
    attend_heads(kv, in, tables, tile, dim, &s);
  }
}

/* One layer's attention in a parallel region of its own. Returns 0, or -1 if memory cannot be
 * allocated. */
int attend(const struct kv_layer *kv, const struct new_kv *new, const struct queries *in,
           const struct tables *tables, int num_threads) {
  struct sharing sharing;
  if (share_out(&sharing, tables, in->num_heads, kv->num_kv_heads, kv->head_dim, num_threads))
    return -1;
  struct barrier barrier = {0};
#pragma omp parallel num_threads(num_threads) if (sharing.items > 1)
  {
    const struct team team = team_in(&barrier);
    write_kv(kv, new, tables, first_row(team, new->num_tokens), end_row(team, new->num_tokens));
    team_barrier(team);
    attend_share(team, kv, in, tables, &sharing);
  }
  end_sharing(&sharing);
  return 0;
}
