/* The shared segment, as every rank has it mapped, and what one process knows about it.
 *
 *   seats      one per rank: how far it is, and whether it is still there
 *   boards     two per rank, used in turn: what it shows to all others
 *   channels   one per ordered pair of ranks: a ring of bytes for send and recv
 *
 * A board:   words | give, take | front: `chunk` bytes | back: a rank's share of a chunk, reduced
 *
 * All collectives are made of rounds. In a round every rank writes its own board, posts (raises its counter by one), waits until all have
 * posted the same number, and then reads the others' boards. Post number p stands on board p mod 2. That is all the reuse needs: who
 * writes the board of post p + 1 has seen everyone's post p, and a rank posts p only after it has read everything of p - 1, which is
 * what lay on that board before. No rank is ever more than one post ahead of another.
 *
 * Nothing here is locked, so a rank that is killed at any instruction leaves nothing that others would wait for without an end.
 */
#ifndef LOCKSTEP_SEGMENT_H
#define LOCKSTEP_SEGMENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_RANKS = 256 };
enum { LINE = 64 }; /* bytes of a cache line; what different ranks write stays on different lines */

/* A number that only grows (modulo 2^32, compared by difference), and those who sleep until it does. */
struct counter {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
};

struct seat {
    _Alignas(LINE) struct counter posts;
    _Alignas(LINE) struct counter bell; /* messages on their way to this rank, over all its channels */
    _Atomic uint32_t gone;              /* enum leaving */
};

enum leaving { STAYS = 0, LEFT_IN_ORDER = 1, GAVE_UP = 2 };

/* What every rank must bring alike to a collective; compared before anything is taken from a peer. */
struct words {
    uint64_t sequence;
    uint64_t count; /* elements of one part */
    uint32_t kind;  /* enum kind */
    uint32_t op;    /* enum op in its lowest byte, 0 where nothing is reduced; above it what is only compared */
    uint32_t type;  /* a number for the dtype; below TYPES it can be reduced */
    uint32_t root;
};

/* A message on a channel. */
struct envelope {
    uint64_t bytes;
    uint32_t tag;
    uint32_t type;
};

struct channel {
    _Alignas(LINE) struct counter head; /* bytes written, by the sender */
    _Alignas(LINE) struct counter tail; /* bytes taken, by the receiver */
    _Alignas(LINE) char ring[];
};

/* One process's view. */
struct group {
    char *base;
    size_t bytes;
    int rank, size;
    size_t chunk, channel;       /* bytes of a board's front, and of a channel's ring (a power of two) */
    size_t share;                /* bytes of a board's back */
    size_t board_bytes, channel_bytes;
    uint32_t posted;             /* this rank's counter */
    uint64_t sequence;           /* collectives so far */
    bool pending;                /* this rank has posted its part of a collective, and has yet to take the others' */
    int watch[MOST_RANKS];       /* a pidfd per peer: readable once the process is dead */
    _Atomic bool stop;           /* set by another thread of this process: every wait ends */
};

static inline size_t in_lines(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

/* Fill in the sizes that follow from size, chunk and channel; returns the bytes of the whole segment. */
static inline size_t measure(struct group *g) {
    size_t n = (size_t)g->size;
    g->share = in_lines(g->chunk / n + LINE);
    g->board_bytes = in_lines(sizeof(struct words)) + in_lines(2 * n * sizeof(uint64_t)) + g->chunk + g->share;
    g->channel_bytes = sizeof(struct channel) + g->channel;
    g->bytes = n * sizeof(struct seat) + 2 * n * g->board_bytes + n * n * g->channel_bytes;
    return g->bytes;
}

static inline struct seat *seat_of(const struct group *g, int rank) { return (struct seat *)g->base + rank; }

static inline char *board_of(const struct group *g, int rank, uint32_t post) {
    return g->base + (size_t)g->size * sizeof(struct seat) + (2 * (size_t)rank + (post & 1)) * g->board_bytes;
}

static inline struct words *words_on(char *board) { return (struct words *)board; }

static inline uint64_t *shares_on(char *board) { return (uint64_t *)(board + in_lines(sizeof(struct words))); }

static inline char *front_of(const struct group *g, char *board) {
    return (char *)shares_on(board) + in_lines(2 * (size_t)g->size * sizeof(uint64_t));
}

static inline char *back_of(const struct group *g, char *board) { return front_of(g, board) + g->chunk; }

static inline struct channel *channel_of(const struct group *g, int from, int to) {
    size_t n = (size_t)g->size;
    char *first = g->base + n * sizeof(struct seat) + 2 * n * g->board_bytes;
    return (struct channel *)(first + ((size_t)from * n + (size_t)to) * g->channel_bytes);
}

#endif
