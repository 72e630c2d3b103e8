/* A decoder layer (decoder.c): what it consists of, and what each thread of a team does of it. */
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
  struct norm q, k; /* as wide as a head, or as all heads of a token */
  /* k and v are NULL where q gives all three, one after the other; up likewise, behind gate */
  const struct linear *q_proj, *k_proj, *v_proj, *o_proj, *gate, *up, *down;
  int64_t hidden, num_heads, num_kv_heads, head_dim, intermediate, activation;
};

struct workspace { /* all of it holds one layer's values only */
  float *normed, *summand; /* [rows][hidden] */
  float *qkv;              /* [rows][(num_heads + 2 num_kv_heads) head_dim] */
  float *attended;         /* [rows][num_heads head_dim] */
  float *gate_up;          /* [rows][2 intermediate] */
  void *scratch;           /* what linear_scratch asks for at most */
};

struct rotary { /* [rows][dim], rotates the first `dim` of each head, halves against each other */
  const float *cos, *sin;
  int64_t dim; /* 0 = no rotation */
};

/* x[rows][hidden] -> work->qkv. Each thread ends with its own rows (first_row, end_row), without a
 * barrier behind them. */
void before_attention(struct team team, const struct layer *layer, const float *x, int64_t rows,
                      const struct rotary *rotary, const struct workspace *work);

/* x and attended[rows][num_heads head_dim] -> out[rows][hidden], which may be x. No barrier behind
 * it. */
void after_attention(struct team team, const struct layer *layer, const float *x,
                     const float *attended, int64_t rows, float *out,
                     const struct workspace *work);
