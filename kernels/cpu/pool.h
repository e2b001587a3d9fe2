/* Threads that share the tasks of one call, and sleep between calls.
 *
 * The caller works too, so `workers` threads need one less here. Each begins with a share of its own,
 * of tasks that follow one another, since what a task fetches early is for the one after it; then it
 * helps with the shares of others. Who computes a task makes no difference to its result. A caller
 * that finds the threads busy with another's call works alone.
 *
 * A thread that has not come in time is not waited for: it enters a call by counting itself `inside`
 * and then looks whether the call is still `open`; the caller closes first and then looks who is
 * inside. One of the two always sees the other.
 */

#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

enum { MOST_WORKERS = 64 };
enum { SPIN_NS = 100000 }; /* what a thread waits awake: the time between two calls of one step */

/* `worker`: 0 is the caller; no two that run at a time have the same number. */
typedef void task_t(const void *call, int64_t task, int worker);

static struct {
    pthread_mutex_t in_use, lock;
    pthread_cond_t wake;
    atomic_uint number; /* of the newest call */
    atomic_int sleepers, open, inside;
    int started, workers;
    task_t *run;
    const void *call;
    struct {
        _Alignas(64) atomic_llong next;
        int64_t end;
    } share[MOST_WORKERS];
} pool = {.in_use = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void do_tasks(int worker)
{
    int64_t task;
    for (int i = 0, share = worker; i < pool.workers; i++, share = (share + 1) % pool.workers)
        while ((task = atomic_fetch_add(&pool.share[share].next, 1)) < pool.share[share].end)
            pool.run(pool.call, task, worker);
}

static void await_call(unsigned last)
{
    for (int64_t until = now_ns() + SPIN_NS; now_ns() < until;)
        for (int i = 0; i < 32; i++) {
            if (atomic_load(&pool.number) != last)
                return;
            __builtin_ia32_pause();
        }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.number) == last)
        pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void *work(void *argument)
{
    int worker = (int)(intptr_t)argument;
    for (unsigned last = 0;;) {
        await_call(last);
        last = atomic_load(&pool.number);
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.open) && worker < pool.workers)
            do_tasks(worker);
        atomic_fetch_sub(&pool.inside, 1);
    }
    return 0;
}

/* Threads up to `workers`, or as many as there can be. They take no signals: those are the host's. */
static void start_threads(int workers)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started < workers - 1) {
        pthread_t thread;
        if (pthread_create(&thread, 0, work, (void *)(intptr_t)(pool.started + 1)))
            break;
        pthread_detach(thread);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

static void run_tasks(task_t *run, const void *call, int64_t tasks, int workers)
{
    if (workers > MOST_WORKERS)
        workers = MOST_WORKERS;
    if (workers <= 1 || tasks <= 1 || pthread_mutex_trylock(&pool.in_use)) {
        for (int64_t task = 0; task < tasks; task++)
            run(call, task, 0);
        return;
    }
    start_threads(workers);
    pool.run = run, pool.call = call, pool.workers = workers;
    for (int i = 0; i < workers; i++) {
        atomic_store(&pool.share[i].next, tasks * i / workers);
        pool.share[i].end = tasks * (i + 1) / workers;
    }
    atomic_store(&pool.open, 1);
    atomic_fetch_add(&pool.number, 1);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    do_tasks(0);
    atomic_store(&pool.open, 0);
    for (int i = 0; atomic_load(&pool.inside); i++) {
        __builtin_ia32_pause();
        if (i > 10000)
            sched_yield();
    }
    pthread_mutex_unlock(&pool.in_use);
}

/* A child of a fork has none of the threads, and takes no lock from its parent. */
static void forget_threads(void)
{
    pool.in_use = pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.started = 0;
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.open, 0);
}

__attribute__((constructor)) static void mind_forks(void)
{
    pthread_atfork(0, 0, forget_threads);
}
