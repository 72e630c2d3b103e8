/* All decoder layers of a step, attention included, in one parallel region.
 *
 * Waking a thread for a region costs as much as a small layer. Here that is paid once per step;
 * between stages threads wait for each other by spinning (threads.h). Arithmetic is that of
 * decoder.c and paged.c: a row has the same bits as layer by layer.
 */
#include "decoder.h"
#include "paged.h"
#include "vectors.h"

#include <string.h>

#define ROWS_AT_ONCE 112 /* in linear parts, so that intermediate values stay in a cache */

/* at most ROWS_AT_ONCE */
static int64_t rows_from(int64_t first, int64_t rows) {
  return rows - first < ROWS_AT_ONCE ? rows - first : ROWS_AT_ONCE;
}

struct stacked { /* mirrored by a ctypes structure in worker/cpu_layers/decoder_stack.py */
  const struct layer *layer;
  struct kv_layer kv;
  struct call call;
  int64_t group, rotary; /* which of the step's tables, and of its embeddings */
};

/* The rows of the last layer whose output is needed. */
struct wanted {
  const int32_t *rows;
  int64_t count;
};

/* after_attention in parts; ends with a barrier. */
static void finish(struct team team, const struct layer *layer, const float *x,
                   const float *attended, int64_t rows, float *out, const struct workspace *work) {
  for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
    const int64_t begin = first * layer->hidden, width = layer->num_heads * layer->head_dim;
    after_attention(team, layer, x + begin, attended + first * width, rows_from(first, rows),
                    out + begin, work);
    team_barrier(team);
  }
}

/* The same for some rows; the output of the others is their input. */
static void finish_wanted(struct team team, const struct layer *layer, const float *x,
                          int64_t rows, struct wanted wanted, float *out,
                          const struct workspace *work) {
  const int64_t hidden = layer->hidden, width = layer->num_heads * layer->head_dim;
  const int64_t first = first_row(team, wanted.count), end = end_row(team, wanted.count);
  float *few = work->qkv, *attended = few + wanted.count * hidden; /* qkv is no longer needed */
  for (int64_t i = first; i < end; i++) {
    const int64_t row = wanted.rows[i];
    memcpy(few + i * hidden, x + row * hidden, sizeof(float) * (size_t)hidden);
    memcpy(attended + i * width, work->attended + row * width, sizeof(float) * (size_t)width);
  }
  if (out != x && team.thread == 0) memcpy(out, x, sizeof(float) * (size_t)(rows * hidden));
  team_barrier(team);
  finish(team, layer, few, attended, wanted.count, few, work);
  for (int64_t i = first; i < end; i++)
    memcpy(out + wanted.rows[i] * hidden, few + i * hidden, sizeof(float) * (size_t)hidden);
}

/* `wanted.rows` NULL: all rows */
static void run_layer(struct team team, const struct stacked *stacked, const struct tables *tables,
                      const float *x, int64_t rows, struct wanted wanted,
                      const struct rotary *rotary, float *out, const struct workspace *work,
                      struct sharing *sharing) {
  const struct layer *layer = stacked->layer;
  const int64_t head_dim = layer->head_dim;
  const int64_t q_width = layer->num_heads * head_dim, kv_width = layer->num_kv_heads * head_dim;
  const int64_t width = q_width + 2 * kv_width;
  const struct new_kv new = {
      .k = work->qkv + q_width,
      .v = work->qkv + q_width + kv_width,
      .strides = {width, head_dim, width, head_dim},
      .num_tokens = rows,
      .dtype = FLOAT32,
  };
  const struct queries queries = {
      .q = work->qkv,
      .token_stride = width,
      .head_stride = head_dim,
      .num_heads = layer->num_heads,
      .dtype = FLOAT32,
      .out = work->attended,
      .call = stacked->call,
  };
  for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
    const int64_t count = rows_from(first, rows), turned = first * rotary->dim;
    const struct rotary angles = {rotary->cos + turned, rotary->sin + turned, rotary->dim};
    struct workspace part = *work;
    part.qkv += first * width;
    before_attention(team, layer, x + first * layer->hidden, count, &angles, &part);
  }
  if (rows > ROWS_AT_ONCE) team_barrier(team);
  write_kv(&stacked->kv, &new, tables, first_row(team, rows), end_row(team, rows));
  if (team.thread == 0) begin_sharing(sharing);
  team_barrier(team);
  attend_share(team, &stacked->kv, &queries, tables, sharing);
  team_barrier(team);
  /* a row may be listed more than once; the workspace has space for `rows` */
  if (wanted.rows && wanted.count <= rows &&
      wanted.count * (layer->hidden + q_width) <= rows * width)
    finish_wanted(team, layer, x, rows, wanted, out, work);
  else
    finish(team, layer, x, work->attended, rows, out, work);
}

/* x[rows][hidden] -> out[rows][hidden], which must not overlap. Only the rows of `out` listed in
 * `wanted` are defined (all if it is NULL). There is one of `tables` per cache group; all layers
 * have the same number and size of heads. Returns 0, or -1 if memory cannot be allocated. */
int run_stack(const struct stacked *layers, int64_t num_layers, const float *x, int64_t rows,
              const int32_t *wanted, int64_t num_wanted, const struct rotary *rotaries,
              const struct tables *tables, float *out, const struct workspace *work,
              int num_threads) {
  const struct layer *first = layers->layer;
  struct barrier barrier = {0};
  struct sharing sharing;
  if (share_out(&sharing, tables, first->num_heads, first->num_kv_heads, first->head_dim,
                num_threads))
    return -1;
#pragma omp parallel num_threads(num_threads)
  {
    const struct team team = team_in(&barrier);
    const float *input = x;
    for (int64_t i = 0; i < num_layers; i++, input = out) {
      const struct stacked *layer = layers + i;
      const struct wanted here = {i + 1 == num_layers ? wanted : NULL, num_wanted};
      run_layer(team, layer, tables + layer->group, input, rows, here, rotaries + layer->rotary,
                out, work, &sharing);
    }
  }
  end_sharing(&sharing);
  return 0;
}
