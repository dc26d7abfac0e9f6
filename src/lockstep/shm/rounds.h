/* The collectives, made of rounds (segment.h).
 *
 *   publish      every rank that has something to say shows one message; who needs it copies it       all_gather, broadcast, gather
 *   hand_out     a board is cut into one pocket per rank                                              scatter, all_to_all, reduce_scatter
 *   reduce_small every rank shows all it has and reduces everything                                   all_reduce, reduce
 *   reduce_large every rank reduces its slice of a chunk; three stages of three chunks overlap        all_reduce, reduce
 *   reduce_there every rank reduces its slice of a message that all have mapped, for everybody        all_reduce
 *
 * In the first round of each, ranks compare what they were called with. All of them see all words, so all come to the same verdict.
 *
 * What takes a single round can be begun and finished in two calls: once a rank has posted, the others need nothing more from it, and its own
 * board and theirs stay as they are until it posts again.
 */
#ifndef LOCKSTEP_ROUNDS_H
#define LOCKSTEP_ROUNDS_H

#include "reduce.h"
#include "wait.h"

enum kind { ALL_REDUCE = 1, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, BARRIER };

/* One call on this rank. Parts are by rank; where there is only one, or nothing on this rank, the others are NULL. */
struct job {
    struct words words;
    size_t width;                  /* bytes of an element */
    const char *in[MOST_RANKS];
    char *out[MOST_RANKS];
    uint64_t give[MOST_RANKS], take[MOST_RANKS]; /* all_to_all: elements for and from each rank */
    char *home[MOST_RANKS];        /* all_reduce in place: where every rank's message lies, as this process has it mapped */
    uint64_t place;                /* a number for the memory that `home` is about, the same on all ranks; 0 for none */
};

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Reducing a message at once costs every rank all the arithmetic and the reading of all that the others have, but only one round. Two ranks
 * read as much from each other one way as the other. */
static size_t most_at_once(const struct group *g) { return g->size == 2 ? g->chunk : smaller(32 * 1024, g->chunk); }

static char *next_board(const struct group *g) { return board_of(g, g->rank, g->posted + 1); }

static char *shown_by(const struct group *g, int rank) { return board_of(g, rank, g->posted); }

static void write_words(struct group *g, const struct job *job) {
    char *board = next_board(g);
    *words_on(board) = job->words;
    if (job->words.kind == ALL_REDUCE) {
        shares_on(board)[0] = job->place;
    } else if (job->words.kind == ALL_TO_ALL) {
        memcpy(shares_on(board), job->give, (size_t)g->size * sizeof(uint64_t));
        memcpy(shares_on(board) + g->size, job->take, (size_t)g->size * sizeof(uint64_t));
    }
}

/* What `from` gives to `to` must be what `to` takes from it, for every pair: each rank checks all. */
static bool shares_match(const struct group *g) {
    for (int from = 0; from < g->size; from++) {
        for (int to = 0; to < g->size; to++) {
            if (shares_on(shown_by(g, from))[to] != shares_on(shown_by(g, to))[g->size + from]) return false;
        }
    }
    return true;
}

static enum outcome compare_words(const struct group *g, const struct job *job) {
    for (int rank = 1; rank < g->size; rank++) {
        if (memcmp(words_on(shown_by(g, 0)), words_on(shown_by(g, rank)), sizeof(struct words))) return MISMATCH;
    }
    return job->words.kind != ALL_TO_ALL || shares_match(g) ? DONE : MISMATCH;
}

/* End a round; the first one of a call also compares. */
static enum outcome end_round(struct group *g, struct patience *p, const struct job *job, bool first) {
    if (!g->pending) post(g);
    enum outcome why = wait_for_posts(g, p);
    g->pending = why == PENDING;
    return why == DONE && first ? compare_words(g, job) : why;
}

static enum outcome publish(struct group *g, struct patience *p, const struct job *job) {
    size_t bytes = job->words.count * job->width, at = 0;
    const char *mine = job->in[g->rank];
    do {
        size_t n = smaller(bytes - at, g->chunk);
        if (at == 0 && !g->pending) write_words(g, job);
        if (mine && !g->pending) memcpy(front_of(g, next_board(g)), mine + at, n);
        enum outcome why = end_round(g, p, job, at == 0);
        if (why != DONE) return why;
        /* The own part first: it may lie where another rank's goes. */
        char *own = job->out[g->rank];
        if (own && own != mine) memmove(own + at, mine + at, n);
        for (int from = 0; from < g->size; from++) {
            if (from != g->rank && job->out[from]) memcpy(job->out[from] + at, front_of(g, shown_by(g, from)), n);
        }
        at += n;
    } while (at < bytes);
    return DONE;
}

/* Without what it is only compared by. */
static enum op operation(const struct job *job) { return (enum op)(job->words.op & 255); }

