/* Paged attention (paged.c): its data, and the work of each thread of a team. */
#pragma once
#include "threads.h"

#include <stddef.h>
#include <stdint.h>

/* ---- mirrored by ctypes structures in worker/attention/cpu.py --------------------------- */

/* Each `dtype` is one of vectors.h. The pool's may differ from that of new_kv and queries. */

struct kv_layer { /* pages [block][K,V][kv_head][page_size][head_dim] of one layer */
  void *pages;
  int64_t block_stride; /* elements; inner dimensions are contiguous */
  int64_t num_kv_heads, page_size, head_dim, dtype;
};

struct new_kv { /* [T][num_kv_heads][head_dim], elements of a head contiguous */
  const void *k, *v;
  int64_t strides[4]; /* token and head of k, token and head of v */
  int64_t num_tokens, dtype;
};

struct call { /* AttentionCall of worker/attention/interface.py */
  const float *sinks; /* [num_heads] or NULL */
  float scaling, softcap; /* softcap 0 = none */
  int64_t sliding_window; /* 0 = none; counts the current token */
};

struct queries {
  const void *q; /* [T][num_heads][head_dim], elements of a head contiguous */
  int64_t token_stride, head_stride, num_heads, dtype;
  void *out; /* [T][num_heads][head_dim] contiguous, of the same dtype */
  struct call call;
};

struct tables { /* of a step, for the layers of one cache group */
  int64_t num_requests;
  const int32_t *query_start_loc, *seq_lens, *table_start, *blocks, *first_positions;
  const int64_t *slot_mapping; /* [T] */
};

/* ---- dividing a step's queries among threads --------------------------------------------- */

struct sharing { /* the same for all layers of a step, whatever their group */
  int64_t *tile_start; /* [num_requests + 1] */
  int64_t items;       /* tiles, or single kv heads of them if tiles are few */
  int shares, most_tokens, most_rows;
  float *scratch; /* [threads][num_floats] */
  size_t num_floats;
  atomic_llong next; /* the first item that no thread has taken */
};

/* Returns 0, or -1 if memory cannot be allocated; end_sharing frees it. */
int share_out(struct sharing *sharing, const struct tables *tables, int64_t num_heads,
              int64_t num_kv_heads, int64_t head_dim, int num_threads);
void end_sharing(struct sharing *sharing);

/* Called by one thread before every layer but the first, a barrier before attend_share. */
void begin_sharing(struct sharing *sharing);

/* Writes the keys and values of tokens [first, end) into their slots. */
void write_kv(const struct kv_layer *kv, const struct new_kv *new, const struct tables *tables,
              int64_t first, int64_t end);

/* After a barrier: processes items until none is left. */
void attend_share(struct team team, const struct kv_layer *kv, const struct queries *in,
                  const struct tables *tables, struct sharing *sharing);
