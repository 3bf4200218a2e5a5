// A driver and an NCCL that work on the memory of the host, for tests on machines without a GPU.
//
// What it keeps of the real ones: streams do their work in order, each on a thread of its own, so that what does not wait for an
// event finds memory that is not written yet; calls fail without a current context; memory is filled with other bytes before it is given
// out and when it comes back; a communicator does not block, is not ready before all ranks have come, and must not be used before it
// is; what a group has begun ends when all ranks have begun it, or by an abort. What it does not keep: any speed, and messages
// beside each other (the calls of a group are one exchange between all ranks of the communicator).
//
// Compiled twice, as libcuda.so.1 (-DDRIVER) and libnccl.so.2 (-DNCCL), which uses the other's streams.
// A module is a shared library of emulated kernels (cuda/kernels/tests/emulated/emulator.h), whose blocks run on the stream's thread.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct Task { void (*run)(void *); void *argument; struct Task *next; } Task;
typedef struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Task *first, *last;
    long begun, done;
    int closed;
    pthread_t thread;
} Stream;
void mock_enqueue(Stream *stream, void (*run)(void *), void *argument);
int mock_current(void);

#ifdef DRIVER
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500,
    NOT_READY = 600, LAUNCH_FAILED = 719 };
#define DEVICES 8
static __thread int current; // number of the device, from 1
#define NEEDS_CONTEXT if (!current) return INVALID_CONTEXT

int mock_current(void) { return current; }

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    *device = ordinal;
    return 0;
}
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "mock %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device + 1) << 30; return 0; }
// Compute capability: 75 the major, 76 the minor number.
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    if (attribute != 75 && attribute != 76) return INVALID_VALUE;
    *value = attribute == 75 ? 9 : 0;
    return 0;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device / 4 == peer / 4; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device < 0 || device >= DEVICES ? INVALID_DEVICE : 0; }
int cuCtxSetCurrent(void *context) { current = (int)(intptr_t)context; return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == INVALID_CONTEXT ? "no current context" : "of the mock"; return 0; }

// The size goes ahead of the bytes, for the free.
enum { HEAD = 256 };
static void *take(size_t bytes) {
    char *block = NULL;
    if (posix_memalign((void **)&block, HEAD, HEAD + bytes)) return NULL;
    memcpy(block, &bytes, sizeof bytes);
    return memset(block + HEAD, 0xAA, bytes);
}
static void give_back(void *start) {
    char *block = (char *)start - HEAD;
    size_t bytes;
    memcpy(&bytes, block, sizeof bytes);
    memset(start, 0xDD, bytes);
    free(block);
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    NEEDS_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    if (bytes > (size_t)4 << 30) return OUT_OF_MEMORY;
    *address = (uint64_t)take(bytes);
    return *address ? 0 : OUT_OF_MEMORY;
}
int cuMemFree_v2(uint64_t address) { NEEDS_CONTEXT; give_back((void *)address); return 0; }
int cuMemHostAlloc(void **start, size_t bytes, unsigned flags) {
    NEEDS_CONTEXT;
    if (!bytes || flags) return INVALID_VALUE;
    *start = take(bytes);
    return *start ? 0 : OUT_OF_MEMORY;
}
int cuMemFreeHost(void *start) { NEEDS_CONTEXT; give_back(start); return 0; }

