// Rows of a table by index, and the gradient of the table: row `id` is the sum of the rows of dy at the positions of `id`, in the order
// of the positions, which are the CPU's bits (model/src/ops/embedding.rs).
//
// For that the positions are sorted by index: a bitonic network over keys that are all different, so its result has no choice. Chunks
// of keys are sorted in shared memory; only steps over longer distances are launches of their own.
#include "device.cuh"

struct GatherArgs {
    // [entries, size]
    uint64_t table;
    // u32 of [count]. One that is no row gives a row of NaN.
    uint64_t indices;
    // [count, size]
    uint64_t y;
    uint64_t count, size, entries;
};

template <class T> DEVICE void gather(const GatherArgs& a) {
    for (uint64_t i = global_thread(); i < a.count * a.size; i += global_threads()) {
        uint64_t id = as<uint32_t>(a.indices)[i / a.size];
        T& y = as_mut<T>(a.y)[i];
        if (id < a.entries) y = as<T>(a.table)[id * a.size + i % a.size];
        else store(y, NAN);
    }
}

KERNEL(gather, GatherArgs, 256)

// Keys of a block.
constexpr uint64_t CHUNK = 2048;

struct SortArgs {
    uint64_t indices;
    // u64 of a power of two of at least CHUNK and `count`: index · 2³² + position; all ones behind the last.
    uint64_t keys;
    uint64_t count;
    // Keys of a run that is being sorted, and the distance of those that are compared.
    uint64_t run, distance;
};

// The smaller one goes to the front in every other run, to the back in those between.
DEVICE void order(uint64_t& front, uint64_t& back, bool rises) {
    if ((front > back) == rises) {
        uint64_t was = front;
        front = back;
        back = was;
    }
}

// The steps within a chunk, each thread with a pair of keys, `begin` being the chunk's first key of all.
DEVICE void steps(uint64_t* keys, uint64_t begin, uint64_t run) {
    uint64_t longest = run / 2 < CHUNK / 2 ? run / 2 : CHUNK / 2;
    for (uint64_t distance = longest; distance > 0; distance /= 2) {
        __syncthreads();
        uint64_t front = threadIdx.x / distance * 2 * distance + threadIdx.x % distance;
        order(keys[front], keys[front + distance], ((begin + front) & run) == 0);
    }
}

// Makes the keys of a chunk, and sorts them.
ENTRY(sort_chunks, SortArgs, 1024) {
    DYNAMIC_SHARED(uint64_t, keys);
    uint64_t begin = blockIdx.x * CHUNK;
    for (uint64_t i = threadIdx.x; i < CHUNK; i += blockDim.x) {
        uint64_t position = begin + i;
        keys[i] = position < a.count ? uint64_t(as<uint32_t>(a.indices)[position]) << 32 | position : ~uint64_t(0);
    }
    for (uint64_t run = 2; run <= CHUNK; run *= 2) steps(keys, begin, run);
    __syncthreads();
    for (uint64_t i = threadIdx.x; i < CHUNK; i += blockDim.x) as_mut<uint64_t>(a.keys)[begin + i] = keys[i];
}

// One step over at least a chunk, each thread with a pair of keys.
ENTRY(sort_step, SortArgs, 1024) {
    uint64_t front = global_thread() / a.distance * 2 * a.distance + global_thread() % a.distance;
    uint64_t* keys = as_mut<uint64_t>(a.keys);
    order(keys[front], keys[front + a.distance], (front & a.run) == 0);
}

// The steps that are left of a run.
ENTRY(sort_rest, SortArgs, 1024) {
    DYNAMIC_SHARED(uint64_t, keys);
    uint64_t begin = blockIdx.x * CHUNK;
    uint64_t* all = as_mut<uint64_t>(a.keys) + begin;
    for (uint64_t i = threadIdx.x; i < CHUNK; i += blockDim.x) keys[i] = all[i];
    steps(keys, begin, a.run);
    __syncthreads();
    for (uint64_t i = threadIdx.x; i < CHUNK; i += blockDim.x) all[i] = keys[i];
}

struct ScatterArgs {
    // [count, size]
    uint64_t dy;
    // Sorted.
    uint64_t keys;
    // f32 of [entries, size]. Only rows with a position are touched.
    uint64_t to;
    uint64_t count, size, entries;
    // Onto what is there, or instead of it.
    uint64_t add;
};

// Rows that are on their way at a time: memory answers late.
constexpr int AT_ONCE = 8;

// A block takes the index whose first position is the blockIdx.x-th of the sorted ones, a thread a column.
template <class T> DEVICE void scatter(const ScatterArgs& a) {
    const uint64_t* keys = as<uint64_t>(a.keys);
    uint64_t at = blockIdx.x, id = keys[at] >> 32, column = uint64_t(blockIdx.y) * blockDim.x + threadIdx.x;
    bool is_first = at == 0 || keys[at - 1] >> 32 != id;
    if (!is_first || id >= a.entries || column >= a.size) return;
    float sum = 0.0f;
    bool goes_on = true;
    for (; goes_on; at += AT_ONCE) {
        float rows[AT_ONCE];
        bool is_there[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) {
            uint64_t key = at + i < a.count ? keys[at + i] : ~uint64_t(0);
            is_there[i] = key >> 32 == id;
            rows[i] = is_there[i] ? load(as<T>(a.dy)[(key & 0xffffffffu) * a.size + column]) : 0.0f;
        }
        for (int i = 0; i < AT_ONCE; i++) sum = is_there[i] ? sum + rows[i] : sum;
        goes_on = is_there[AT_ONCE - 1];
    }
    float& to = as_mut<float>(a.to)[id * a.size + column];
    to = a.add ? to + sum : sum;
}

KERNEL(scatter, ScatterArgs, 256)