static uint64_t most_given(const struct group *g) {
    uint64_t most = 0;
    for (int rank = 0; rank < g->size; rank++) {
        for (int to = 0; to < g->size; to++) {
            uint64_t given = shares_on(shown_by(g, rank))[to];
            most = given > most ? given : most;
        }
    }
    return most;
}

/* Bytes of the part [at, at + pocket) of a message of `elements`. */
static size_t piece(uint64_t elements, size_t width, size_t at, size_t pocket) {
    size_t bytes = elements * width;
    return at < bytes ? smaller(bytes - at, pocket) : 0;
}

static void fill_pockets(struct group *g, const struct job *job, size_t at, size_t pocket) {
    for (int to = 0; to < g->size; to++) {
        if (to == g->rank || !job->in[to]) continue;
        memcpy(front_of(g, next_board(g)) + (size_t)to * pocket, job->in[to] + at, piece(job->give[to], job->width, at, pocket));
    }
}

static void empty_pockets(struct group *g, const struct job *job, size_t at, size_t pocket) {
    for (int from = 0; from < g->size; from++) {
        size_t n = piece(job->take[from], job->width, at, pocket);
        if (!job->out[from] || n == 0) continue;
        const char *source = from == g->rank ? job->in[from] + at : front_of(g, shown_by(g, from)) + (size_t)g->rank * pocket;
        if (source != job->out[from] + at) memmove(job->out[from] + at, source, n);
    }
}

static void reduce_pockets(struct group *g, const struct job *job, size_t at, size_t pocket) {
    const char *sources[MOST_RANKS];
    for (int from = 0; from < g->size; from++) {
        sources[from] = from == g->rank ? job->in[from] + at : front_of(g, shown_by(g, from)) + (size_t)g->rank * pocket;
    }
    size_t n = piece(job->words.count, job->width, at, pocket) / job->width;
    reduce_all(operation(job), job->words.type, job->out[g->rank] + at, NULL, sources, g->size, n);
}

static enum outcome hand_out(struct group *g, struct patience *p, const struct job *job) {
    size_t pocket = g->chunk / (size_t)g->size / LINE * LINE; /* a whole number of elements of any width */
    size_t most = job->words.count * job->width, at = 0;
    do {
        if (at == 0) write_words(g, job);
        fill_pockets(g, job, at, pocket);
        enum outcome why = end_round(g, p, job, at == 0);
        if (why != DONE) return why;
        if (at == 0 && job->words.kind == ALL_TO_ALL) most = most_given(g) * job->width;
        if (job->words.kind == REDUCE_SCATTER) {
            reduce_pockets(g, job, at, pocket);
        } else {
            empty_pockets(g, job, at, pocket);
        }
        at += pocket;
    } while (at < most);
    return DONE;
}

static bool wants_result(const struct group *g, const struct job *job) {
    return job->words.kind == ALL_REDUCE || (int)job->words.root == g->rank;
}

static enum outcome reduce_small(struct group *g, struct patience *p, const struct job *job) {
    const char *sources[MOST_RANKS];
    if (!g->pending) {
        write_words(g, job);
        memcpy(front_of(g, next_board(g)), job->in[0], job->words.count * job->width);
    }
    enum outcome why = end_round(g, p, job, true);
    if (why != DONE || !wants_result(g, job)) return why;
    for (int rank = 0; rank < g->size; rank++) sources[rank] = rank == g->rank ? job->in[0] : front_of(g, shown_by(g, rank));
    reduce_all(operation(job), job->words.type, job->out[0], NULL, sources, g->size, job->words.count);
    return DONE;
}

/* A chunk of a large message, and the slices of it that the ranks reduce. All in elements. */
struct part {
    size_t at, count, slice;
};

static struct part part_of(const struct group *g, const struct job *job, size_t number) {
    size_t whole = g->chunk / LINE * LINE / job->width, at = number * whole;
    size_t count = smaller(whole, job->words.count - at), per_line = LINE / job->width;
    size_t slice = (count / (size_t)g->size + per_line) / per_line * per_line; /* whole lines: no two ranks write to one */
    return (struct part){at, count, slice};
}

static size_t slice_start(const struct part *part, int rank) { return smaller((size_t)rank * part->slice, part->count); }

static size_t slice_count(const struct part *part, int rank) { return slice_start(part, rank + 1) - slice_start(part, rank); }

/* Stage 1: show the others their slices. */
static void show_slices(struct group *g, const struct job *job, struct part part) {
    char *front = front_of(g, next_board(g));
    for (int rank = 0; rank < g->size; rank++) {
        size_t start = slice_start(&part, rank) * job->width, n = slice_count(&part, rank) * job->width;
        if (rank != g->rank) memcpy(front + start, job->in[0] + part.at * job->width + start, n);
    }
}

