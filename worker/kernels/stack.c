/* All decoder layers of a step, attention included, in one parallel region.
 *
 * Waking a thread for a region costs as much as a small layer takes. Here it is paid once a step;
 * between stages threads wait for each other by spinning (threads.h). Arithmetic is that of
 * decoder.c and paged.c: a row has the bits that it has layer by layer.
 */
#include "decoder.h"
#include "paged.h"

#define ROWS_AT_ONCE 128 /* go through the layers' linear parts: what lies in between stays in a cache */

/* at most ROWS_AT_ONCE */
static int64_t rows_from(int64_t first, int64_t rows) {
  return rows - first < ROWS_AT_ONCE ? rows - first : ROWS_AT_ONCE;
}

struct stacked { /* mirrored by a ctypes structure in worker/decoder_stack.py */
  const struct layer *layer;
  struct kv_layer kv;
  struct call call;
  int64_t group, rotary; /* which of the step's tables, and of its embeddings */
};

static void run_layer(struct team team, const struct stacked *stacked, const struct tables *tables,
                      const float *x, int64_t rows, const struct rotary *rotary, float *out,
                      const struct workspace *work, struct sharing *sharing) {
  const struct layer *layer = stacked->layer;
  const int64_t head_dim = layer->head_dim;
  const int64_t q_width = layer->num_heads * head_dim, kv_width = layer->num_kv_heads * head_dim;
  const int64_t width = q_width + 2 * kv_width;
  const struct new_kv new = {
      .k = work->qkv + q_width,
      .v = work->qkv + q_width + kv_width,
      .strides = {width, head_dim, width, head_dim},
      .num_tokens = rows,
  };
  const struct queries queries = {
      .q = work->qkv,
      .token_stride = width,
      .head_stride = head_dim,
      .num_heads = layer->num_heads,
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
  if (rows > ROWS_AT_ONCE) together(team);
  write_kv(&stacked->kv, &new, tables, first_row(team, rows), end_row(team, rows));
  if (team.thread == 0) begin_sharing(sharing);
  together(team);
  attend_share(team, &stacked->kv, &queries, tables, sharing);
  together(team);
  for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
    const int64_t begin = first * layer->hidden;
    after_attention(team, layer, x + begin, work->attended + first * q_width,
                    rows_from(first, rows), out + begin, work);
    together(team);
  }
}

/* x[rows][hidden] -> out[rows][hidden], another place. `tables` are those of each cache group; all
 * layers have as many heads, as large ones. Returns 0, or -1 when memory is not to be had. */
int run_stack(const struct stacked *layers, int64_t num_layers, const float *x, int64_t rows,
              const struct rotary *rotaries, const struct tables *tables, float *out,
              const struct workspace *work, int num_threads) {
  const struct layer *first = layers->layer;
  struct meeting meeting = {0};
  struct sharing sharing;
  if (share_out(&sharing, tables, first->num_heads, first->num_kv_heads, first->head_dim,
                num_threads))
    return -1;
#pragma omp parallel num_threads(num_threads)
  {
    const struct team team = team_in(&meeting);
    const float *input = x;
    for (const struct stacked *layer = layers; layer < layers + num_layers; layer++, input = out)
      run_layer(team, layer, tables + layer->group, input, rows, rotaries + layer->rotary, out, work,
                &sharing);
  }
  end_sharing(&sharing);
  return 0;
}
