/* The extension module lockstep.shm._core: numbers in, a verdict out. What a verdict means and what to say about it is Python's business.
 *
 * Only CPython's limited API, and nothing of torch: tensors come as addresses and counts, so one build serves every Python and every torch.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <sys/mman.h>

#include "channel.h"
#include "rounds.h"

typedef struct {
    PyObject_HEAD
    struct group group;
} Segment;

static bool signal_raised(struct patience *p) {
    PyEval_RestoreThread(p->thread);
    bool raised = PyErr_CheckSignals() != 0;
    p->thread = PyEval_SaveThread();
    return raised;
}

static bool read_size(PyObject *number, size_t *to) {
    *to = PyLong_AsSize_t(number);
    return !PyErr_Occurred();
}

static bool read_int(PyObject *number, int *to) {
    *to = (int)PyLong_AsLong(number);
    return !PyErr_Occurred();
}

static bool read_patience(PyObject *seconds, PyObject *spins, struct patience *p) {
    double wait = PyFloat_AsDouble(seconds);
    *p = (struct patience){.interrupted = signal_raised, .culprit = -1};
    if (PyErr_Occurred() || !read_int(spins, &p->spins)) return false;
    p->deadline = now() + (int64_t)(wait < 1e9 ? wait * 1e9 : 1e18);
    return true;
}

static bool arity(Py_ssize_t given, Py_ssize_t wanted, const char *name) {
    if (given != wanted) PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
    return given == wanted;
}

/* (outcome, culprit); a signal's exception instead where there is one. */
static PyObject *verdict(enum outcome why, const struct patience *p) {
    if (why == INTERRUPTED) return NULL;
    return why == DONE ? PyLong_FromLong(0) : PyLong_FromLong((long)why | (long)(p->culprit + 1) << 8);
}

/* Addresses: one number, or a tuple with one for each rank (0: none). */
static bool read_addresses(const struct group *g, PyObject *x, void **to) {
    if (!PyTuple_Check(x)) {
        size_t address;
        if (!read_size(x, &address)) return false;
        to[0] = (void *)address;
        return true;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(x) && i < g->size; i++) {
        size_t address;
        if (!read_size(PyTuple_GetItem(x, i), &address)) return false;
        to[i] = (void *)address;
    }
    return true;
}

static bool read_counts(const struct group *g, PyObject *x, uint64_t *to) {
    for (Py_ssize_t i = 0; i < g->size; i++) {
        size_t count;
        PyObject *number = PyTuple_Check(x) ? PyTuple_GetItem(x, i) : x;
        if (!number || !read_size(number, &count)) return false;
        to[i] = count;
    }
    return true;
}

PyDoc_STRVAR(run_doc,
             "run(kind, op, type, root, count, width, ins, outs, give, take, homes, place, seconds, spins, yields, brief) -> 0, or outcome + 256 * (culprit + 1)\n\n"
             "One collective. `ins` and `outs` are addresses by rank (a tuple; 0 for none), or one for ALL_REDUCE and REDUCE.\n"
             "`give` and `take` are elements by rank (a tuple or one number for all); `count` is compared between ranks.\n"
             "`homes`, for an ALL_REDUCE in place: where every rank's message lies, and `place` its number, above 0; None and 0 for none.\n"
             "A brief call does not sleep. After outcome 7 (begun) the next call must be the same again; 8: it takes several rounds, nothing is done.");

static PyObject *run(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    struct group *g = &((Segment *)self)->group;
    struct job job;
    struct patience p;
    int kind, op, type, root, brief;
    size_t count, place;
    if (!arity(n, 16, "run")) return NULL;
    if (!read_int(args[0], &kind) || !read_int(args[1], &op) || !read_int(args[2], &type) || !read_int(args[3], &root)) return NULL;
    if (!read_size(args[4], &count) || !read_size(args[5], &job.width) || !read_patience(args[12], args[13], &p)) return NULL;
    if (!read_int(args[14], &p.yields) || !read_int(args[15], &brief) || !read_size(args[11], &place)) return NULL;
    p.brief = brief != 0;
    memset(job.in, 0, sizeof(char *) * (size_t)g->size);
    memset(job.out, 0, sizeof(char *) * (size_t)g->size);
    if (!read_addresses(g, args[6], (void **)job.in) || !read_addresses(g, args[7], (void **)job.out)) return NULL;
    if (args[8] != Py_None && (!read_counts(g, args[8], job.give) || !read_counts(g, args[9], job.take))) return NULL;
    job.place = args[10] != Py_None && kind == ALL_REDUCE ? place : 0;
    if (job.place && !read_addresses(g, args[10], (void **)job.home)) return NULL;
    job.words = (struct words){.count = count, .kind = (uint32_t)kind, .op = (uint32_t)op, .type = (uint32_t)type, .root = (uint32_t)root};
    p.thread = PyEval_SaveThread();
    enum outcome why = run_job(g, &p, &job);
    PyEval_RestoreThread(p.thread);
    return verdict(why, &p);
}

