/* A barrier and work distribution for the threads of one parallel region.
 *
 * OpenMP's own barrier puts a thread to sleep at once if OMP_WAIT_POLICY is passive, and waking it
 * costs more than most of the work between two barriers of a decode step. This one spins for a
 * moment and then yields its core.
 */
#pragma once
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
#endif

#define SPINS 4000 /* some tens of microseconds */

struct barrier {
  atomic_int arrived, round;
  atomic_llong taken; /* pieces since the last time (next_piece) */
};

struct team { /* one thread's place in a parallel region */
  struct barrier *barrier;
  int thread, threads;
};

static inline struct team team_in(struct barrier *barrier) {
  return (struct team){barrier, omp_get_thread_num(), omp_get_num_threads()};
}

/* Returns once all threads have called it; what they wrote before is visible to all afterwards. */
static inline void team_barrier(struct team team) {
  struct barrier *b = team.barrier;
  if (team.threads == 1) return;
  const int round = atomic_load_explicit(&b->round, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) == team.threads - 1) {
    atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&b->taken, 0, memory_order_relaxed);
    atomic_store_explicit(&b->round, round + 1, memory_order_release);
    return;
  }
  for (int spins = 0; atomic_load_explicit(&b->round, memory_order_acquire) == round; spins++) {
    if (spins > SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    else __builtin_ia32_pause();
#endif
  }
}

/* Rows [first_row, end_row) are this thread's share of `rows`. */
static inline int64_t first_row(struct team team, int64_t rows) {
  return rows * team.thread / team.threads;
}

static inline int64_t end_row(struct team team, int64_t rows) {
  return rows * (team.thread + 1) / team.threads;
}

/* Pieces of work of about equal length: each thread owns a run of them, because memory is read
 * fastest in runs; the rest are taken one by one, because a thread may lose its core briefly. */
struct pieces {
  int64_t next, end; /* of the thread's own run */
  int64_t rest, count;
};

/* A thread owns `eighths` of its fair share. */
static inline struct pieces share_pieces(struct team team, int64_t count, int eighths) {
  const int64_t own = team.threads == 1 ? count : count * eighths / 8 / team.threads;
  return (struct pieces){own * team.thread, own * (team.thread + 1), own * team.threads, count};
}

/* The next piece, or -1. Between two barriers, only one set of pieces can be distributed. */
static inline int64_t next_piece(struct team team, struct pieces *pieces) {
  if (pieces->next < pieces->end) return pieces->next++;
  if (pieces->rest == pieces->count) return -1;
  const int64_t taken =
      atomic_fetch_add_explicit(&team.barrier->taken, 1, memory_order_relaxed) + pieces->rest;
  return taken < pieces->count ? taken : -1;
}
