/* The inner loops of paged attention: scores, softmax weights, weighted sums, for a block of keys.
 *
 * Every sum has one fixed order of operations, whatever the shape of a tile: see paged.c.
 */
#pragma once
#include "vectors.h"

#include <math.h>

#define KEYS 64   /* keys per block of the online softmax */
#define STREAMS 4 /* a block is read as this many parallel runs of keys */
#define RUN (KEYS / STREAMS)
#define FEW 8 /* rows of a run that are used for all queries before the next rows */
#define LINE_BYTES 64 /* of a cache */

/* Within a block the keys are ordered 0, 16, 32, 48, 1, 17, ...: place 4 i + c is key 16 c + i.
 * With pages of 16 tokens these are four pages in parallel, each read from start to end: the CPU
 * prefetches along each of them, which it does not for the rows of one page in turn. */

struct block { /* keys or values of a block: run c begins at first[c], one row per `stride` bytes */
  const char *first[STREAMS];
  int64_t stride;
  int dtype;        /* FLOAT32 or FLOAT16 when it is computed with */
  int runs, length; /* number of runs, and the rows of each */
  int last;         /* rows of the last run */
  int ahead_runs;   /* of the next block, prefetched meanwhile */
  int64_t ahead_stride;
  const char *ahead[STREAMS];
};

/* Prefetches row `i` of the next block's runs. */
INLINE void fetch_ahead(const struct block *block, int i) {
  for (int c = 0; c < block->ahead_runs; c++)
    for (int64_t at = 0; at < block->ahead_stride; at += LINE_BYTES)
      __builtin_prefetch(block->ahead[c] + i * block->ahead_stride + at);
}

/* Eight numbers from the `d`-th of a row on; `dtype` is a constant at each call. */
INLINE vec load_part(const char *row, int d, int dtype) {
  return dtype == FLOAT16 ? load_float16((const uint16_t *)row + d) : load((const float *)row + d);
}

/* calls f(3, row), then f(2, row) or f(1, row), so that row counts are constants inside */
#define BY_THREES(rows, f)                                                                        \
  do {                                                                                            \
    int row = 0;                                                                                  \
    for (; row + 3 <= (rows); row += 3) {                                                         \
      f(3, row);                                                                                  \
    }                                                                                             \
    if ((rows) - row == 2) {                                                                      \
      f(2, row);                                                                                  \
    }                                                                                             \
    if ((rows) - row == 1) {                                                                      \
      f(1, row);                                                                                  \
    }                                                                                             \
  } while (0)

/* scores[r][4 i + c] = q[r] . k[c][i] for `rows` rows and i in [from, to); places without a key get
 * arbitrary scores. Prefetches if `fetches`. `rows` and `runs` are constants at each call. */
INLINE void dot_tile(int rows, int runs, int dtype, const struct block *keys, int from, int to,
                     const float *q, int dim, float *scores, int fetches) {
  for (int i = from; i < to; i++) {
    const int64_t at = i * keys->stride;
    if (fetches) fetch_ahead(keys, i);
    vec sums[3][STREAMS] = {{{0}}};
    for (int d = 0; d < dim; d += LANES) {
      vec query[3];
      for (int r = 0; r < rows; r++) {
        query[r] = load(q + r * dim + d);
        IN_REGISTER(query[r]);
      }
      for (int c = 0; c < runs; c++) {
        vec key = load_part(keys->first[c] + at, d, dtype);
        IN_REGISTER(key);
        for (int r = 0; r < rows; r++) sums[r][c] = fma8(query[r], key, sums[r][c]);
      }
    }
    for (int r = 0; r < rows; r++) sum_lanes4(sums[r], scores + r * KEYS + i * STREAMS);
  }
}

INLINE void dot_few(int runs, int dtype, const struct block *keys, int from, int to, const float *q,
                    int rows, int dim, float *scores) {
#define DOT(n, row)                                                                               \
  dot_tile(n, runs, dtype, keys, from, to, q + row * dim, dim, scores + row * KEYS, row == 0)
  BY_THREES(rows, DOT);
}

/* A few keys for all rows, then the next ones, so that they stay in the first-level cache. */
INLINE void dot_rows(int dtype, const struct block *keys, const float *q, int rows, int dim,
                     float *scores) {
  const int few = rows > 3 ? FEW : RUN; /* three are computed at once */
  for (int i = 0; i < keys->length; i += few) {
    const int to = i + few < keys->length ? i + few : keys->length;
    switch (keys->runs) {
      case 1: dot_few(1, dtype, keys, i, to, q, rows, dim, scores); break;
      case 2: dot_few(2, dtype, keys, i, to, q, rows, dim, scores); break;
      case 3: dot_few(3, dtype, keys, i, to, q, rows, dim, scores); break;
      default: dot_few(STREAMS, dtype, keys, i, to, q, rows, dim, scores);
    }
  }
}

/* float16 in a function of its own, so that both variants can use all registers. */
NOINLINE void dot_halves(const struct block *keys, const float *q, int rows, int dim, float *scores) {
  dot_rows(FLOAT16, keys, q, rows, dim, scores);
}

INLINE void dot_block(const struct block *keys, const float *q, int rows, int dim, float *scores) {
  if (keys->dtype == FLOAT16) dot_halves(keys, q, rows, dim, scores);
  else dot_rows(FLOAT32, keys, q, rows, dim, scores);
}

