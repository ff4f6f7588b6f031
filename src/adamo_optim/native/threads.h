/* A few sleeping threads that help with one call at a time.

   `parallel(threads, work, argument)` runs work(argument) on the calling thread and on up to
   threads − 1 helpers, and returns when all are back. Helpers start when first wanted, sleep
   between calls, and leave when a later call wants fewer. Calls from several threads take turns.
   A child made by fork() has no helpers and starts its own. Not OpenMP: torch brings one OpenMP
   runtime already, and two of them in one process do not get along. */

#ifndef ADAMO_THREADS_H
#define ADAMO_THREADS_H

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>

static struct {
    pthread_mutex_t turn;      /* held by the call that uses the helpers */
    pthread_mutex_t lock;      /* guards what follows */
    pthread_cond_t start, end;
    unsigned long calls;       /* how many calls there were: tells a helper of a new one */
    int helpers, wanted, busy; /* alive, asked for by the last call, working */
    void (*work)(void *);      /* NULL: too late to join */
    void *argument;
    fenv_t environment;        /* of the caller: flushing of denormals, rounding */
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .start = PTHREAD_COND_INITIALIZER,
          .end = PTHREAD_COND_INITIALIZER};

static void *help(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    unsigned long seen = pool.calls - 1; /* a helper is started for the call that waits for it */
    while (pool.helpers <= pool.wanted) {
        if (pool.calls == seen) {
            pthread_cond_wait(&pool.start, &pool.lock);
            continue;
        }
        seen = pool.calls;
        if (!pool.work)
            continue;
        pool.busy++;
        void (*work)(void *) = pool.work;
        void *argument = pool.argument;
        fesetenv(&pool.environment);
        pthread_mutex_unlock(&pool.lock);
        work(argument);
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0)
            pthread_cond_signal(&pool.end);
    }
    pool.helpers--;
    pthread_mutex_unlock(&pool.lock);
    return NULL;
}

/* Start helpers up to the number wanted; with fewer the work only takes longer. */
static void hire(void)
{
    pthread_attr_t detached;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's own threads */
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; pool.helpers < pool.wanted; pool.helpers++)
        if (pthread_create(&thread, &detached, help, NULL))
            break;
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void parallel(int threads, void (*work)(void *), void *argument)
{
    if (threads <= 1) {
        work(argument);
        return;
    }
    pthread_mutex_lock(&pool.turn);
    pthread_mutex_lock(&pool.lock);
    pool.calls++;
    pool.wanted = threads - 1;
    pool.work = work;
    pool.argument = argument;
    fegetenv(&pool.environment);
    hire();
    pthread_cond_broadcast(&pool.start);
    pthread_mutex_unlock(&pool.lock);

    work(argument);

    pthread_mutex_lock(&pool.lock);
    pool.work = NULL;
    while (pool.busy > 0)
        pthread_cond_wait(&pool.end, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.turn);
}

static void before_fork(void)
{
    pthread_mutex_lock(&pool.turn);
    pthread_mutex_lock(&pool.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.turn);
}

static void after_fork_in_child(void)
{
    pool.helpers = pool.wanted = pool.busy = 0;
    pthread_cond_init(&pool.start, NULL); /* the parent's helpers still sleep on the old ones */
    pthread_cond_init(&pool.end, NULL);
    after_fork_in_parent();
}

static void prepare_for_fork(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

#endif
