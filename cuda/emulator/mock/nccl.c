// libnccl.so.2 on the mock driver and its streams, for tests on machines without a GPU.
//
// Like the real library: a communicator does not block, is not ready before all ranks have joined, and must not be used
// before it is ready; an operation of a group ends when all ranks have begun it, or by an abort. Unlike the real
// library, messages do not run concurrently (the calls of a group are one exchange between all ranks of the
// communicator).
#include "mock.h"

enum { SUCCESS = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { U8 = 1, I64 = 4, F16 = 6, F32 = 7, BF16 = 9 };
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, SEND, RECV };
#define RANKS 64

typedef struct { int kind, dtype, op, root; size_t count; const char *from; char *to; } Call;
typedef struct World {
    char id[128];
    int size, joined, left;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long arrived; // barrier arrivals of all ranks together
    Call *calls[RANKS];
    int count[RANKS];
    struct World *next;
} World;
typedef struct { World *world; int rank, error, finalized, aborted, launching; long phase, running; } Comm;
typedef struct { Comm *comm; Stream *stream; Call *calls; int count, device; } Bundle;

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static World *worlds;

// Faults that tests inject, for the ranks and communicator sizes that they name (-1: none).
int mock_fails_rank = -1;  // an asynchronous error when it begins an operation
int mock_hangs_rank = -1;  // its stream never joins the others
int mock_absent_rank = -1; // never connects
long mock_live;            // communicators that are neither destroyed nor aborted

int ncclGetVersion(int *version) { *version = 22809; return SUCCESS; }
const char *ncclGetErrorString(int code) { return code == REMOTE ? "remote process exited" : code == SYSTEM ? "system error" : "of the mock"; }
const char *ncclGetLastError(void *comm) { (void)comm; return ""; }
int ncclGetUniqueId(char *id) {
    static int last;
    memset(id, 0, 128);
    snprintf(id, 128, "mock %d %d", getpid(), __sync_add_and_fetch(&last, 1));
    return SUCCESS;
}

typedef struct { size_t size; unsigned magic, version; int blocking; } Config;
typedef struct { char bytes[128]; } Id;
int ncclCommInitRankConfig(Comm **out, int size, Id id, int rank, Config *config) {
    if (!mock_current() || config->magic != 0xcafebeef || config->blocking != 0 || size > RANKS) return INVALID_USAGE;
    if (rank < 0 || rank >= size || memcmp(id.bytes, "mock ", 5)) return INVALID_ARGUMENT;
    pthread_mutex_lock(&registry);
    World *world = worlds;
    while (world && memcmp(world->id, id.bytes, 128)) world = world->next;
    if (!world) {
        world = calloc(1, sizeof *world);
        memcpy(world->id, id.bytes, 128);
        world->size = size;
        pthread_mutex_init(&world->lock, NULL);
        pthread_cond_init(&world->changed, NULL);
        world->next = worlds;
        worlds = world;
    }
    pthread_mutex_unlock(&registry);
    if (world->size != size) return INVALID_ARGUMENT;
    pthread_mutex_lock(&world->lock);
    world->joined += rank != mock_absent_rank;
    pthread_mutex_unlock(&world->lock);
    *out = calloc(1, sizeof **out);
    **out = (Comm){.world = world, .rank = rank};
    __sync_add_and_fetch(&mock_live, 1);
    return IN_PROGRESS;
}
int ncclCommGetAsyncError(Comm *comm, int *error) {
    World *world = comm->world;
    pthread_mutex_lock(&world->lock);
    int ready = world->joined == world->size && !comm->launching && (!comm->finalized || world->left == world->size);
    *error = comm->error ? comm->error : ready ? SUCCESS : IN_PROGRESS;
    pthread_mutex_unlock(&world->lock);
    return SUCCESS;
}
// Real NCCL reports success only when all other ranks have come this far as well.
int ncclCommFinalize(Comm *comm) {
    pthread_mutex_lock(&comm->world->lock);
    comm->finalized = 1;
    comm->world->left++;
    pthread_mutex_unlock(&comm->world->lock);
    return IN_PROGRESS;
}
static int end(Comm *comm, int aborted) {
    World *world = comm->world;
    pthread_mutex_lock(&world->lock);
    // A rank that has left does not keep others from leaving.
    world->left += aborted && !comm->finalized;
    comm->aborted = aborted;
    pthread_cond_broadcast(&world->changed);
    while (comm->running || comm->launching) pthread_cond_wait(&world->changed, &world->lock);
    pthread_mutex_unlock(&world->lock);
    __sync_sub_and_fetch(&mock_live, 1);
    free(comm);
    return SUCCESS;
}
int ncclCommDestroy(Comm *comm) { return end(comm, 0); }
int ncclCommAbort(Comm *comm) { return end(comm, 1); }

