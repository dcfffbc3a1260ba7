/* One job at a time is shared out among workers that stay; whoever else wants the pool meanwhile works alone.

A job lies in static memory, so that a worker that comes late may look at it at any time. Its tasks are cut into chunks,
and `ticket` holds how many of them nobody has claimed: whoever lowers it by one owns a chunk, and until that is finished
the job cannot end, which keeps what describes it as it is. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <stddef.h>

#include "threads.h"

static int run_alone(task work, void *about, long count) {
    int failed = 0;
    for (long index = 0; index < count; index++) failed |= work(about, index) != 0;
    return failed;
}

/* Another library's team, for calls among its own work: its threads would fight the pool's for the processor. */
static start_team team;
static __thread int apart;

struct turns {
    task work;
    void *about;
    long count, next;
    int failed;
};

static void take_turns(void *of) {
    struct turns *turns = of;
    for (long index; (index = __atomic_fetch_add(&turns->next, 1, __ATOMIC_RELAXED)) < turns->count;)
        if (turns->work(turns->about, index)) __atomic_store_n(&turns->failed, 1, __ATOMIC_RELAXED);
}

static int run_in_team(task work, void *about, long count, int threads) {
    struct turns turns = {work, about, count, 0, 0};
    team(take_turns, &turns, (unsigned)(count < threads ? count : threads), 0);
    return turns.failed;
}

void work_apart(int change) { apart += change; }

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_WORKERS 255
#define CHUNKS 64           /* of a thread: tasks beyond are taken several at a time */
#define IDLE_NS 50000       /* how long a worker looks out for the next job before it sleeps */
#define WAIT_NS 50000       /* how long a caller looks out for the last chunks before it sleeps */
#define LOOKS 32            /* between two questions for the time */
#define LINE __attribute__((aligned(64)))
#define LEFT_BITS 48
#define LEFT(ticket) ((long)((ticket) & (((uint64_t)1 << LEFT_BITS) - 1)))
#define THREADS(ticket) ((int)((ticket) >> LEFT_BITS)) /* that may take part: worker numbers below */

struct worker {
    int asleep LINE; /* 1: waits to be woken through this number */
};

static struct {
    uint64_t ticket LINE;
    int unfinished LINE; /* chunks; a caller sleeps on this number */
    int caller_sleeps, failed;
    task work LINE;
    void *about;
    long count, chunk, chunks;
    int taken LINE; /* by a caller */
    int workers, most, allowed, watched;
    struct worker each[MOST_WORKERS + 1]; /* from 1 on: 0 is the caller */
} pool = {.most = MOST_WORKERS + 1};

#define READ(place) __atomic_load_n(&(place), __ATOMIC_SEQ_CST)
#define WRITE(place, value) __atomic_store_n(&(place), value, __ATOMIC_SEQ_CST)