PyDoc_STRVAR(send_doc, "send(peer, address, bytes, tag, type, seconds, spins) -> verdict as from run");

static PyObject *send_to(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    struct group *g = &((Segment *)self)->group;
    struct patience p;
    struct envelope e;
    size_t address, bytes;
    int peer, tag, type;
    if (!arity(n, 7, "send") || !read_int(args[0], &peer) || !read_size(args[1], &address) || !read_size(args[2], &bytes)) return NULL;
    if (!read_int(args[3], &tag) || !read_int(args[4], &type) || !read_patience(args[5], args[6], &p)) return NULL;
    e = (struct envelope){.bytes = bytes, .tag = (uint32_t)tag, .type = (uint32_t)type};
    p.thread = PyEval_SaveThread();
    enum outcome why = send_message(g, &p, peer, e, (const char *)address);
    PyEval_RestoreThread(p.thread);
    return verdict(why, &p);
}

PyDoc_STRVAR(open_doc, "open(peer, seconds, spins) -> (bytes, tag, type) of the next message from peer, or a verdict");

static PyObject *open_envelope(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    struct group *g = &((Segment *)self)->group;
    struct patience p;
    struct envelope e;
    int peer;
    if (!arity(n, 3, "open") || !read_int(args[0], &peer) || !read_patience(args[1], args[2], &p)) return NULL;
    p.thread = PyEval_SaveThread();
    enum outcome why = read_bytes(g, &p, peer, (char *)&e, sizeof e);
    PyEval_RestoreThread(p.thread);
    if (why != DONE) return verdict(why, &p);
    return Py_BuildValue("KII", (unsigned long long)e.bytes, (unsigned)e.tag, (unsigned)e.type);
}

PyDoc_STRVAR(read_doc, "read(peer, address, bytes, seconds, spins) -> verdict; takes the bytes of the message whose envelope was opened");

static PyObject *read_message(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    struct group *g = &((Segment *)self)->group;
    struct patience p;
    size_t address, bytes;
    int peer;
    if (!arity(n, 5, "read") || !read_int(args[0], &peer) || !read_size(args[1], &address) || !read_size(args[2], &bytes)) return NULL;
    if (!read_patience(args[3], args[4], &p)) return NULL;
    p.thread = PyEval_SaveThread();
    enum outcome why = read_bytes(g, &p, peer, (char *)address, bytes);
    PyEval_RestoreThread(p.thread);
    return verdict(why, &p);
}

PyDoc_STRVAR(mail_doc, "mail(seconds) -> (rank,) of a peer with a message for this rank, or a verdict");

static PyObject *mail(PyObject *self, PyObject *seconds) {
    struct group *g = &((Segment *)self)->group;
    struct patience p;
    PyObject *none = PyLong_FromLong(0);
    if (!none) return NULL;
    bool good = read_patience(seconds, none, &p);
    Py_DECREF(none);
    if (!good) return NULL;
    p.thread = PyEval_SaveThread();
    enum outcome why = wait_for_mail(g, &p);
    PyEval_RestoreThread(p.thread);
    return why == DONE ? Py_BuildValue("(i)", p.culprit) : verdict(why, &p);
}

PyDoc_STRVAR(words_doc, "words(rank) -> (sequence, kind, op, type, root, count) that the rank has shown last");

static PyObject *words(PyObject *self, PyObject *number) {
    struct group *g = &((Segment *)self)->group;
    int rank;
    if (!read_int(number, &rank)) return NULL;
    const struct words *w = words_on(shown_by(g, rank));
    return Py_BuildValue("KIIIIK", (unsigned long long)w->sequence, w->kind, w->op, w->type, w->root, (unsigned long long)w->count);
}

PyDoc_STRVAR(shares_doc, "shares(rank, peer) -> (elements that rank gives to peer, elements that peer takes from rank), as shown last");

static PyObject *shares(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    struct group *g = &((Segment *)self)->group;
    int rank, peer;
    if (!arity(n, 2, "shares") || !read_int(args[0], &rank) || !read_int(args[1], &peer)) return NULL;
    uint64_t given = shares_on(shown_by(g, rank))[peer], taken = shares_on(shown_by(g, peer))[g->size + rank];
    return Py_BuildValue("KK", (unsigned long long)given, (unsigned long long)taken);
}

PyDoc_STRVAR(came_doc, "came() -> for each rank, whether it has posted as much as this one");

static PyObject *came(PyObject *self, PyObject *unused) {
    struct group *g = &((Segment *)self)->group;
    PyObject *all = PyTuple_New(g->size);
    (void)unused;
    for (int rank = 0; all && rank < g->size; rank++) {
        PyTuple_SetItem(all, rank, PyBool_FromLong(has_reached(&seat_of(g, rank)->posts, g->posted)));
    }
    return all;
}