static size_t width(int dtype) { return dtype == U8 ? 1 : dtype == I64 ? 8 : dtype == F32 ? 4 : 2; }
static float widen(uint16_t bits, int dtype) {
    if (dtype == BF16) { uint32_t wide = (uint32_t)bits << 16; float value; memcpy(&value, &wide, 4); return value; }
    _Float16 half; memcpy(&half, &bits, 2); return (float)half;
}
static uint16_t narrow(float value, int dtype) {
    uint16_t bits;
    if (dtype == F16) { _Float16 half = (_Float16)value; memcpy(&bits, &half, 2); return bits; }
    uint32_t wide; memcpy(&wide, &value, 4);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}
// Adds one more contribution, in rank order instead of a tree. 16-bit floats are rounded each time.
#define COMBINE(type, a, b) ((type)(max ? ((a) > (b) ? (a) : (b)) : (a) + (b)))
static void combine(char *into, const char *more, size_t count, int dtype, int max) {
    for (size_t i = 0; i < count; i++) {
        if (dtype == F32) { float *x = (float *)into + i, y = ((const float *)more)[i]; *x = COMBINE(float, *x, y); }
        else if (dtype == I64) { uint64_t *x = (uint64_t *)into + i, y = ((const uint64_t *)more)[i];
            *x = max ? ((int64_t)*x > (int64_t)y ? *x : y) : *x + y; }
        else if (dtype == U8) { uint8_t *x = (uint8_t *)into + i, y = ((const uint8_t *)more)[i]; *x = COMBINE(uint8_t, *x, y); }
        else { uint16_t *x = (uint16_t *)into + i; float a = widen(*x, dtype), b = widen(((const uint16_t *)more)[i], dtype);
            *x = narrow(COMBINE(float, a, b), dtype); }
    }
}

// Returns whether all ranks arrived. An abort releases this rank, except from the middle of an operation that all ranks
// have begun.
static int barrier(Comm *comm, int begun) {
    World *world = comm->world;
    long target = ++comm->phase * world->size;
    pthread_mutex_lock(&world->lock);
    world->arrived++;
    pthread_cond_broadcast(&world->changed);
    while (world->arrived < target && (begun || !comm->aborted)) pthread_cond_wait(&world->changed, &world->lock);
    int whole = world->arrived >= target;
    world->arrived -= !whole;
    pthread_mutex_unlock(&world->lock);
    return whole;
}
// Returns the call of rank `from` that sends what call `i` of rank `to` receives: messages between two ranks keep their
// order.
static Call *sender(World *world, int from, int to, int i) {
    int nth = 0;
    for (int earlier = 0; earlier < i; earlier++) {
        Call *call = &world->calls[to][earlier];
        nth += call->kind == RECV && call->root == from;
    }
    for (int j = 0; j < world->count[from]; j++) {
        Call *call = &world->calls[from][j];
        if (call->kind == SEND && call->root == to && !nth--) return call;
    }
    fprintf(stderr, "mock: rank %d sends nothing to rank %d\n", from, to);
    abort();
}
// Computes this rank's result of call `i` in newly allocated memory, with its size.
static char *result(Comm *comm, int i, size_t *bytes) {
    World *world = comm->world;
    Call *own = &world->calls[comm->rank][i];
    int size = world->size, unit = width(own->dtype);
    size_t one = own->count * unit;
    *bytes = own->kind == ALL_GATHER ? one * size : own->kind == SEND ? 0 : own->kind == REDUCE && own->root != comm->rank ? 0 : one;
    char *made = malloc(*bytes + 1);
    // The device of this rank's stream must be able to access the buffers.
    for (int rank = 0; rank < size && *bytes; rank++) if (world->calls[rank][i].from) mock_reach(world->calls[rank][i].from);
    Call *sent = own->kind == RECV ? sender(world, own->root, comm->rank, i) : NULL;
    if (sent && sent->count != own->count) { fprintf(stderr, "mock: %zu sent, %zu expected\n", sent->count, own->count); abort(); }
    if (sent && *bytes) mock_reach(sent->from);
    if (own->kind == ALL_GATHER)
        for (int rank = 0; rank < size; rank++) memcpy(made + rank * one, world->calls[rank][i].from, one);
    else if (own->kind == BROADCAST) memcpy(made, world->calls[own->root][i].from, one);
    else if (own->kind == RECV) memcpy(made, sent->from, one);
    else if (*bytes) {
        size_t skip = own->kind == REDUCE_SCATTER ? comm->rank * one : 0;
        memcpy(made, world->calls[0][i].from + skip, one);
        for (int rank = 1; rank < size; rank++) combine(made, world->calls[rank][i].from + skip, own->count, own->dtype, own->op == 2);
    }
    return made;
}
static void exchange(void *argument) {
    Bundle *bundle = argument;
    Comm *comm = bundle->comm;
    World *world = comm->world;
    pthread_mutex_lock(&world->lock);
    while ((comm->rank == mock_hangs_rank || comm->error) && !comm->aborted) pthread_cond_wait(&world->changed, &world->lock);
    int gone = comm->aborted;
    world->calls[comm->rank] = bundle->calls;
    world->count[comm->rank] = bundle->count;
    pthread_mutex_unlock(&world->lock);
    if (!gone && barrier(comm, 0)) {
        char **made = calloc(bundle->count + 1, sizeof *made);
        size_t *bytes = calloc(bundle->count + 1, sizeof *bytes);
        for (int rank = 0; rank < world->size; rank++)
            if (world->count[rank] != bundle->count) { fprintf(stderr, "mock: ranks began other calls\n"); abort(); }
        for (int i = 0; i < bundle->count; i++) made[i] = result(comm, i, &bytes[i]);
        barrier(comm, 1);
        for (int i = 0; i < bundle->count; i++) memcpy(bundle->calls[i].to, made[i], bytes[i]);
        for (int i = 0; i < bundle->count; i++) free(made[i]);
        free(made);
        free(bytes);
        barrier(comm, 1); // no rank's calls are freed before all have read them
    }
    mock_collective(bundle->device, -1);
    pthread_mutex_lock(&world->lock);
    comm->running--;
    pthread_cond_broadcast(&world->changed);
    pthread_mutex_unlock(&world->lock);
    free(bundle->calls);
    free(bundle);
}

