/* A decoder layer around its attention: norms, projections, rotary embedding, MLP, residuals.
 *
 * before_attention computes queries, keys and values from the layer's input; after_attention its
 * output from the input and the result of attention. float32 throughout, on the CPU. Threads divide
 * the packed linear layers (linear.h) by output features, and everything else by rows. A row's bits
 * depend on that row alone: every sum has one fixed order.
 */
#include "decoder.h"
#include "vectors.h"

#include <math.h>

/* ---- a row ------------------------------------------------------------------------------ */

static void normalise(const struct norm *norm, const float *x, float *out, int64_t width) {
  vec sums = splat(0.0f);
  float sum = 0.0f;
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    const vec part = load(x + i);
    sums = fma8(part, part, sums);
  }
  for (; i < width; i++) sum += x[i] * x[i];
  sum += sum_lanes(sums);
  const float scale = 1.0f / sqrtf(sum / (float)width + norm->eps);
  for (i = 0; i < width; i++) out[i] = norm->weight[i] * (x[i] * scale);
}

/* All heads of a token, [heads][head_dim]. */
static void normalise_heads(const struct norm *norm, float *heads, int64_t width) {
  if (!norm->weight) return;
  for (int64_t i = 0; i < width; i += norm->width)
    normalise(norm, heads + i, heads + i, norm->width);
}

