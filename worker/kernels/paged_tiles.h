/* The inner loops of paged attention: scores, softmax weights, weighted sums, for a block of keys.
 *
 * Every sum has one order of operations, whatever the shape of a tile: see paged.c.
 */
#pragma once
#include "vectors.h"

#include <math.h>

#define KEYS 64   /* keys per block of the online softmax */
#define STREAMS 4 /* a block is read as this many runs of keys side by side */
#define RUN (KEYS / STREAMS)

/* Within a block the keys are ordered 0, 16, 32, 48, 1, 17, ...: place 4 i + c is key 16 c + i.
 * With pages of 16 tokens these are four pages side by side, each read from its begin to its end:
 * the CPU fetches ahead on each of them, which it does not on rows of one page in turn. */

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

/* Softmax weights of one row from its scores, in place; only keys in [from, to) are visible.
 * Returns what earlier sums are to be multiplied with. */
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

/* calls f(3, row), then f(2, row) or f(1, row), so that row counts are constants inside */
#define BY_THREES(rows, f)                                                                        \
  do {                                                                                            \
    int row = 0;                                                                                  \
    for (; row + 3 <= (rows); row += 3) f(3, row);                                                \
    if ((rows) - row == 2) f(2, row);                                                             \
    if ((rows) - row == 1) f(1, row);                                                             \
  } while (0)

/* while `block` is read, fetch `next` */
INLINE void fetch_while(struct block *block, struct block next) {
  block->ahead_runs = next.runs;
  for (int c = 0; c < next.runs; c++) block->ahead[c] = next.first[c];
}
