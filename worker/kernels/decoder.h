/* A decoder layer (decoder.c): its parts, and the work of each thread of a team. */
#pragma once
#include "linear.h"
#include "threads.h"

enum { SILU = 0, GELU_TANH = 1 };

struct norm { /* x / sqrt(mean(x^2) + eps) * weight; weight NULL = no norm here */
  const float *weight;
  int64_t width;
  float eps;
};

struct layer { /* mirrored by a ctypes structure in worker/cpu_layers/decoder_layer.py */
  struct norm input, after_attention, before_mlp, after_mlp; /* the two `after`: before the sum */
  struct norm q, k; /* as wide as one head, or as all heads of a token */
  /* k and v are NULL if q_proj computes all three, up if gate computes both */
  const struct linear *q_proj, *k_proj, *v_proj, *o_proj, *gate, *up, *down;
  int64_t hidden, num_heads, num_kv_heads, head_dim, intermediate, activation;
};

struct workspace { /* intermediate values of one layer */
  float *normed, *summand; /* [rows][hidden] */
  float *qkv;              /* [rows][(num_heads + 2 num_kv_heads) head_dim] */
  float *attended;         /* [rows][num_heads head_dim] */
  float *gate_up;          /* [rows][2 intermediate] */
  void *scratch;           /* the maximum of linear_scratch */
};

struct rotary { /* [rows][dim]; rotates the two halves of the first `dim` of each head */
  const float *cos, *sin;
  int64_t dim; /* 0 = no rotation */
};

/* x[rows][hidden] -> work->qkv. Each thread ends with its own rows (first_row, end_row), without a
 * barrier. */
void before_attention(struct team team, const struct layer *layer, const float *x, int64_t rows,
                      const struct rotary *rotary, const struct workspace *work);

/* x and attended[rows][num_heads head_dim] -> out[rows][hidden], which may be x. Ends without a
 * barrier. */
void after_attention(struct team team, const struct layer *layer, const float *x,
                     const float *attended, int64_t rows, float *out,
                     const struct workspace *work);
