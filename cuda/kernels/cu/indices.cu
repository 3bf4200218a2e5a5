// Converts indices of any of three types to u32 and checks each against its limit.
//
// A single block finds the first index out of range without atomics. There are only as many indices as tokens, and the
// work that uses them takes a thousand times as long.
#include "fault.cuh"

// Replaces an index out of range. Every limit is at most this value.
constexpr uint32_t NO_INDEX = 0xffffffffu;

struct IndicesArgs {
    uint64_t from;
    // u32 of [count].
    uint64_t to;
    // A Fault, filled in with `what`, the index, its position and the limit.
    uint64_t fault, what;
    uint64_t count, limit;
};

template <class T> DEVICE void indices(const IndicesArgs& a) {
    DYNAMIC_SHARED(uint64_t, firsts);
    uint64_t first = a.count;
    for (uint64_t i = threadIdx.x; i < a.count; i += blockDim.x) {
        T index = as<T>(a.from)[i];
        // A negative index converts to a value above every limit.
        bool is_below = uint64_t(int64_t(index)) < a.limit;
        as_mut<uint32_t>(a.to)[i] = is_below ? uint32_t(index) : NO_INDEX;
        if (!is_below && first == a.count) first = i;
    }
    firsts[threadIdx.x] = first;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        uint64_t other = threadIdx.x < half ? firsts[threadIdx.x + half] : a.count;
        if (threadIdx.x < half && other < firsts[threadIdx.x]) firsts[threadIdx.x] = other;
    }
    if (threadIdx.x == 0 && firsts[0] < a.count) {
        report(a.fault, a.what, uint64_t(int64_t(as<T>(a.from)[firsts[0]])), firsts[0], a.limit);
    }
}

ENTRY(indices_u8, IndicesArgs, 1024) { indices<uint8_t>(a); }
ENTRY(indices_u32, IndicesArgs, 1024) { indices<uint32_t>(a); }
ENTRY(indices_i64, IndicesArgs, 1024) { indices<int64_t>(a); }
