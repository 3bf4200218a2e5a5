// Converts indices of any of three types to u32 and checks each against its limit.
//
// A single block finds the first index out of range without atomics. There are only as many indices as tokens, and the
// work that uses them takes a thousand times as long.
#include "fault.cuh"
#include "target.cuh"

// Replaces an index out of range. Every limit is at most this value.
constexpr uint32_t NO_INDEX = 0xffffffffu;

struct IndicesArgs {
    uint64_t from;
    // u32 of [count], and for targets_i64 one more: the number of targets that are not ignored.
    uint64_t to;
    // A Fault, filled in with `what`, the index, its position and the limit.
    uint64_t fault, what;
    uint64_t count, limit;
    // This rank has `own` indices from `begin` on, which become 0, 1, …; others below the limit become ELSEWHERE.
    uint64_t begin, own;
};

// Combines one number of each thread of a block with `f`: each step halves their count, until the first thread has the
// result.
template <class F> DEVICE uint64_t of_block(uint64_t* room, uint64_t own, F f) {
    room[threadIdx.x] = own;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) room[threadIdx.x] = f(room[threadIdx.x], room[threadIdx.x + half]);
    }
    __syncthreads();
    return room[0];
}

// TARGETS: −100 is allowed and becomes NO_TARGET; the number of other indices follows the last index.
template <class T, bool TARGETS> DEVICE void indices(const IndicesArgs& a) {
    DYNAMIC_SHARED(uint64_t, room);
    uint64_t first = a.count, targets = 0;
    for (uint64_t i = threadIdx.x; i < a.count; i += blockDim.x) {
        T index = as<T>(a.from)[i];
        // A negative index converts to a value above every limit.
        bool is_below = uint64_t(int64_t(index)) < a.limit;
        bool is_ignored = TARGETS && int64_t(index) == -100;
        uint64_t place = uint64_t(int64_t(index)) - a.begin;
        uint32_t inside = place < a.own ? uint32_t(place) : ELSEWHERE;
        as_mut<uint32_t>(a.to)[i] = is_below ? inside : is_ignored ? NO_TARGET : NO_INDEX;
        if (!is_below && !is_ignored && first == a.count) first = i;
        targets += !is_ignored;
    }
    first = of_block(room, first, [](uint64_t x, uint64_t y) { return x < y ? x : y; });
    if (threadIdx.x == 0 && first < a.count) {
        report(a.fault, a.what, uint64_t(int64_t(as<T>(a.from)[first])), first, a.limit);
    }
    if (TARGETS) {
        // Wait until all threads have read the previous result.
        __syncthreads();
        targets = of_block(room, targets, [](uint64_t x, uint64_t y) { return x + y; });
        if (threadIdx.x == 0) as_mut<uint32_t>(a.to)[a.count] = uint32_t(targets);
    }
}

ENTRY(indices_u8, IndicesArgs, 1024) { indices<uint8_t, false>(a); }
ENTRY(indices_u32, IndicesArgs, 1024) { indices<uint32_t, false>(a); }
ENTRY(indices_i64, IndicesArgs, 1024) { indices<int64_t, false>(a); }
ENTRY(targets_i64, IndicesArgs, 1024) { indices<int64_t, true>(a); }