static void rotate_heads(const float *restrict cos, const float *restrict sin, int64_t dim,
                         float *restrict heads, int64_t num_heads, int64_t head_dim) {
  const int64_t half = dim / 2;
  for (int64_t h = 0; h < num_heads; h++, heads += head_dim)
    for (int64_t i = 0; i < half; i++) {
      const float a = heads[i], b = heads[i + half];
      heads[i] = a * cos[i] - b * sin[i];
      heads[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* gate[i] = act(gate[i]) * up[i] */
static void activate(int64_t activation, float *gate, const float *up, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    const int64_t left = width - i;
    float part[2][LANES] = {{0}};
    vec x, y;
    if (left >= LANES) {
      x = load(gate + i);
      y = load(up + i);
    } else {
      memcpy(part[0], gate + i, sizeof(float) * (size_t)left);
      memcpy(part[1], up + i, sizeof(float) * (size_t)left);
      x = load(part[0]);
      y = load(part[1]);
    }
    /* GELU's tanh form is x times the logistic function of 2 sqrt(2/pi) (x + 0.044715 x^3) */
    vec slope = x;
    if (activation == GELU_TANH)
      slope = splat(1.5957691216057308f) * fma8(splat(0.044715f) * x * x, x, x);
    const vec result = x / (splat(1.0f) + exp8(-slope)) * y;
    if (left >= LANES) {
      store(gate + i, result);
    } else {
      store(part[0], result);
      memcpy(gate + i, part[0], sizeof(float) * (size_t)left);
    }
  }
}

/* ---- a layer ---------------------------------------------------------------------------- */

/* Linear layers over the same rows; the first NULL ends the list. */
struct projection {
  const struct linear *layers[3];
  const float *x;
  int64_t x_stride, rows;
  void *scratch;
};

/* Called when the thread's own rows of x are written, without a barrier; ends with one. */
static void prepare(struct team team, const struct projection *p) {
  linear_prepare(p->layers[0], p->x, p->x_stride, p->rows, p->scratch, team);
  team_barrier(team);
}

/* After prepare. The layers' results are adjacent in a row of `out`. */
static void project(struct team team, const struct projection *p, float *out, int64_t out_stride,
                    int accumulate) {
  int count;
  for (int i = 0; i < 3 && p->layers[i]; i += count) {
    const struct linear *const *layers = p->layers + i;
    if (i) { /* this layer needs another preparation */
      team_barrier(team);
      linear_prepare(*layers, p->x, p->x_stride, p->rows, p->scratch, team);
      team_barrier(team);
    }
    for (count = 1; i + count < 3 && layers[count]; count++)
      if (preparation_of(layers[count]) != preparation_of(*layers)) break;
    linear_share(layers, count, p->x, p->x_stride, p->rows, out, out_stride, accumulate,
                 p->scratch, team);
    for (int j = 0; j < count; j++) out += layers[j]->out_features;
  }
}

void before_attention(struct team team, const struct layer *layer, const float *x, int64_t rows,
                      const struct rotary *rotary, const struct workspace *work) {
  const int64_t hidden = layer->hidden, head_dim = layer->head_dim;
  const int64_t q_width = layer->num_heads * head_dim, kv_width = layer->num_kv_heads * head_dim;
  const int64_t width = q_width + 2 * kv_width;
  const int64_t first = first_row(team, rows), end = end_row(team, rows);
  if (layer->input.weight) {
    for (int64_t r = first; r < end; r++)
      normalise(&layer->input, x + r * hidden, work->normed + r * hidden, hidden);
    x = work->normed;
  }
  const struct projection qkv = {
      {layer->q_proj, layer->k_proj, layer->v_proj}, x, hidden, rows, work->scratch};
  prepare(team, &qkv);
  project(team, &qkv, work->qkv, width, 0);
  team_barrier(team);
  for (int64_t r = first; r < end; r++) {
    float *q = work->qkv + r * width, *k = q + q_width;
    normalise_heads(&layer->q, q, q_width);
    normalise_heads(&layer->k, k, kv_width);
    /* queries and keys are adjacent */
    rotate_heads(rotary->cos + r * rotary->dim, rotary->sin + r * rotary->dim, rotary->dim, q,
                 layer->num_heads + layer->num_kv_heads, head_dim);
  }
}

void after_attention(struct team team, const struct layer *layer, const float *x,
                     const float *attended, int64_t rows, float *out,
                     const struct workspace *work) {
  const int64_t hidden = layer->hidden, inner = layer->intermediate;
  const int64_t q_width = layer->num_heads * layer->head_dim;
  const int64_t first = first_row(team, rows), end = end_row(team, rows);
  const struct projection o = {{layer->o_proj}, attended, q_width, rows, work->scratch};
  if (preparation_of(layer->o_proj) != AS_IT_IS) prepare(team, &o);
  project(team, &o, work->summand, hidden, 0);
  team_barrier(team);
  for (int64_t r = first * hidden; r < end * hidden; r += hidden) {
    float *summand = work->summand + r;
    if (layer->after_attention.weight)
      normalise(&layer->after_attention, summand, summand, hidden);
    for (int64_t i = 0; i < hidden; i++) out[r + i] = x[r + i] + summand[i];
    if (layer->before_mlp.weight)
      normalise(&layer->before_mlp, out + r, work->normed + r, hidden);
  }
  const float *mlp_input = layer->before_mlp.weight ? work->normed : out;
  const struct projection gate_up = {
      {layer->gate, layer->up}, mlp_input, hidden, rows, work->scratch};
  prepare(team, &gate_up);
  project(team, &gate_up, work->gate_up, 2 * inner, 0);
  team_barrier(team);
  for (int64_t r = first; r < end; r++) {
    float *gate = work->gate_up + r * 2 * inner;
    activate(layer->activation, gate, gate + inner, inner);
  }
  const struct projection down = {{layer->down}, work->gate_up, 2 * inner, rows, work->scratch};
  prepare(team, &down);
  if (!layer->after_mlp.weight) {
    project(team, &down, out, hidden, 1);
    return;
  }
  project(team, &down, work->summand, hidden, 0);
  team_barrier(team);
  for (int64_t r = first * hidden; r < end * hidden; r += hidden) {
    float *summand = work->summand + r;
    normalise(&layer->after_mlp, summand, summand, hidden);
    for (int64_t i = 0; i < hidden; i++) out[r + i] += summand[i];
  }
}

/* before_attention in a parallel region of its own. */
void layer_begin(const struct layer *layer, const float *x, int64_t rows,
                 const struct rotary *rotary, const struct workspace *work, int num_threads) {
  struct barrier barrier = {0};
#pragma omp parallel num_threads(num_threads)
  before_attention(team_in(&barrier), layer, x, rows, rotary, work);
}

/* after_attention likewise. */
void layer_end(const struct layer *layer, const float *x, const float *attended, int64_t rows,
               float *out, const struct workspace *work, int num_threads) {
  struct barrier barrier = {0};
#pragma omp parallel num_threads(num_threads)
  after_attention(team_in(&barrier), layer, x, attended, rows, out, work);
}
