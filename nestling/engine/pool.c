/* Threads that wait for the next step, and the barrier inside one.

   A step is over in a millisecond and has a few hundred barriers, so waiting threads spin at first; they stop spinning
   soon, because a thread that spins takes the core from whoever it waits for. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "native.h"

#define MOST 256
#define SPINS 3000

#if defined(__x86_64__) || defined(__i386__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; /* one step at a time has the threads */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static int num_started;
static pid_t owner;
static atomic_uint generation;
static atomic_int num_sleeping, num_running, num_arrived;
static atomic_uint phase;
static int wanted;
static void (*job)(void *, int);
static void *job_argument;

static void *serve(void *given) {
    int thread = (int)(intptr_t)given & 0xffff;
    unsigned seen = (unsigned)((intptr_t)given >> 16);
    for (;;) {
        int spins = 0;
        while (atomic_load(&generation) == seen) {
            if (spins++ < SPINS) {
                RELAX();
                continue;
            }
            pthread_mutex_lock(&lock);
            atomic_fetch_add(&num_sleeping, 1);
            while (atomic_load(&generation) == seen) pthread_cond_wait(&wake, &lock);
            atomic_fetch_sub(&num_sleeping, 1);
            pthread_mutex_unlock(&lock);
        }
        seen = atomic_load(&generation);
        if (thread < wanted) {
            job(job_argument, thread);
        }
        atomic_fetch_sub(&num_running, 1);
    }
    return NULL;
}

static void start(int num_threads) {
    if (owner != getpid()) { /* after a fork the threads are the parent's */
        owner = getpid();
        num_started = 0;
        atomic_store(&num_sleeping, 0);
    }
    while (num_started < num_threads - 1) {
        pthread_t made;
        intptr_t given = (intptr_t)(num_started + 1) | ((intptr_t)(atomic_load(&generation) & 0x7fffffffu) << 16);
        if (pthread_create(&made, NULL, serve, (void *)given)) break;
        pthread_detach(made);
        num_started++;
    }
}

/* Call work(argument, thread) in so many threads, this one among them; back when all are done. Two callers at once take
   turns. `work` must see as many threads as it asked for: it waits for them. */
void run_threads(int num_threads, void (*work)(void *, int), void *argument) {
    if (num_threads == 1) {
        work(argument, 0);
        return;
    }
    pthread_mutex_lock(&turn);
    start(num_threads);
    job = work;
    job_argument = argument;
    wanted = num_threads;
    atomic_store(&num_arrived, 0);
    atomic_store(&num_running, num_started);
    atomic_store(&generation, (atomic_load(&generation) + 1) & 0x7fffffffu);
    if (atomic_load(&num_sleeping)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&lock);
    }
    work(argument, 0);
    for (int spins = 0; atomic_load(&num_running); spins++) {
        if (spins < SPINS) RELAX();
        else sched_yield();
    }
    pthread_mutex_unlock(&turn);
}

int ready_threads(int num_threads) {
    if (num_threads > MOST) num_threads = MOST;
    if (num_threads < 2) return 1;
    pthread_mutex_lock(&turn);
    start(num_threads);
    int found = num_started + 1;
    pthread_mutex_unlock(&turn);
    return found < num_threads ? found : num_threads;
}

void barrier(int num_threads) {
    if (num_threads == 1) return;
    unsigned now = atomic_load(&phase);
    if (atomic_fetch_add(&num_arrived, 1) == num_threads - 1) {
        atomic_store(&num_arrived, 0);
        atomic_store(&phase, now + 1);
        return;
    }
    for (int spins = 0; atomic_load(&phase) == now; spins++) {
        if (spins < SPINS) RELAX();
        else sched_yield();
    }
}
