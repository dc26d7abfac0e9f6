/* send and recv: a ring of bytes per ordered pair of ranks. The sender alone raises `head`, the receiver alone `tail`.
 *
 * A message is an envelope and its bytes. What fits into the ring is sent without waiting; the rest streams through it. Messages of one pair
 * arrive in order; putting them in the order of tags is the caller's business.
 */
#ifndef LOCKSTEP_CHANNEL_H
#define LOCKSTEP_CHANNEL_H

#include <string.h>

#include "wait.h"

/* Copy to or from `at` in the ring, round its end. */
static void put(const struct group *g, struct channel *c, uint32_t at, const char *from, size_t n) {
    size_t start = at & (g->channel - 1), room = g->channel - start, first = n < room ? n : room;
    memcpy(c->ring + start, from, first);
    memcpy(c->ring, from + first, n - first);
}

static void get(const struct group *g, struct channel *c, uint32_t at, char *to, size_t n) {
    size_t start = at & (g->channel - 1), room = g->channel - start, first = n < room ? n : room;
    memcpy(to, c->ring + start, first);
    memcpy(to + first, c->ring, n - first);
}

static void ring_bell(struct group *g, int rank) {
    struct counter *bell = &seat_of(g, rank)->bell;
    atomic_fetch_add(&bell->value, 1);
    if (atomic_load(&bell->sleepers)) wake(bell);
}

static enum outcome write_bytes(struct group *g, struct patience *p, int peer, const char *from, size_t bytes) {
    struct channel *c = channel_of(g, g->rank, peer);
    uint32_t head = atomic_load(&c->head.value), ring = (uint32_t)g->channel;
    while (bytes) {
        /* Room for one byte at least: tail has reached head + 1 - ring. */
        enum outcome why = wait_for(g, p, &c->tail, head + 1 - ring, peer, peer);
        if (why != DONE) return why;
        size_t room = ring - (head - atomic_load(&c->tail.value));
        size_t n = bytes < room ? bytes : room;
        put(g, c, head, from, n);
        raise_to(&c->head, head += (uint32_t)n);
        from += n;
        bytes -= n;
    }
    return DONE;
}

static enum outcome read_bytes(struct group *g, struct patience *p, int peer, char *to, size_t bytes) {
    struct channel *c = channel_of(g, peer, g->rank);
    uint32_t tail = atomic_load(&c->tail.value);
    while (bytes) {
        enum outcome why = wait_for(g, p, &c->head, tail + 1, peer, peer);
        if (why != DONE) return why;
        size_t there = atomic_load(&c->head.value) - tail;
        size_t n = bytes < there ? bytes : there;
        get(g, c, tail, to, n);
        raise_to(&c->tail, tail += (uint32_t)n);
        to += n;
        bytes -= n;
    }
    return DONE;
}

static enum outcome send_message(struct group *g, struct patience *p, int peer, struct envelope envelope, const char *from) {
    enum outcome why = write_bytes(g, p, peer, (const char *)&envelope, sizeof envelope);
    ring_bell(g, peer);
    return why == DONE ? write_bytes(g, p, peer, from, envelope.bytes) : why;
}

static bool has_mail(struct group *g, int peer) {
    struct channel *c = channel_of(g, peer, g->rank);
    return atomic_load(&c->head.value) != atomic_load(&c->tail.value);
}

/* Wait until a message from anybody is there; gives its sender in `culprit`. Only when all others are gone is that a reason to stop. */
static enum outcome wait_for_mail(struct group *g, struct patience *p) {
    struct counter *bell = &seat_of(g, g->rank)->bell;
    for (;;) {
        uint32_t heard = atomic_load(&bell->value);
        int here = 0;
        for (int peer = 0; peer < g->size; peer++) {
            if (peer == g->rank) continue;
            here += !atomic_load(&seat_of(g, peer)->gone) && !is_dead(g, peer);
            p->culprit = peer;
            if (has_mail(g, peer)) return DONE;
        }
        if (here == 0) return p->culprit >= 0 && atomic_load(&seat_of(g, p->culprit)->gone) ? LEFT : LOST;
        if (atomic_load(&g->stop)) return STOPPED;
        p->culprit = -1; /* nobody in particular */
        if (now() >= p->deadline) return LATE;
        if (p->interrupted && p->interrupted(p)) return INTERRUPTED;
        struct timespec t = {.tv_nsec = SLICE};
        atomic_fetch_add(&bell->sleepers, 1);
        syscall(SYS_futex, &bell->value, FUTEX_WAIT, heard, &t, NULL, 0);
        atomic_fetch_sub(&bell->sleepers, 1);
    }
}

#endif
