/* The core without Python, for sanitizers: every rank is a thread with a view of its own, and all make the same random calls.
 *
 * A thread is as good as a process here: nothing is shared but the segment. Prints nothing and ends with 0 if all is well.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "channel.h"
#include "rounds.h"

enum { RANKS = 3, CALLS = 1600, MOST = 60000 };

static struct group views[RANKS];
static int32_t spaces[RANKS][MOST * RANKS]; /* what all ranks see: sums of it need no board */

static void insist(bool good, const char *what, int rank, int call) {
    if (good) return;
    fprintf(stderr, "rank %d, call %d: %s\n", rank, call, what);
    abort();
}

static unsigned draw(unsigned *state) { return *state = *state * 1103515245u + 12345u, *state >> 16 & 0x7fff; }

static struct patience patience(void) { return (struct patience){.deadline = now() + 60000000000, .spins = 50, .culprit = -1}; }

/* Rank r brings r + 1 + i % 7 in place i; part p of it adds 10 p. */
static void fill(int32_t *x, size_t count, int rank, int part) {
    for (size_t i = 0; i < count; i++) x[i] = rank + 1 + (int)(i % 7) + 10 * part;
}

static void one_call(struct group *g, int call, unsigned *random, int32_t *in, int32_t *out) {
    struct patience p = patience();
    struct job job = {.width = 4};
    size_t count = draw(random) % 4 ? draw(random) % 100 : draw(random) % MOST;
    uint32_t kind = 1 + draw(random) % BARRIER, root = draw(random) % RANKS;
    bool sums = kind <= REDUCE_SCATTER, mismatch = draw(random) % 20 == 0;
    for (int part = 0; part < RANKS; part++) {
        fill(in + part * MOST, count, g->rank, part);
        job.give[part] = job.take[part] = count;
        if (kind == REDUCE_SCATTER || kind == ALL_TO_ALL || (kind == SCATTER && (int)root == g->rank)) job.in[part] = (char *)(in + part * MOST);
        if (kind == ALL_GATHER || kind == ALL_TO_ALL || (kind == GATHER && (int)root == g->rank)) job.out[part] = (char *)(out + part * MOST);
    }
    if (kind == ALL_REDUCE || kind == REDUCE) job.in[0] = (char *)in, job.out[0] = (char *)out;
    if (kind == ALL_GATHER || kind == GATHER || (kind == BROADCAST && (int)root == g->rank)) job.in[g->rank] = (char *)in;
    if (kind == REDUCE_SCATTER) job.out[g->rank] = (char *)out;
    if (kind == SCATTER || (kind == BROADCAST && (int)root != g->rank)) job.out[root] = (char *)out;
    if (kind == ALL_REDUCE && draw(random) % 2) { /* not all ranks may say so */
        bool all = draw(random) % 2;
        fill(spaces[g->rank], count, g->rank, 0);
        in = out = spaces[g->rank];
        job.in[0] = (char *)in, job.out[0] = (char *)out, job.place = all || (call + g->rank) % 2;
        for (int rank = 0; rank < RANKS; rank++) job.home[rank] = (char *)spaces[rank];
    }
    job.words = (struct words){.count = kind == ALL_TO_ALL ? 0 : count, .kind = kind, .op = sums ? SUM : NO_OP, .type = I32, .root = root};
    if (mismatch) job.words.type = (uint32_t)g->rank;
    p.brief = (call + g->rank) % 2;
    enum outcome why = run_job(g, &p, &job);
    if (p.brief) { /* begun by some ranks only; finished after some looks, or by a call that waits */
        for (int i = 0; i < call % 3 && why == PENDING; i++) why = run_job(g, &p, &job);
        p.brief = false;
        if (why == PENDING || why == TOO_LARGE) why = run_job(g, &p, &job);
    }
    insist(why == (mismatch ? MISMATCH : DONE), "outcome", g->rank, call);
    if (mismatch || kind == BARRIER || count == 0) return;
    size_t last = count - 1;
    int32_t base = (int32_t)(last % 7), all = RANKS * (RANKS + 1) / 2 + RANKS * base;
    if (kind == ALL_REDUCE || (kind == REDUCE && (int)root == g->rank)) insist(out[last] == all, "sum", g->rank, call);
    if (kind == REDUCE_SCATTER) insist(out[last] == all + 10 * RANKS * g->rank, "reduce_scatter", g->rank, call);
    if (kind == SCATTER) insist(out[last] == (int)root + 1 + base + 10 * g->rank, "scatter", g->rank, call);
    if (kind == BROADCAST && (int)root != g->rank) insist(out[last] == (int)root + 1 + base, "broadcast", g->rank, call);
    for (int part = 0; part < RANKS; part++) {
        int32_t got = out[part * MOST + (int)last], sent = part + 1 + base;
        if (kind == ALL_GATHER || (kind == GATHER && (int)root == g->rank)) insist(got == sent, "gather", g->rank, call);
        if (kind == ALL_TO_ALL) insist(got == sent + 10 * g->rank, "all_to_all", g->rank, call);
    }
}

/* Round the circle: everyone sends on before it receives, what fits into the ring or not. */
static void pass_on(struct group *g, int call, size_t bytes, char *in, char *out) {
    struct patience p = patience();
    int to = (g->rank + 1) % RANKS, from = (g->rank + RANKS - 1) % RANKS;
    struct envelope e = {.bytes = bytes, .tag = (uint32_t)call};
    memset(in, g->rank + call, bytes);
    insist(send_message(g, &p, to, e, in) == DONE, "send", g->rank, call);
    insist(wait_for_mail(g, &p) == DONE, "mail", g->rank, call);
    insist(read_bytes(g, &p, from, (char *)&e, sizeof e) == DONE && e.tag == (uint32_t)call, "envelope", g->rank, call);
    insist(read_bytes(g, &p, from, out, e.bytes) == DONE, "recv", g->rank, call);
    insist(e.bytes == bytes && (bytes == 0 || out[bytes - 1] == (char)(from + call)), "message", g->rank, call);
}

static void *live(void *view) {
    struct group *g = view;
    unsigned random = 7;
    int32_t *in = malloc(sizeof(int32_t) * MOST * RANKS), *out = malloc(sizeof(int32_t) * MOST * RANKS);
    for (int call = 0; call < CALLS; call++) {
        if (draw(&random) % 4) {
            one_call(g, call, &random, in, out);
        } else {
            pass_on(g, call, draw(&random) % 3000, (char *)in, (char *)out);
        }
    }
    struct patience p = patience();
    if (g->rank == 1) {
        leave(g, GAVE_UP);
    } else {
        insist(post_and_wait(g, &p) == LEFT && p.culprit == 1, "the rank that left", g->rank, CALLS);
    }
    free(in);
    free(out);
    return NULL;
}

int main(void) {
    pthread_t threads[RANKS];
    void *base = NULL;
    for (int rank = 0; rank < RANKS; rank++) {
        struct group *g = &views[rank];
        g->rank = rank, g->size = RANKS, g->chunk = 48 * 1024, g->channel = 4096;
        for (int peer = 0; peer < RANKS; peer++) g->watch[peer] = -1;
        size_t bytes = measure(g);
        if (!base) base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        g->base = base;
    }
    for (int rank = 0; rank < RANKS; rank++) pthread_create(&threads[rank], NULL, live, &views[rank]);
    for (int rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
    return 0;
}
