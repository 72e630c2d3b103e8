/* Threads of one parallel region that wait for each other, for a few microseconds at a time.
 *
 * OpenMP's own barrier sends a thread to sleep at once where OMP_WAIT_POLICY is passive, and waking
 * it costs more than most of the work between two barriers of a decode step. This one spins for a
 * moment and then gives its core away to whoever wants it.
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

struct meeting {
  atomic_int arrived, round;
  atomic_llong taken; /* of what lies between two meetings (take) */
};

/* Returns once all `threads` have called it; what they wrote before is seen by all behind it. */
static inline void meet(struct meeting *m, int threads) {
  if (threads == 1) return;
  const int round = atomic_load_explicit(&m->round, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&m->arrived, 1, memory_order_acq_rel) == threads - 1) {
    atomic_store_explicit(&m->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&m->taken, 0, memory_order_relaxed);
    atomic_store_explicit(&m->round, round + 1, memory_order_release);
    return;
  }
  for (int spins = 0; atomic_load_explicit(&m->round, memory_order_acquire) == round; spins++) {
    if (spins > SPINS) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    else __builtin_ia32_pause();
#endif
  }
}

struct team { /* one thread's place in a parallel region */
  struct meeting *meeting;
  int thread, threads;
};

static inline struct team team_in(struct meeting *meeting) {
  return (struct team){meeting, omp_get_thread_num(), omp_get_num_threads()};
}

static inline void together(struct team team) { meet(team.meeting, team.threads); }

/* rows [first_row, end_row) are this thread's share of `rows` */
static inline int64_t first_row(struct team team, int64_t rows) {
  return rows * team.thread / team.threads;
}

static inline int64_t end_row(struct team team, int64_t rows) {
  return rows * (team.thread + 1) / team.threads;
}

/* Pieces of work, about equally long: most of them in one run for each thread, as memory is read
 * fastest so; the rest one by one to whoever comes, as a thread may have lost its core for a moment. */
struct pieces {
  int64_t next, end; /* of the thread's own run */
  int64_t rest, count;
};

/* `eighths` of its fair share are a thread's own */
static inline struct pieces share_pieces(struct team team, int64_t count, int eighths) {
  const int64_t own = team.threads == 1 ? count : count * eighths / 8 / team.threads;
  return (struct pieces){own * team.thread, own * (team.thread + 1), own * team.threads, count};
}

/* The next piece, or -1. Between two meetings there may be one such sharing. */
static inline int64_t take(struct team team, struct pieces *pieces) {
  if (pieces->next < pieces->end) return pieces->next++;
  if (pieces->rest == pieces->count) return -1;
  const int64_t taken =
      atomic_fetch_add_explicit(&team.meeting->taken, 1, memory_order_relaxed) + pieces->rest;
  return taken < pieces->count ? taken : -1;
}
