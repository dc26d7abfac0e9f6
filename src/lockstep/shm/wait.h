/* Posting and waiting: spin for a moment, yield for another, then sleep in the kernel, and look around now and then.
 *
 * A wait ends when what it waits for is there, when a peer it needs is dead or has left, when time is up, when a signal's handler raised,
 * or when another thread of this process says stop. It never ends in nothing.
 */
#ifndef LOCKSTEP_WAIT_H
#define LOCKSTEP_WAIT_H

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "segment.h"

enum outcome { DONE = 0, MISMATCH, LATE, LOST, LEFT, STOPPED, INTERRUPTED, PENDING, TOO_LARGE };

/* How long one call may wait, and how. */
struct patience {
    int64_t deadline;                     /* ns of the monotonic clock */
    int spins;                            /* looks before sleeping; few where ranks outnumber cores */
    int yields;                           /* looks after these that leave the core to whoever else wants it */
    bool brief;                           /* do not sleep: PENDING instead, and the same call is made again later */
    bool (*interrupted)(struct patience *); /* asked now and then while asleep */
    void *thread;                         /* for `interrupted` */
    int culprit;                          /* out: who is late, lost or left */
};

static const int64_t SLICE = 100 * 1000 * 1000; /* ns asleep between two looks around: a dead peer is seen within 0.1 s */

static inline int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline bool reached(uint32_t value, uint32_t target) { return (int32_t)(value - target) >= 0; }

static inline bool has_reached(struct counter *c, uint32_t target) {
    return reached(atomic_load_explicit(&c->value, memory_order_acquire), target);
}

static inline void wake(struct counter *c) { syscall(SYS_futex, &c->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

/* Make everything written before visible to whoever sees `value`. Sequentially consistent with `sleepers`: either the sleeper sees the new
 * value before it sleeps, or we see the sleeper. */
static inline void raise_to(struct counter *c, uint32_t value) {
    atomic_store(&c->value, value);
    if (atomic_load(&c->sleepers)) wake(c);
}

static inline bool is_dead(const struct group *g, int peer) {
    struct pollfd fd = {.fd = g->watch[peer], .events = POLLIN};
    return fd.fd >= 0 && poll(&fd, 1, 0) == 1;
}

/* The counter of `peer` that a wait is about: its posts where everybody is waited for, else the one counter given. */
static inline struct counter *counter_of(const struct group *g, int peer, int only, struct counter *c) {
    return only < 0 ? &seat_of(g, peer)->posts : c;
}

/* The first peer that has not reached `target` and will not: it left, or it died without having left. -1 if there is none. */
static int find_missing(const struct group *g, struct counter *c, uint32_t target, int only, bool dead) {
    int first = only < 0 ? 0 : only, last = only < 0 ? g->size - 1 : only;
    for (int peer = first; peer <= last; peer++) {
        if (peer == g->rank) continue;
        bool left = atomic_load(&seat_of(g, peer)->gone) != STAYS;
        /* The counter last: it may have been raised just before. */
        if ((dead ? !left && is_dead(g, peer) : left) && !has_reached(counter_of(g, peer, only, c), target)) return peer;
    }
    return -1;
}

/* Is there a reason to stop waiting for `target`? Who has reached it may be dead or gone: it is not needed any more. A rank that left may
 * have done so because of a dead one, which is then the better answer. */
static enum outcome look_around(struct group *g, struct patience *p, struct counter *c, uint32_t target, int only, bool long_look) {
    if (atomic_load(&g->stop)) return STOPPED;
    int left = find_missing(g, c, target, only, false);
    int dead = long_look || left >= 0 ? find_missing(g, c, target, only, true) : -1;
    if (dead >= 0 || left >= 0) {
        p->culprit = dead >= 0 ? dead : left;
        return dead >= 0 ? LOST : LEFT;
    }
    if (long_look && now() >= p->deadline) return LATE;
    if (long_look && p->interrupted && p->interrupted(p)) return INTERRUPTED;
    return DONE;
}

static enum outcome sleep_until(struct group *g, struct patience *p, struct counter *c, uint32_t target, int peer, int only) {
    enum outcome why = DONE;
    bool long_look = false;
    atomic_fetch_add(&c->sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&c->value);
        if (reached(seen, target)) break;
        why = look_around(g, p, c, target, only, long_look);
        if (why != DONE) {
            if (why == LATE) p->culprit = peer;
            break;
        }
        int64_t left = p->deadline - now();
        int64_t slice = left < 0 ? 0 : left < SLICE ? left : SLICE;
        struct timespec t = {.tv_sec = slice / 1000000000, .tv_nsec = slice % 1000000000};
        /* Woken, timed out (110 ETIMEDOUT) or disturbed by a signal (4 EINTR): the loop finds out. */
        long_look = syscall(SYS_futex, &c->value, FUTEX_WAIT, seen, &t, NULL, 0) != 0;
    }
    atomic_fetch_sub(&c->sleepers, 1);
    return why;
}

/* Wait until `c`, which `peer` raises, has reached `target`. `only` is the one peer that matters, or -1 for all. */
static inline enum outcome wait_for(struct group *g, struct patience *p, struct counter *c, uint32_t target, int peer, int only) {
    for (int i = 0; i < p->spins; i++) {
        if (has_reached(c, target)) return DONE;
        relax();
    }
    for (int i = 0; i < p->yields; i++) {
        if (has_reached(c, target)) return DONE;
        sched_yield();
    }
    if (p->brief) return has_reached(c, target) ? DONE : PENDING;
    return sleep_until(g, p, c, target, peer, only);
}

static void post(struct group *g) { raise_to(&seat_of(g, g->rank)->posts, ++g->posted); }

/* Wait until all have posted as much as this rank. */
static enum outcome wait_for_posts(struct group *g, struct patience *p) {
    for (int peer = 0; peer < g->size; peer++) {
        if (peer == g->rank) continue;
        enum outcome why = wait_for(g, p, &seat_of(g, peer)->posts, g->posted, peer, -1);
        if (why != DONE) return why;
    }
    return DONE;
}

/* End a round: post, and wait until all have posted as much. */
static enum outcome post_and_wait(struct group *g, struct patience *p) {
    post(g);
    return wait_for_posts(g, p);
}

/* Tell those who wait for this rank that it will not come. */
static void leave(struct group *g, enum leaving how) {
    atomic_store(&seat_of(g, g->rank)->gone, how);
    wake(&seat_of(g, g->rank)->posts);
    for (int peer = 0; peer < g->size; peer++) {
        wake(&channel_of(g, g->rank, peer)->head);
        wake(&channel_of(g, peer, g->rank)->tail);
        wake(&seat_of(g, peer)->bell);
    }
}

#endif
