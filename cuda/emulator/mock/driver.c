// libcuda.so.1 on host memory, for tests on machines without a GPU.
//
// Like the real driver: streams work in order, each on its own thread, so that code that does not wait for an event
// finds memory that is not written yet; calls fail without a current context; a kernel's error fails all later calls; a
// device has a limited amount of memory. Unlike the real driver, it is slow.
//
// MOCK_DEVICES sets the number of devices (default 8), MOCK_DEVICE_BYTES the memory of each (default 8 GiB);
// MOCK_COUNTS prints the counters of counters.h.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stddef.h>
#include <sys/mman.h>
#include <time.h>

#include "mock.h"

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209,
    INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILED = 719, NOT_PERMITTED = 800, MOST_DEVICES = 64 };
static __thread int current; // number of the current device, from 1
#define NEEDS_CONTEXT if (!current) return INVALID_CONTEXT

int mock_current(void) { return current; }

// An error on a stream fails all later calls, until the program ends.
static int failed;
#define NEEDS_HEALTH if (__atomic_load_n(&failed, __ATOMIC_ACQUIRE)) return LAUNCH_FAILED
static void mock_fail(const char *why) {
    fprintf(stderr, "mock: %s\n", why);
    __atomic_store_n(&failed, 1, __ATOMIC_RELEASE);
}

static int devices(void) {
    const char *said = getenv("MOCK_DEVICES");
    int count = said ? atoi(said) : 8;
    return count < 0 ? 0 : count > MOST_DEVICES ? MOST_DEVICES : count;
}

#include "counters.h"
static int synchronize(Stream *stream);
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer && device / 4 == peer / 4; return 0; }
#include "uses.h"
#include "pool.h"
static const Seen *seen_by(Stream *stream);
static Point next_on(Stream *stream);
static void allocated(Stream *stream, const char *start, size_t bytes);
static void freed(Stream *stream, const char *start);
#include "memory.h"
#include "streams.h"
#include "modules.h"

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = devices(); return 0; }
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= devices()) return INVALID_DEVICE;
    *device = ordinal;
    return 0;
}
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "mock %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = device_bytes(); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0, 16); uuid[15] = device; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const struct { int attribute, value; } known[] = {
        {1, 1024}, // threads per block
        {8, 48 << 10}, // bytes of shared memory per block, by default
        {10, 32}, // threads per warp
        {16, 4}, // multiprocessors
        {75, 9}, {76, 0}, // compute capability
        {97, 227 << 10}, // bytes of shared memory per block, opt-in
        {115, 1}, // has memory pools
    };
    (void)device;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].attribute == attribute) { *value = known[i].value; return 0; }
    }
    return INVALID_VALUE;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device < 0 || device >= devices() ? INVALID_DEVICE : 0; }
int cuCtxSetCurrent(void *context) { current = (int)(intptr_t)context; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)(intptr_t)current; return 0; }
int cuCtxGetDevice(int *device) { NEEDS_CONTEXT; *device = current - 1; return 0; }

static const char *const *words(int code) {
    static const struct { int code; const char *words[2]; } known[] = {
        {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
        {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
        {INVALID_DEVICE, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
        {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "the image of the kernels is empty or damaged"}},
        {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "no current context"}},
        {NO_BINARY, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "the kernels were not compiled for the emulator"}},
        {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
        {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
        {NOT_READY, {"CUDA_ERROR_NOT_READY", "device not ready"}},
        {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "a kernel has failed"}},
        {NOT_PERMITTED, {"CUDA_ERROR_NOT_PERMITTED", "kernels are loaded while a collective is in flight"}},
    };
    static const char *const other[2] = {"CUDA_ERROR_UNKNOWN", "of the mock"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) if (known[i].code == code) return known[i].words;
    return other;
}
int cuGetErrorName(int code, const char **text) { *text = words(code)[0]; return 0; }
int cuGetErrorString(int code, const char **text) { *text = words(code)[1]; return 0; }
