// Data exchange between the lanes of a warp.
//
// As on a device, a mask must include its caller, and a lane waits for all lanes in its mask that have not ended, with
// the same mask and for the same operation. A value from a lane that did not take part is NaN. Of these operations,
// only __syncwarp orders memory.
#pragma once

#include "block.h"

namespace emulator {

constexpr uint32_t ALL_LANES = 0xffffffff;

static inline unsigned lane() { return current % WARP_THREADS; }

static void meet(Meeting meeting, uint32_t mask) {
    NotOfKernel accesses;
    if (!(mask >> lane() & 1)) fail("a lane calls with a mask that does not name it");
    block->threads[current].meeting = meeting;
    block->threads[current].mask = mask;
    wait(State::AT_WARP);
}

// Passes a value to the warp, and gives access to the value of each lane.
template <class T> struct FromWarp {
    const Thread* lanes;
    uint32_t came, turns;

    FromWarp(Meeting meeting, uint32_t mask, const T& value) {
        static_assert(sizeof(T) <= HANDED, "a thread hands no more than that");
        NotOfKernel accesses;
        Thread& own = block->threads[current];
        memcpy(own.handed[own.turn], &value, sizeof(T));
        meet(meeting, mask);
        lanes = block->threads + current / WARP_THREADS * WARP_THREADS;
        came = own.came;
        turns = own.turns;
    }
    T operator[](unsigned lane) const {
        NotOfKernel accesses;
        T got;
        memset(&got, 0xff, sizeof(T));
        if (came >> lane & 1) memcpy(&got, lanes[lane].handed[turns >> lane & 1], sizeof(T));
        return got;
    }
};

// Collects the votes of the lanes that took part.
static uint32_t ballot(uint32_t mask, bool condition) {
    FromWarp<bool> said(Meeting::VOTE, mask, condition);
    uint32_t votes = 0;
    for (unsigned lane = 0; lane < WARP_THREADS; lane++) {
        if (said.came >> lane & 1) votes |= uint32_t(said[lane]) << lane;
    }
    return votes;
}

}  // namespace emulator

static inline void __syncthreads() { emulator::wait(emulator::State::AT_BLOCK); }
static inline void __syncwarp(uint32_t mask = emulator::ALL_LANES) { emulator::meet(emulator::Meeting::SYNC, mask); }

// Shuffles within groups of `width` lanes, a power of two.
template <class T> T __shfl_sync(uint32_t mask, T value, unsigned from, unsigned width = 32) {
    unsigned own = emulator::lane();
    return emulator::FromWarp<T>(emulator::Meeting::SHUFFLE, mask, value)[own / width * width + from % width];
}
template <class T> T __shfl_xor_sync(uint32_t mask, T value, unsigned distance, unsigned width = 32) {
    unsigned own = emulator::lane(), from = own ^ distance;
    return emulator::FromWarp<T>(emulator::Meeting::SHUFFLE_XOR, mask, value)[from / width <= own / width ? from : own];
}
template <class T> T __shfl_down_sync(uint32_t mask, T value, unsigned distance, unsigned width = 32) {
    unsigned own = emulator::lane(), from = own + distance;
    return emulator::FromWarp<T>(emulator::Meeting::SHUFFLE_DOWN, mask, value)[from / width == own / width ? from : own];
}
template <class T> T __shfl_up_sync(uint32_t mask, T value, unsigned distance, unsigned width = 32) {
    unsigned own = emulator::lane(), from = own - distance;
    return emulator::FromWarp<T>(emulator::Meeting::SHUFFLE_UP, mask, value)[own % width >= distance ? from : own];
}
static inline uint32_t __ballot_sync(uint32_t mask, int condition) { return emulator::ballot(mask, condition != 0); }
static inline int __any_sync(uint32_t mask, int condition) { return emulator::ballot(mask, condition != 0) != 0; }
static inline int __all_sync(uint32_t mask, int condition) { return emulator::ballot(mask, condition == 0) == 0; }