/* out[r] += sum over the keys in [from, to) of each run, of weight * value; `vecs` vectors wide */
INLINE void mix_tile(int rows, int vecs, int runs, int dtype, const struct block *values, int from,
                     int to, const float *weights, int d, float *out, int dim) {
  vec sums[3][4];
  EACH(r, rows) EACH(c, vecs) sums[r][c] = load(out + r * dim + d + c * LANES);
  const char *first[STREAMS];
  EACH(j, runs) first[j] = values->first[j] + from * values->stride;
  weights += from * STREAMS;
  for (int i = from; i < to; i++, weights += STREAMS)
    EACH(j, runs) {
      vec weight[3];
      EACH(r, rows) {
        weight[r] = splat(weights[r * KEYS + j]);
        IN_REGISTER(weight[r]);
      }
      EACH(c, vecs) {
        vec part = load_part(first[j], d + c * LANES, dtype);
        IN_REGISTER(part);
        EACH(r, rows) sums[r][c] = fma8(weight[r], part, sums[r][c]);
      }
      first[j] += values->stride;
    }
  EACH(r, rows) EACH(c, vecs) store(out + r * dim + d + c * LANES, sums[r][c]);
}

/* The hot loop of long chunks. */
NOINLINE void mix_full_tile(const struct block *values, int from, int to, const float *weights, int d,
                         float *out, int dim) {
  mix_tile(3, 4, STREAMS, FLOAT32, values, from, to, weights, d, out, dim);
}

INLINE void mix_few(int runs, int dtype, const struct block *values, int from, int to,
                    const float *weights, float *out, int rows, int dim) {
  int d = 0;
#define MIX_FOUR(n, row)                                                                          \
  if (n == 3 && runs == STREAMS && dtype == FLOAT32 && rows > 3)                                  \
    mix_full_tile(values, from, to, weights + row * KEYS, d, out + row * dim, dim);               \
  else                                                                                            \
    mix_tile(n, 4, runs, dtype, values, from, to, weights + row * KEYS, d, out + row * dim, dim)
#define MIX_ONE(n, row)                                                                           \
  mix_tile(n, 1, runs, dtype, values, from, to, weights + row * KEYS, d, out + row * dim, dim)
  for (; d + 4 * LANES <= dim; d += 4 * LANES) BY_THREES(rows, MIX_FOUR);
  for (; d < dim; d += LANES) BY_THREES(rows, MIX_ONE);
}

/* Memory after the last key may hold anything, and 0 times NaN is NaN: so it is excluded. */
INLINE void mix_rows(int dtype, const struct block *values, const float *weights, float *out,
                     int rows, int dim) {
  for (int i = 0, to; i < values->length; i = to) {
    const int runs = i < values->last ? values->runs : values->runs - 1;
    const int end = i < values->last ? values->last : values->length;
    const int few = rows > 3 ? FEW : 4; /* they are read in two passes */
    to = i + few < end ? i + few : end;
    for (int row = i; row < to; row++) fetch_ahead(values, row);
    switch (runs) {
      case 0: break;
      case 1: mix_few(1, dtype, values, i, to, weights, out, rows, dim); break;
      case 2: mix_few(2, dtype, values, i, to, weights, out, rows, dim); break;
      case 3: mix_few(3, dtype, values, i, to, weights, out, rows, dim); break;
      default: mix_few(STREAMS, dtype, values, i, to, weights, out, rows, dim);
    }
  }
}

NOINLINE void mix_halves(const struct block *values, const float *weights, float *out, int rows,
                      int dim) {
  mix_rows(FLOAT16, values, weights, out, rows, dim);
}

INLINE void mix_block(const struct block *values, const float *weights, float *out, int rows,
                      int dim) {
  if (values->dtype == FLOAT16) mix_halves(values, weights, out, rows, dim);
  else mix_rows(FLOAT32, values, weights, out, rows, dim);
}

/* Softmax weights of one row from its scores, in place; only keys in [from, to) are visible.
 * Returns the factor for earlier sums. */
INLINE float weigh(float *scores, int places, int from, int to, float scaling,
                   float softcap, float *max, float *sum) {
  vec top = splat(*max), total = splat(0.0f);
  ivec key = {0, RUN, 2 * RUN, 3 * RUN, 1, RUN + 1, 2 * RUN + 1, 3 * RUN + 1};
  const int all = from <= 0 && to >= KEYS;
  for (int j = 0; j < places; j += LANES, key += LANES / STREAMS) {
    vec s = load(scores + j) * splat(scaling);
    if (softcap != 0.0f) s = soft_cap(s, softcap);
    if (!all) s = pick((key >= from) & (key < to), s, splat(-INFINITY));
    store(scores + j, s);
    top = larger(s, top);
  }
  const float highest = max_lanes(top);
  for (int j = 0; j < places; j += LANES) {
    vec weight = exp8(load(scores + j) - splat(highest));
    store(scores + j, weight);
    total = total + weight;
  }
  const float decay = highest > *max ? exp8(splat(*max - highest))[0] : 1.0f;
  *sum = *sum * decay + sum_lanes(total);
  *max = highest;
  return decay;
}

/* Has `next` prefetched while `block` is read. */
INLINE void fetch_while(struct block *block, struct block next) {
  block->ahead_runs = next.runs;
  block->ahead_stride = next.stride;
  for (int c = 0; c < next.runs; c++) block->ahead[c] = next.first[c];
}
