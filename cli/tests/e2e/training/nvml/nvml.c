// A mock of NVIDIA's management library: three GPUs with known metrics.
//
// MOCK_NVML_GPUS sets the number of GPUs, at most three. MOCK_NVML_INIT sets the return value of nvmlInit_v2. In
// MOCK_NVML_FAILS, "FUNCTION:GPU" makes that function return NOT_SUPPORTED for that GPU, and "lost:GPU" makes the GPU
// fall off the bus after ten requests for its handle.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, GPU_IS_LOST = 15 };

typedef struct { unsigned asked; } Gpu;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;

static Gpu gpus[3];

static unsigned count(void) {
    const char *text = getenv("MOCK_NVML_GPUS");
    return text ? (unsigned)atoi(text) : 3;
}

static int fails(const char *function, Gpu *gpu) {
    char entry[32];
    snprintf(entry, sizeof entry, "%s:%d", function, (int)(gpu - gpus));
    const char *wanted = getenv("MOCK_NVML_FAILS");
    return wanted && strstr(wanted, entry);
}

static int status(const char *function, Gpu *gpu) {
    if (fails("lost", gpu) && gpu->asked > 10) return GPU_IS_LOST;
    return fails(function, gpu) ? NOT_SUPPORTED : SUCCESS;
}

int nvmlInit_v2(void) {
    const char *text = getenv("MOCK_NVML_INIT");
    return text ? atoi(text) : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *found) {
    *found = count();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
    if (index >= count()) return INVALID_ARGUMENT;
    *gpu = gpus + index;
    (*gpu)->asked++;
    return status("handle", *gpu);
}

int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-%d0000000-aaaa-bbbb-cccc-dddddddddddd", (int)(gpu - gpus) + 1);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *rates) {
    rates->gpu = 50 + (unsigned)(gpu - gpus);
    rates->memory = 7;
    return status("utilization", gpu);
}

int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory *memory) {
    if (memory->version != (sizeof *memory | 2u << 24)) return INVALID_ARGUMENT;
    memory->total = 80ull << 30;
    memory->used = (unsigned long long)(gpu - gpus + 1) << 30;
    memory->free = memory->total - memory->used;
    return status("memory", gpu);
}

int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatts) {
    *milliwatts = 300500 + 1000 * (unsigned)(gpu - gpus);
    return status("power", gpu);
}

int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned *celsius) {
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = 60 + (unsigned)(gpu - gpus);
    return status("temperature", gpu);
}