static __thread int depth;
static __thread Bundle open_bundle;
static int add(Comm *comm, Stream *stream, Call call) {
    int ready;
    ncclCommGetAsyncError(comm, &ready);
    if (!mock_current() || !depth || ready != SUCCESS) return INVALID_USAGE;
    if (open_bundle.comm && open_bundle.comm != comm) return INVALID_USAGE;
    open_bundle.calls = realloc(open_bundle.calls, (open_bundle.count + 1) * sizeof call);
    open_bundle.calls[open_bundle.count++] = call;
    open_bundle.comm = comm;
    open_bundle.stream = stream;
    return SUCCESS;
}
// Like the real library, whose own thread enqueues the kernels after the call has returned.
static void *launch(void *argument) {
    Bundle *bundle = argument;
    Comm *comm = bundle->comm;
    usleep(100);
    for (int i = 0; i < bundle->count; i++) {
        mock_use(bundle->stream, bundle->calls[i].from);
        mock_use(bundle->stream, bundle->calls[i].to);
    }
    mock_enqueue(bundle->stream, exchange, bundle);
    pthread_mutex_lock(&comm->world->lock);
    comm->launching = 0;
    pthread_cond_broadcast(&comm->world->changed);
    pthread_mutex_unlock(&comm->world->lock);
    return NULL;
}
int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) {
    if (!depth) return INVALID_USAGE;
    if (--depth || !open_bundle.comm) return SUCCESS;
    Bundle *bundle = malloc(sizeof *bundle);
    *bundle = open_bundle;
    bundle->device = mock_current();
    mock_collective(bundle->device, 1);
    for (int i = 0; i < bundle->count; i++) mock_count(&mock_collectives, 1);
    memset(&open_bundle, 0, sizeof open_bundle);
    Comm *comm = bundle->comm;
    pthread_mutex_lock(&comm->world->lock);
    comm->running++;
    comm->launching = 1;
    if (comm->rank == mock_fails_rank) comm->error = REMOTE;
    pthread_mutex_unlock(&comm->world->lock);
    return start_detached(launch, bundle) ? SYSTEM : IN_PROGRESS;
}
int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, Comm *comm, Stream *stream) {
    return add(comm, stream, (Call){ALL_REDUCE, dtype, op, 0, count, from, to});
}
int ncclAllGather(const void *from, void *to, size_t count, int dtype, Comm *comm, Stream *stream) {
    return add(comm, stream, (Call){ALL_GATHER, dtype, 0, 0, count, from, to});
}
int ncclReduceScatter(const void *from, void *to, size_t count, int dtype, int op, Comm *comm, Stream *stream) {
    return add(comm, stream, (Call){REDUCE_SCATTER, dtype, op, 0, count, from, to});
}
int ncclBroadcast(const void *from, void *to, size_t count, int dtype, int root, Comm *comm, Stream *stream) {
    return add(comm, stream, (Call){BROADCAST, dtype, 0, root, count, from, to});
}
int ncclReduce(const void *from, void *to, size_t count, int dtype, int op, int root, Comm *comm, Stream *stream) {
    return add(comm, stream, (Call){REDUCE, dtype, op, root, count, from, to});
}
int ncclSend(const void *from, size_t count, int dtype, int peer, Comm *comm, Stream *stream) {
    return add(comm, stream, (Call){SEND, dtype, 0, peer, count, from, NULL});
}
int ncclRecv(void *to, size_t count, int dtype, int peer, Comm *comm, Stream *stream) {
    return add(comm, stream, (Call){RECV, dtype, 0, peer, count, NULL, to});
}