/* Stage 2: reduce the own slice, and show it. */
static void reduce_slice(struct group *g, const struct job *job, struct part part) {
    const char *sources[MOST_RANKS];
    size_t start = slice_start(&part, g->rank) * job->width, here = part.at * job->width + start;
    char *back = back_of(g, next_board(g));
    for (int rank = 0; rank < g->size; rank++) sources[rank] = rank == g->rank ? job->in[0] + here : front_of(g, shown_by(g, rank)) + start;
    if (wants_result(g, job)) {
        reduce_all(operation(job), job->words.type, job->out[0] + here, back, sources, g->size, slice_count(&part, g->rank));
    } else {
        reduce_all(operation(job), job->words.type, back, NULL, sources, g->size, slice_count(&part, g->rank));
    }
}

/* Stage 3: take the other slices. */
static void take_slices(struct group *g, const struct job *job, struct part part) {
    for (int rank = 0; rank < g->size; rank++) {
        if (rank == g->rank) continue;
        size_t start = (part.at + slice_start(&part, rank)) * job->width;
        memcpy(job->out[0] + start, back_of(g, shown_by(g, rank)), slice_count(&part, rank) * job->width);
    }
}

/* The message lies in memory that all have mapped: no board is needed, only that all have come and, at the end, that all are through. */
static enum outcome reduce_there(struct group *g, struct patience *p, const struct job *job) {
    size_t per_line = LINE / job->width, count = job->words.count;
    struct part part = {0, count, (count / (size_t)g->size + per_line) / per_line * per_line};
    size_t end = slice_start(&part, g->rank + 1), n;
    const char *sources[MOST_RANKS];
    for (size_t at = slice_start(&part, g->rank); at < end; at += n) {
        n = smaller(end - at, BLOCK);
        for (int rank = 0; rank < g->size; rank++) sources[rank] = job->home[rank] + at * job->width;
        char *out = job->home[g->rank] + at * job->width;
        reduce_all(operation(job), job->words.type, out, NULL, sources, g->size, n);
        for (int rank = 0; rank < g->size; rank++) {
            if (rank != g->rank) memcpy(job->home[rank] + at * job->width, out, n * job->width);
        }
    }
    return end_round(g, p, job, false);
}

/* What the ranks have said of their messages' places: all the same, all none, or anything else. */
enum places { NOWHERE, SOMEWHERE, THERE };

static enum places compare_places(const struct group *g, const struct job *job) {
    if (job->words.kind != ALL_REDUCE) return NOWHERE;
    uint64_t first = shares_on(shown_by(g, 0))[0];
    for (int rank = 1; rank < g->size; rank++) {
        if (shares_on(shown_by(g, rank))[0] != first) return SOMEWHERE;
    }
    return first ? THERE : NOWHERE;
}

/* In step s a rank shows chunk s, reduces chunk s - 1, which it saw all of at the end of the last step, and takes chunk s - 2. In the first
 * round a rank whose message has a place shows only that: if the others' have the same, no chunk is shown at all, and if not, it begins again. */
static enum outcome reduce_large(struct group *g, struct patience *p, const struct job *job) {
    size_t whole = g->chunk / LINE * LINE / job->width, parts = (job->words.count + whole - 1) / whole;
    write_words(g, job);
    if (!job->place) show_slices(g, job, part_of(g, job, 0));
    enum outcome first = end_round(g, p, job, true);
    if (first != DONE) return first;
    enum places places = compare_places(g, job);
    if (places == THERE) return reduce_there(g, p, job);
    for (size_t step = places == NOWHERE ? 1 : 0; step < parts + 2; step++) {
        if (step < parts) show_slices(g, job, part_of(g, job, step));
        if (step >= 1 && step <= parts) reduce_slice(g, job, part_of(g, job, step - 1));
        if (step >= 2 && wants_result(g, job)) take_slices(g, job, part_of(g, job, step - 2));
        if (step > parts) break;
        enum outcome why = end_round(g, p, job, false);
        if (why != DONE) return why;
    }
    return DONE;
}

static bool at_once(const struct group *g, const struct job *job) {
    size_t bytes = job->words.count * job->width;
    switch ((enum kind)job->words.kind) {
        case ALL_REDUCE:
        case REDUCE: return bytes <= most_at_once(g);
        case REDUCE_SCATTER:
        case SCATTER:
        case ALL_TO_ALL: return false;
        default: return bytes <= g->chunk;
    }
}

/* A brief call may give PENDING: the rank's own part is out, and the next call must be for the same job; or TOO_LARGE: nothing has been done,
 * since the job takes more than a round. */
static enum outcome run_job(struct group *g, struct patience *p, struct job *job) {
    if (p->brief && !at_once(g, job)) return TOO_LARGE;
    if (!g->pending) job->words.sequence = g->sequence++;
    switch ((enum kind)job->words.kind) {
        case ALL_REDUCE:
        case REDUCE: return at_once(g, job) ? reduce_small(g, p, job) : reduce_large(g, p, job);
        case REDUCE_SCATTER:
        case SCATTER:
        case ALL_TO_ALL: return hand_out(g, p, job);
        default: return publish(g, p, job);
    }
}

#endif
