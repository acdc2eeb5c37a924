/* The threads behind share_out: they spin for the time between two jobs of a step, then sleep. */

#define _GNU_SOURCE
#include "threads.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#define OPEN (1u << 31) /* of `state`: threads may enter */

typedef struct {
    TaskFunction *task;
    const void *job;
    int threads;
    _Alignas(64) atomic_ullong rest; /* tasks that nobody has taken: the first, and in the upper half the last + 1 */
} Job;

/* How long a thread spins before it sleeps: some hundred microseconds, about what lies between two jobs of a step. */
static atomic_int spins = 5000;

static struct {
    pthread_mutex_t busy;
    int workers;
    Job job;
    _Alignas(64) atomic_uint epoch; /* counts jobs; workers sleep on it */
    atomic_int sleepers;
    _Alignas(64) atomic_uint state; /* OPEN and the number of workers inside; the caller sleeps on it */
    atomic_int caller_sleeps;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER};

#ifdef __linux__
/* Until woken, unless `word` has changed already. */
static void sleep_on(atomic_uint *word, unsigned value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(atomic_uint *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
#else
static void sleep_on(atomic_uint *word, unsigned value) {
    (void)word, (void)value;
    sched_yield();
}

static void wake(atomic_uint *word) {
    (void)word;
}
#endif

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static int64_t take(Job *job, int from_back) {
    unsigned long long rest = atomic_load_explicit(&job->rest, memory_order_relaxed), left;
    int64_t taken;
    do {
        int64_t first = (int64_t)(rest & 0xffffffff), end = (int64_t)(rest >> 32);
        if (first >= end) return -1;
        taken = from_back ? --end : first++;
        left = (unsigned long long)first | (unsigned long long)end << 32;
    } while (!atomic_compare_exchange_weak_explicit(&job->rest, &rest, left, memory_order_relaxed, memory_order_relaxed));
    return taken;
}

static void work(Job *job, int thread) {
    int from_back = thread & 1, beside = (job->threads + 1 - from_back) / 2; /* threads at the same end */
    for (int64_t index; (index = take(job, from_back)) >= 0;) {
        unsigned long long rest = atomic_load_explicit(&job->rest, memory_order_relaxed);
        int64_t next = from_back ? index - beside : index + beside;
        if (next < (int64_t)(rest & 0xffffffff) || next >= (int64_t)(rest >> 32)) next = -1;
        job->task(job->job, index, next, thread);
    }
}

static unsigned next_epoch(unsigned seen) {
    for (int tries = 0;; tries++) {
        unsigned now = atomic_load(&pool.epoch);
        if (now != seen) return now;
        if (tries < atomic_load_explicit(&spins, memory_order_relaxed)) {
            pause_briefly();
            continue;
        }
        atomic_fetch_add(&pool.sleepers, 1);
        sleep_on(&pool.epoch, seen);
        atomic_fetch_sub(&pool.sleepers, 1);
    }
}

static void *run_worker(void *argument) {
    int thread = (int)(intptr_t)argument;
    for (unsigned seen = 0;;) {
        seen = next_epoch(seen);
        unsigned state = atomic_load(&pool.state);
        do {
            if (!(state & OPEN)) break; /* too late for this job */
        } while (!atomic_compare_exchange_weak(&pool.state, &state, state + 1));
        if (!(state & OPEN)) continue;
        if (thread < pool.job.threads) work(&pool.job, thread);
        if (atomic_fetch_sub(&pool.state, 1) == 1 && atomic_load(&pool.caller_sleeps)) wake(&pool.state);
    }
    return NULL;
}

/* A child has none of the threads, and nobody inside. */
static void forget_threads(void) {
    pthread_mutex_init(&pool.busy, NULL);
    pool.workers = 0;
    atomic_store(&pool.state, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.caller_sleeps, 0);
}

static void start_workers(int threads) {
    static int registered;
    if (pool.workers + 1 >= threads) return;
    if (!registered) registered = pthread_atfork(NULL, NULL, forget_threads) == 0;
    sigset_t all, before; /* signals are the program's own threads' */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.workers + 1 < threads) {
        pthread_t worker;
        if (pthread_create(&worker, NULL, run_worker, (void *)(intptr_t)(pool.workers + 1))) break; /* fewer do all the same work */
        pthread_detach(worker);
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void wait_until_left(void) {
    unsigned state = atomic_fetch_and(&pool.state, ~OPEN) & ~OPEN;
    for (int tries = 0; state; tries++, state = atomic_load(&pool.state)) {
        if (tries < atomic_load_explicit(&spins, memory_order_relaxed)) {
            pause_briefly();
            continue;
        }
        /* The core is free for the thread that is late. */
        atomic_store(&pool.caller_sleeps, 1);
        sleep_on(&pool.state, state);
        atomic_store(&pool.caller_sleeps, 0);
    }
}

void share_out(int threads, int64_t count, TaskFunction *task, const void *job) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads < 2 || count < 2 || pthread_mutex_trylock(&pool.busy)) {
        for (int64_t index = 0; index < count; index++) task(job, index, index + 1 < count ? index + 1 : -1, 0);
        return;
    }
    start_workers(threads);
    pool.job.task = task;
    pool.job.job = job;
    pool.job.threads = threads;
    atomic_store(&pool.job.rest, (unsigned long long)count << 32);
    atomic_store(&pool.state, OPEN);
    atomic_fetch_add(&pool.epoch, 1);
    if (atomic_load(&pool.sleepers)) wake(&pool.epoch);
    work(&pool.job, 0);
    wait_until_left();
    pthread_mutex_unlock(&pool.busy);
}

typedef struct {
    RowsFunction *work;
    const void *job;
    int64_t count, at_once;
} Rows;

static void rows_task(const void *argument, int64_t index, int64_t next, int thread) {
    (void)next, (void)thread;
    const Rows *rows = argument;
    int64_t first = index * rows->at_once, end = first + rows->at_once;
    rows->work(rows->job, first, end < rows->count ? end : rows->count);
}

void share_rows(int threads, int64_t count, int at_once, RowsFunction *work, const void *job) {
    Rows rows = {work, job, count, at_once};
    share_out(threads, (count + at_once - 1) / at_once, rows_task, &rows);
}

/* For work that alternates with that of other threads on the same cores, which spinning would keep waiting. */
void batchrun_sleep_soon(void) {
    atomic_store(&spins, 50);
}