static void *work(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    while (stream->first || !stream->closed) {
        Task *task = stream->first;
        if (!task) { pthread_cond_wait(&stream->changed, &stream->lock); continue; }
        pthread_mutex_unlock(&stream->lock);
        task->run(task->argument);
        pthread_mutex_lock(&stream->lock);
        stream->first = task->next;
        if (!stream->first) stream->last = NULL;
        stream->done++;
        free(task);
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}
void mock_enqueue(Stream *stream, void (*run)(void *), void *argument) {
    Task *task = malloc(sizeof *task);
    *task = (Task){run, argument, NULL};
    pthread_mutex_lock(&stream->lock);
    if (stream->last) stream->last->next = task; else stream->first = task;
    stream->last = task;
    stream->begun++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}
int cuStreamCreate(Stream **stream, unsigned flags) {
    NEEDS_CONTEXT;
    if (flags != 1) return INVALID_VALUE; // one that waits for no other
    *stream = calloc(1, sizeof **stream);
    pthread_mutex_init(&(*stream)->lock, NULL);
    pthread_cond_init(&(*stream)->changed, NULL);
    return pthread_create(&(*stream)->thread, NULL, work, *stream) ? OUT_OF_MEMORY : 0;
}
static void *bury(void *argument) {
    Stream *stream = argument;
    pthread_join(stream->thread, NULL);
    free(stream);
    return NULL;
}
// What is on it is finished behind the caller's back.
int cuStreamDestroy_v2(Stream *stream) {
    pthread_mutex_lock(&stream->lock);
    stream->closed = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_t undertaker;
    if (!pthread_create(&undertaker, NULL, bury, stream)) pthread_detach(undertaker);
    return 0;
}
extern int mock_failed_launch;
int cuStreamQuery(Stream *stream) {
    NEEDS_CONTEXT;
    if (__atomic_load_n(&mock_failed_launch, __ATOMIC_ACQUIRE)) return LAUNCH_FAILED;
    pthread_mutex_lock(&stream->lock);
    int done = stream->done == stream->begun;
    pthread_mutex_unlock(&stream->lock);
    return done ? 0 : NOT_READY;
}
int cuStreamSynchronize(Stream *stream) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&stream->lock);
    long until = stream->begun;
    while (stream->done < until) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return __atomic_load_n(&mock_failed_launch, __ATOMIC_ACQUIRE) ? LAUNCH_FAILED : 0;
}

// An event is one moment, shared by those who wait for it: a new record makes a new one.
typedef struct { pthread_mutex_t lock; pthread_cond_t changed; int happened, holders; } Moment;
typedef struct { pthread_mutex_t lock; Moment *moment; } Event;
static void let_go(Moment *moment) {
    pthread_mutex_lock(&moment->lock);
    int last = --moment->holders == 0;
    pthread_mutex_unlock(&moment->lock);
    if (last) free(moment);
}
static void happen(void *argument) {
    Moment *moment = argument;
    pthread_mutex_lock(&moment->lock);
    moment->happened = 1;
    pthread_cond_broadcast(&moment->changed);
    pthread_mutex_unlock(&moment->lock);
    let_go(moment);
}
static void await(void *argument) {
    Moment *moment = argument;
    pthread_mutex_lock(&moment->lock);
    while (!moment->happened) pthread_cond_wait(&moment->changed, &moment->lock);
    pthread_mutex_unlock(&moment->lock);
    let_go(moment);
}
static Moment *hold(Event *event) {
    pthread_mutex_lock(&event->lock);
    Moment *moment = event->moment;
    if (moment) {
        pthread_mutex_lock(&moment->lock);
        moment->holders++;
        pthread_mutex_unlock(&moment->lock);
    }
    pthread_mutex_unlock(&event->lock);
    return moment;
}
int cuEventCreate(Event **event, unsigned flags) {
    NEEDS_CONTEXT;
    (void)flags;
    *event = calloc(1, sizeof **event);
    pthread_mutex_init(&(*event)->lock, NULL);
    return 0;
}
int cuEventRecord(Event *event, Stream *stream) {
    NEEDS_CONTEXT;
    Moment *moment = calloc(1, sizeof *moment);
    pthread_mutex_init(&moment->lock, NULL);
    pthread_cond_init(&moment->changed, NULL);
    moment->holders = 2;
    pthread_mutex_lock(&event->lock);
    Moment *before = event->moment;
    event->moment = moment;
    pthread_mutex_unlock(&event->lock);
    if (before) let_go(before);
    mock_enqueue(stream, happen, moment);
    return 0;
}
int cuEventQuery(Event *event) {
    Moment *moment = hold(event);
    if (!moment) return 0;
    pthread_mutex_lock(&moment->lock);
    int happened = moment->happened;
    pthread_mutex_unlock(&moment->lock);
    let_go(moment);
    return happened ? 0 : NOT_READY;
}
int cuEventDestroy_v2(Event *event) {
    if (event->moment) let_go(event->moment);
    free(event);
    return 0;
}
int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    NEEDS_CONTEXT;
    (void)flags;
    Moment *moment = hold(event);
    if (moment) mock_enqueue(stream, await, moment);
    return 0;
}

