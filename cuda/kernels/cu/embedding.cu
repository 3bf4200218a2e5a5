// Embedding lookup, and the gradient of the table: row `id` is the sum of the rows of dy at the positions of `id`,
// added in the order of the positions, which makes it bit-identical to the CPU's (ops/src/embedding.rs).
//
// The positions are sorted by index beforehand, with a bitonic network over keys that are all distinct, so the sorted
// order is unique. Chunks of keys are sorted in shared memory; only steps over longer distances are launches of their
// own.
#include "pack.cuh"
#include "target.cuh"

struct GatherArgs {
    // [entries, size]
    uint64_t table;
    // u32 of [count]. An index out of range gives a row of NaN, ELSEWHERE one of zeros.
    uint64_t indices;
    // [count, size]
    uint64_t y;
    uint64_t count, size, entries;
};

// Each block processes a row.
template <bool PACKED, class T> DEVICE void look_up(const GatherArgs& a) {
    constexpr unsigned N = Pack<T>::COUNT;
    for (uint64_t row = blockIdx.x; row < a.count; row += gridDim.x) {
        uint64_t id = as<uint32_t>(a.indices)[row];
        float none[N];
        for (unsigned i = 0; i < N; i++) none[i] = id == ELSEWHERE ? 0.0f : NAN;
        for (uint64_t first = uint64_t(threadIdx.x) * N; first < a.size; first += uint64_t(blockDim.x) * N) {
            uint64_t left = a.size - first;
            Pack<T> pack = Pack<T>::of(none);
            if (id < a.entries) pack = load_pack<PACKED>(as<T>(a.table) + id * a.size + first, left);
            store_pack<PACKED>(as_mut<T>(a.y) + row * a.size + first, left, pack);
        }
    }
}

template <class T> DEVICE void gather(const GatherArgs& a) {
    bool packed = a.size % Pack<T>::COUNT == 0 && in_packs(as<T>(a.table), as<T>(a.y));
    packed ? look_up<true, T>(a) : look_up<false, T>(a);
}

KERNEL(gather, GatherArgs, 256)

// Keys per block.
constexpr uint64_t CHUNK = 2048;

struct SortArgs {
    uint64_t indices;
    // u64; the number of keys is a power of two, at least CHUNK and at least `count`. A key is index · 2³² + position.
    // The keys after the first `count` have all bits set.
    uint64_t keys;
    uint64_t count;
    // Keys per run that is being sorted, and the distance between the keys that are compared.
    uint64_t run, distance;
};

// Orders a pair of keys: ascending in every other run, descending in the runs between.
DEVICE void order(uint64_t& front, uint64_t& back, bool rises) {
    if ((front > back) == rises) {
        uint64_t was = front;
        front = back;
        back = was;
    }
}

// The steps within a chunk, one pair of keys per thread. `begin` is the global index of the chunk's first key.
DEVICE void steps(uint64_t* keys, uint64_t begin, uint64_t run) {
    uint64_t longest = run / 2 < CHUNK / 2 ? run / 2 : CHUNK / 2;
    for (uint64_t distance = longest; distance > 0; distance /= 2) {
        __syncthreads();
        uint64_t front = threadIdx.x / distance * 2 * distance + threadIdx.x % distance;
        order(keys[front], keys[front + distance], ((begin + front) & run) == 0);
    }
}

// Creates the keys of a chunk and sorts them.
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

// One step over a distance of at least a chunk, one pair of keys per thread.
ENTRY(sort_step, SortArgs, 1024) {
    uint64_t front = global_thread() / a.distance * 2 * a.distance + global_thread() % a.distance;
    uint64_t* keys = as_mut<uint64_t>(a.keys);
    order(keys[front], keys[front + a.distance], (front & a.run) == 0);
}

// The remaining steps of a run, within chunks.
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
    // The sorted keys.
    uint64_t keys;
    // f32 of [entries, size]. Rows without a position are not touched.
    uint64_t to;
    uint64_t count, size, entries;
    // Whether to add to the existing rows instead of overwriting them.
    uint64_t add;
};

// Rows that are loaded at a time, to hide memory latency.
constexpr unsigned AT_ONCE = 8;

// A block processes the index whose first position is the blockIdx.x-th sorted key; a thread processes a pack of
// columns.
template <bool PACKED, class T> DEVICE void sum_positions(const ScatterArgs& a) {
    constexpr unsigned N = Pack<T>::COUNT;
    const uint64_t* keys = as<uint64_t>(a.keys);
    uint64_t at = blockIdx.x, id = keys[at] >> 32, column = (uint64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
    bool is_first = at == 0 || keys[at - 1] >> 32 != id;
    if (!is_first || id >= a.entries || column >= a.size) return;
    uint64_t left = a.size - column;
    float sums[N] = {};
    bool goes_on = true;
    for (; goes_on; at += AT_ONCE) {
        Pack<T> rows[AT_ONCE];
        bool is_there[AT_ONCE];
        UNROLL
        for (unsigned k = 0; k < AT_ONCE; k++) {
            uint64_t key = at + k < a.count ? keys[at + k] : ~uint64_t(0);
            is_there[k] = key >> 32 == id;
            if (is_there[k]) rows[k] = load_pack<PACKED>(as<T>(a.dy) + (key & 0xffffffffu) * a.size + column, left);
        }
        UNROLL
        for (unsigned k = 0; k < AT_ONCE; k++) {
            UNROLL
            for (unsigned i = 0; i < N; i++) sums[i] = is_there[k] ? sums[i] + rows[k][i] : sums[i];
        }
        goes_on = is_there[AT_ONCE - 1];
    }
    float* to = as_mut<float>(a.to) + id * a.size + column;
    UNROLL
    for (unsigned i = 0; i < N; i += 4) {
        uint64_t rest = left < i ? 0 : left - i;
        if (a.add) {
            Pack<float> before = load_pack<PACKED>(to + i, rest);
            UNROLL
            for (unsigned k = 0; k < 4; k++) sums[i + k] = before[k] + sums[i + k];
        }
        store_pack<PACKED>(to + i, rest, Pack<float>::of(sums + i));
    }
}

template <class T> DEVICE void scatter(const ScatterArgs& a) {
    bool packed = a.size % Pack<T>::COUNT == 0 && in_packs(as<T>(a.dy)) && in_packs(as<float>(a.to));
    packed ? sum_positions<true, T>(a) : sum_positions<false, T>(a);
}

KERNEL(scatter, ScatterArgs, 256)