PyDoc_STRVAR(room_doc, "room(peer) -> bytes that can be sent to peer without waiting");

static PyObject *room(PyObject *self, PyObject *number) {
    struct group *g = &((Segment *)self)->group;
    int peer;
    if (!read_int(number, &peer)) return NULL;
    struct channel *c = channel_of(g, g->rank, peer);
    return PyLong_FromSize_t(g->channel - (atomic_load(&c->head.value) - atomic_load(&c->tail.value)));
}

PyDoc_STRVAR(arrived_doc, "arrived(peer) -> bytes from peer that can be read without waiting");

static PyObject *arrived(PyObject *self, PyObject *number) {
    struct group *g = &((Segment *)self)->group;
    int peer;
    if (!read_int(number, &peer)) return NULL;
    struct channel *c = channel_of(g, peer, g->rank);
    return PyLong_FromUnsignedLong(atomic_load(&c->head.value) - atomic_load(&c->tail.value));
}

PyDoc_STRVAR(gone_doc, "gone(rank) -> 0 while the rank takes part, 1 if it left in order, 2 after a failure");

static PyObject *gone(PyObject *self, PyObject *number) {
    int rank;
    if (!read_int(number, &rank)) return NULL;
    return PyLong_FromUnsignedLong(atomic_load(&seat_of(&((Segment *)self)->group, rank)->gone));
}

PyDoc_STRVAR(leave_doc, "leave(how): tell waiting peers that this rank will not come again; 1 in order, 2 after a failure");

static PyObject *leave_group(PyObject *self, PyObject *number) {
    int how;
    if (!read_int(number, &how)) return NULL;
    leave(&((Segment *)self)->group, (enum leaving)how);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(stop_doc, "stop(): end every wait of this process");

static PyObject *stop(PyObject *self, PyObject *unused) {
    (void)unused;
    atomic_store(&((Segment *)self)->group.stop, true);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(bytes_doc, "segment_bytes(size, chunk, channel) -> bytes of a segment for so many ranks");

static PyObject *segment_bytes(PyObject *module, PyObject *args) {
    struct group g = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "inn", &g.size, &g.chunk, &g.channel)) return NULL;
    return PyLong_FromSize_t(measure(&g));
}

static int init(PyObject *self, PyObject *args, PyObject *names) {
    struct group *g = &((Segment *)self)->group;
    PyObject *watch;
    int fd;
    (void)names;
    if (!PyArg_ParseTuple(args, "iiinnO", &fd, &g->rank, &g->size, &g->chunk, &g->channel, &watch)) return -1;
    if (g->size < 1 || g->size > MOST_RANKS || g->rank < 0 || g->rank >= g->size || PyTuple_Size(watch) != g->size) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a segment has 1 to 256 ranks, and one pidfd for each");
        return -1;
    }
    for (int rank = 0; rank < g->size; rank++) {
        if (!read_int(PyTuple_GetItem(watch, rank), &g->watch[rank])) return -1;
    }
    void *base = mmap(NULL, measure(g), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    g->base = base;
    return 0;
}

static void dealloc(PyObject *self) {
    struct group *g = &((Segment *)self)->group;
    PyTypeObject *type = Py_TYPE(self);
    if (g->base) munmap(g->base, g->bytes);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef methods[] = {
    {"run", FAST(run), METH_FASTCALL, run_doc},
    {"send", FAST(send_to), METH_FASTCALL, send_doc},
    {"open", FAST(open_envelope), METH_FASTCALL, open_doc},
    {"read", FAST(read_message), METH_FASTCALL, read_doc},
    {"shares", FAST(shares), METH_FASTCALL, shares_doc},
    {"mail", mail, METH_O, mail_doc},
    {"words", words, METH_O, words_doc},
    {"room", room, METH_O, room_doc},
    {"arrived", arrived, METH_O, arrived_doc},
    {"gone", gone, METH_O, gone_doc},
    {"came", came, METH_NOARGS, came_doc},
    {"leave", leave_group, METH_O, leave_doc},
    {"stop", stop, METH_NOARGS, stop_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Segment(fd, rank, size, chunk, channel, watch): the shared segment, mapped."},
    {Py_tp_init, init},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"lockstep.shm._core.Segment", sizeof(Segment), 0, Py_TPFLAGS_DEFAULT, slots};

static PyMethodDef functions[] = {
    {"segment_bytes", segment_bytes, METH_VARARGS, bytes_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", "Shared-memory collectives.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&spec);
    if (!module || !type || PyModule_AddObject(module, "Segment", type) < 0) {
        Py_XDECREF(module);
        Py_XDECREF(type);
        return NULL;
    }
    return module;
}
