/* Threads of the library's own, which share out numbered tasks.

A caller waits for tasks that somebody has begun, never for a thread that the system has not scheduled: where a
processor is taken by another program, the caller does most of the work itself. */
typedef int (*task)(void *about, long index);

/* Runs `work` for every index below `count` on up to `threads` threads, the caller's included. Which thread runs an index
is left to chance, so a task's result must not depend on it. Returns 0, or 1 if one of the tasks did not return 0. */
int share(task work, void *about, long count, int threads);

/* The function of OpenMP that runs another on so many threads, from the library that PyTorch uses, or NULL. A call that is not
made apart runs there: among PyTorch's operators a second pool would fight the first, whose threads go on spinning for
milliseconds. A child of fork, where OpenMP does not work, forgets it. */
typedef void (*start_team)(void (*)(void *), void *, unsigned, unsigned);
void use_team(start_team starter);

/* 1: what this thread shares out from now on is for the pool, because it is the work of a whole model, which nothing of
PyTorch interrupts; -1: no longer. */
void work_apart(int change);

/* The most threads that may work at once, the caller included: what a quota of processor time allows. */
void limit_threads(int most);

/* How many threads wait for work or do it, callers not counted. */
int count_workers(void);
