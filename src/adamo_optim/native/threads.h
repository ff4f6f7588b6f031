/* `parallel(threads, work, argument)` runs work(argument) on several threads at once: on the calling
   one and on up to threads − 1 others. It returns when all are back.

   The others are those of torch's own OpenMP runtime, reached through the function that compilers
   make of `omp parallel`. After a backward pass they still spin, and helpers of our own would have
   to share the cores with them; a second OpenMP runtime, as linking one would bring, all the more.

   OpenMP does not survive fork(), so a child of a process that has loaded this kernel gets helpers
   of its own, as does a torch without OpenMP. They start when first wanted, sleep between calls, and
   leave when a later call wants fewer. Calls from several threads take turns with them. */

#ifndef ADAMO_THREADS_H
#define ADAMO_THREADS_H

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>

typedef void (*OpenMP)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);

static OpenMP openmp; /* NULL: use helpers */

static struct {
    pthread_mutex_t turn;      /* held by the call that uses the helpers */
    pthread_mutex_t lock;      /* guards what follows */
    pthread_cond_t start, end;
    unsigned long calls;       /* how many calls there were: tells a helper of a new one */
    int helpers, wanted, busy; /* alive, asked for by the last call, working */
    void (*work)(void *);      /* NULL: too late to join */
    void *argument;
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
    if (openmp) {
        openmp(work, argument, (unsigned)threads, 0);
        return;
    }
    pthread_mutex_lock(&pool.turn);
    pthread_mutex_lock(&pool.lock);
    pool.calls++;
    pool.wanted = threads - 1;
    pool.work = work;
    pool.argument = argument;
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
    openmp = NULL;
    pool.helpers = pool.wanted = pool.busy = 0;
    pthread_cond_init(&pool.start, NULL); /* the parent's helpers still sleep on the old ones */
    pthread_cond_init(&pool.end, NULL);
    after_fork_in_parent();
}

static void find_openmp(void)
{
    openmp = (OpenMP)dlsym(RTLD_DEFAULT, "GOMP_parallel");
}

static void prepare_for_fork(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* Once a process, however often the module is imported: a second handler would wait for the lock
   that the first one holds. */
static void prepare_threads(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    find_openmp();
    pthread_once(&once, prepare_for_fork);
}

#endif