typedef struct { void *to; const void *from; size_t bytes; } Copy;
static void copy(void *argument) {
    Copy *job = argument;
    usleep(50); // time for those who do not wait to be wrong
    memcpy(job->to, job->from, job->bytes);
    free(job);
}
static int copy_on(Stream *stream, void *to, const void *from, size_t bytes) {
    NEEDS_CONTEXT;
    Copy *job = malloc(sizeof *job);
    *job = (Copy){to, from, bytes};
    mock_enqueue(stream, copy, job);
    return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, Stream *on) { return copy_on(on, (void *)to, from, bytes); }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, Stream *on) { return copy_on(on, to, (void *)from, bytes); }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream *on) { return copy_on(on, (void *)to, (void *)from, bytes); }

// Where the bytes of an ELF file end: behind its table of sections.
static size_t elf_bytes(const unsigned char *image) {
    uint64_t sections;
    uint16_t size, count;
    memcpy(&sections, image + 40, sizeof sections);
    memcpy(&size, image + 58, sizeof size);
    memcpy(&count, image + 60, sizeof count);
    return sections + (size_t)size * count;
}
int cuModuleLoadData(void **module, const void *image) {
    NEEDS_CONTEXT;
    if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
    size_t bytes = elf_bytes(image);
    int file = memfd_create("kernels", 0);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int written = file >= 0 && write(file, image, bytes) == (ssize_t)bytes;
    // The file stays open: another one of this path would be taken for the same library.
    *module = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    return *module ? 0 : INVALID_IMAGE;
}
int cuModuleUnload(void *module) { NEEDS_CONTEXT; return dlclose(module) ? INVALID_VALUE : 0; }

typedef const char *(*Entry)(const void *args, size_t bytes, const unsigned *grid, unsigned threads, size_t shared, unsigned order);
typedef struct { Entry entry; size_t bytes; int most_shared; } Function;
// Functions live as long as the program, as nobody gives them back.
int cuModuleGetFunction(Function **function, void *module, const char *name) {
    NEEDS_CONTEXT;
    char of_size[256];
    snprintf(of_size, sizeof of_size, "%s_bytes", name);
    void *entry = dlsym(module, name);
    size_t *bytes = dlsym(module, of_size);
    if (!entry || !bytes) return NOT_FOUND;
    *function = malloc(sizeof **function);
    **function = (Function){(Entry)entry, *bytes, 48 << 10};
    return 0;
}
// 8 is the most shared memory that a launch may ask for.
int cuFuncSetAttribute(Function *function, int attribute, int value) {
    NEEDS_CONTEXT;
    if (attribute != 8 || value > 227 << 10) return INVALID_VALUE;
    function->most_shared = value;
    return 0;
}
typedef struct { Function *function; unsigned grid[3], threads, shared; unsigned char args[]; } Start;
int mock_failed_launch; // what a kernel finds wrong with itself shows at the next call of its stream
static void start(void *argument) {
    Start *job = argument;
    static unsigned order; // of threads: another one each time
    const char *failure = job->function->entry(
        job->args, job->function->bytes, job->grid, job->threads, job->shared, __atomic_fetch_add(&order, 1, __ATOMIC_RELAXED) % 4);
    if (failure) {
        fprintf(stderr, "mock: %s\n", failure);
        __atomic_store_n(&mock_failed_launch, 1, __ATOMIC_RELEASE);
    }
    free(job);
}
int cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
    unsigned shared, Stream *stream, void **parameters, void **extra) {
    NEEDS_CONTEXT;
    if (!x || !y || !z || threads_y != 1 || threads_z != 1 || extra || (int)shared > function->most_shared) return INVALID_VALUE;
    Start *job = malloc(sizeof *job + function->bytes);
    *job = (Start){function, {x, y, z}, threads, shared};
    memcpy(job->args, parameters[0], function->bytes);
    mock_enqueue(stream, start, job);
    return 0;
}
#endif

#ifdef NCCL
#include "nccl.h"
#endif