static void sleep_on(int *number, int value) { syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0); }
static void wake_at(int *number) { syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether a chunk was there to be claimed and has been run. */
static int run_chunk(int number) {
    uint64_t ticket = READ(pool.ticket);
    do
        if (!LEFT(ticket) || number >= THREADS(ticket)) return 0;
    while (!__atomic_compare_exchange_n(&pool.ticket, &ticket, ticket - 1, 1, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    long index = (pool.chunks - LEFT(ticket)) * pool.chunk, end = index + pool.chunk;
    if (end > pool.count) end = pool.count;
    int failed = 0;
    for (; index < end; index++) failed |= pool.work(pool.about, index) != 0;
    if (failed) WRITE(pool.failed, 1);
    if (__atomic_sub_fetch(&pool.unfinished, 1, __ATOMIC_SEQ_CST) == 0 && READ(pool.caller_sleeps)) wake_at(&pool.unfinished);
    return 1;
}

static int has_work(int number) {
    uint64_t ticket = READ(pool.ticket);
    return LEFT(ticket) && number < THREADS(ticket);
}

/* Looks out for work for a short time. */
static int finds_work(int number, long long patience) {
    int64_t until = nanoseconds() + patience;
    do
        for (int i = 0; i < LOOKS; i++) {
            if (has_work(number)) return 1;
            relax();
        }
    while (nanoseconds() < until);
    return 0;
}

static void *worker(void *given) {
    int number = (int)(intptr_t)given, *asleep = &pool.each[number].asleep;
    for (;;) {
        while (run_chunk(number)) {}
        if (finds_work(number, IDLE_NS)) continue;
        WRITE(*asleep, 1);
        while (!has_work(number) && READ(*asleep)) sleep_on(asleep, 1);
        WRITE(*asleep, 0);
    }
    return NULL;
}

/* A child of fork has none of the threads, and no other caller. */
static void forget(void) {
    team = NULL;
    for (int number = 0; number <= pool.workers; number++) pool.each[number].asleep = 0;
    pool.workers = pool.taken = pool.unfinished = pool.caller_sleeps = 0;
    pool.ticket = 0;
}

/* Processors that the calling thread may use. */
static int count_processors(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) ? INT_MAX : CPU_COUNT(&set);
}

static int watches_forks(void) {
    if (!pool.watched) pool.watched = !pthread_atfork(NULL, NULL, forget);
    return pool.watched;
}

static void start_workers(int wanted) {
    sigset_t every, before;
    if (!watches_forks()) return;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before); /* signals are for the program's own threads */
    while (pool.workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)(pool.workers + 1))) break;
        pthread_detach(thread);
        WRITE(pool.workers, pool.workers + 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static int one_sleeps(int threads) {
    for (int number = 1; number < threads; number++)
        if (READ(pool.each[number].asleep)) return 1;
    return 0;
}

/* As many of the wanted threads as there are, after a look at what the system allows if nothing has run lately. */
static int ready_threads(int wanted) {
    if (wanted > pool.most) wanted = pool.most;
    if (wanted - 1 > pool.workers || one_sleeps(wanted)) {
        pool.allowed = count_processors();
        if (wanted - 1 > pool.workers && pool.allowed > 1) start_workers((wanted < pool.allowed ? wanted : pool.allowed) - 1);
    }
    if (wanted > pool.allowed) wanted = pool.allowed;
    return wanted - 1 < pool.workers ? wanted : pool.workers + 1;
}

static void wait_for_others(void) {
    int64_t until = nanoseconds() + WAIT_NS;
    while (READ(pool.unfinished)) {
        for (int i = 0; i < LOOKS && READ(pool.unfinished); i++) relax();
        if (nanoseconds() < until) continue;
        WRITE(pool.caller_sleeps, 1);
        for (int left; (left = READ(pool.unfinished));) sleep_on(&pool.unfinished, left);
        WRITE(pool.caller_sleeps, 0);
    }
}

void use_team(start_team starter) { team = watches_forks() ? starter : NULL; }

int share(task work, void *about, long count, int threads) {
    int none = 0;
    if (threads > 1 && count > 1 && team && !apart) return run_in_team(work, about, count, threads);
    if (threads < 2 || count < 2 || !__atomic_compare_exchange_n(&pool.taken, &none, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return run_alone(work, about, count);
    threads = ready_threads(count < threads ? (int)count : threads);
    if (threads < 2) {
        WRITE(pool.taken, 0);
        return run_alone(work, about, count);
    }
    pool.work = work, pool.about = about, pool.count = count;
    pool.chunk = (count - 1) / ((long)CHUNKS * threads) + 1, pool.chunks = (count - 1) / pool.chunk + 1;
    WRITE(pool.failed, 0);
    WRITE(pool.unfinished, (int)pool.chunks);
    WRITE(pool.ticket, (uint64_t)threads << LEFT_BITS | (uint64_t)pool.chunks);
    for (int number = 1; number < threads; number++) {
        int asleep = 1; /* what is woken twice wakes once */
        if (__atomic_compare_exchange_n(&pool.each[number].asleep, &asleep, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            wake_at(&pool.each[number].asleep);
    }
    while (run_chunk(0)) {}
    wait_for_others();
    int failed = READ(pool.failed);
    WRITE(pool.taken, 0);
    return failed;
}

void limit_threads(int most) { WRITE(pool.most, most < 1 ? 1 : most > MOST_WORKERS + 1 ? MOST_WORKERS + 1 : most); }

int count_workers(void) { return READ(pool.workers); }

#else /* kernels serve on Linux; elsewhere the library builds, and a caller works alone */

void use_team(start_team starter) { team = starter; }

int share(task work, void *about, long count, int threads) {
    if (threads > 1 && count > 1 && team) return run_in_team(work, about, count, threads);
    return run_alone(work, about, count);
}

void limit_threads(int most) { (void)most; }
int count_workers(void) { return 0; }

#endif
