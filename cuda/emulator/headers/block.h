// Runs blocks on one host thread: the threads of a block are fibers, which yield to each other only at barriers and at
// warp operations.
//
// Several blocks may be resident: each runs until all of its threads wait; then the next block runs.
#pragma once

#include <link.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#define DEVICE inline
// Only a kernel's shared declarations use thread-local storage, so they form one segment of the library.
#define __shared__ thread_local

struct Dim3 { unsigned x, y, z; };
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

// Checked threads need a larger stack.
#ifdef EMULATED_CHECKS
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif
constexpr size_t SENTINELS = 64;
constexpr unsigned WARP_THREADS = 32;
constexpr unsigned MOST_THREADS = 1024;
// Number of resident blocks when blocks take turns.
constexpr unsigned RESIDENT = 3;
// The most bytes that a thread passes to other lanes of its warp.
constexpr size_t HANDED = 24;
enum class State : uint8_t { READY, AT_BLOCK, AT_WARP, DONE };
// The warp operations. Only __syncwarp orders memory; matrix operations need all 32 lanes.
enum class Meeting : uint8_t { SYNC, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, VOTE, LOAD_MATRICES, MULTIPLY };

// Runs one thread after another until one waits; the waiting thread then keeps the fiber.
struct Fiber {
    // Starts with a context; later switches use _setjmp and _longjmp, which avoid swapcontext's system call.
    ucontext_t context;
    jmp_buf resume;
    bool begun = false;
    std::unique_ptr<char[]> stack{new char[STACK]};
};

struct Thread {
    State state;
    Meeting meeting;
    // Which of its two buffers the thread writes next; a late lane may still be reading the other one.
    bool turn;
    // The fiber on which it waits; null before it begins.
    Fiber* fiber;
    // The lanes in the caller's mask, the lanes that have arrived, and each arrived lane's turn.
    uint32_t mask, came, turns;
    alignas(8) unsigned char handed[2][HANDED];
};

// A launch: sizes, bytes of dynamic shared memory, and the order. Orders 0 and 1 run one block after the other, with
// blocks and threads first to last or last to first. Orders 2 and 3 are mixed: several blocks are resident, and the
// next one runs when all threads of a block wait.
struct Launch {
    const unsigned *grid, *block;
    size_t shared_bytes;
    unsigned order;
};

// The storage of everything that the library's kernels declare as shared.
struct Segment { void* start; size_t bytes; };

struct Kernel { void (*run)(const void* args); const void* args; size_t bytes; };

// An asynchronous 16-byte copy that a thread has begun and not waited for; `from` is null to copy zeros.
struct Copy { void* to; const void* from; };

// A resident block.
struct Block {
    Dim3 index;
    unsigned done;
    // Dynamic shared memory followed by sentinels, and a copy of the declared shared memory while another block uses
    // its storage.
    std::unique_ptr<unsigned char[]> memory;
    unsigned char* shared;
    bool is_clean;
    std::vector<unsigned char> declared;
    Thread threads[MOST_THREADS];
    std::vector<Copy> begun[MOST_THREADS];
};

static Kernel kernel;
static Block* slots[RESIDENT];
static Block* block;
static unsigned count, order, place, current;
static bool waited;
static const char* failure;
static Fiber* running;
static std::vector<std::unique_ptr<Fiber>> fibers;
static std::vector<Fiber*> idle;
static jmp_buf scheduler;
static unsigned char* shared;

// Maps a position in the schedule to one of `of` indices.
static uint64_t in_order(uint64_t place, uint64_t of) {
    switch (order) {
        case 0: return place;
        case 1: return of - 1 - place;
        // A multiplier that is prime and divides no size makes this a bijection.
        default: return (place * 2654435761ull + order * 40503u) % of;
    }
}

static void become(unsigned thread) {
    current = thread;
    threadIdx = Dim3{thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
}

// Whether the current memory accesses are the kernel's and not the emulator's.
static bool watched;

// Ends the launch with a message.
[[noreturn]] static void fail(const char* why) {
    watched = false;
    failure = why;
    _longjmp(scheduler, 1);
}

}  // namespace emulator

#include "check.h"

namespace emulator {

static void fiber_main() {
    Fiber* self = running;
    while (true) {
        while (true) {
            {
                OfKernel accesses;
                kernel.run(kernel.args);
            }
            if (!block->begun[current].empty()) fail("a thread ends before its asynchronous copies have arrived");
            block->threads[current].state = State::DONE;
            block->done++;
            // The next thread runs on this fiber if it has not begun: most kernels have no barrier and need only one
            // fiber.
            if (place == count) break;
            unsigned next = unsigned(in_order(place, count));
            if (block->threads[next].state != State::READY || block->threads[next].fiber) break;
            place++;
            become(next);
        }
        idle.push_back(self);
        if (_setjmp(self->resume) == 0) _longjmp(scheduler, 1);
    }
}

static void wait(State state) {
    NotOfKernel accesses;
    block->threads[current].state = state;
    block->threads[current].fiber = running;
    waited = true;
    if (_setjmp(running->resume) == 0) _longjmp(scheduler, 1);
}

static void resume(Fiber* fiber) {
    running = fiber;
    on_stack(fiber->stack.get());
    if (_setjmp(scheduler) != 0) return;
    if (fiber->begun) _longjmp(fiber->resume, 1);
    fiber->begun = true;
    setcontext(&fiber->context);
}

static Fiber* fiber_for(Thread& thread) {
    if (thread.fiber) return thread.fiber;
    if (!idle.empty()) {
        Fiber* fiber = idle.back();
        idle.pop_back();
        return fiber;
    }
    fibers.emplace_back(new Fiber);
    Fiber* fiber = fibers.back().get();
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get();
    fiber->context.uc_stack.ss_size = STACK;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, fiber_main, 0);
    return fiber;
}

// Resumes the lanes of a warp whose masks are complete. A mask may name lanes that have ended or that do not exist in a
// block of this size: nobody waits for those.
static bool release_warp(unsigned first) {
    Thread* lanes = block->threads + first;
    unsigned size = count - first < WARP_THREADS ? count - first : WARP_THREADS;
    uint32_t waiting = 0, ended = size < WARP_THREADS ? ~0u << size : 0;
    for (unsigned i = 0; i < size; i++) {
        waiting |= uint32_t(lanes[i].state == State::AT_WARP) << i;
        ended |= uint32_t(lanes[i].state == State::DONE) << i;
    }
    bool released = false;
    while (waiting) {
        const Thread one = lanes[__builtin_ctz(waiting)];
        uint32_t named = one.mask & ~ended, came = 0, turns = 0;
        if (one.meeting >= Meeting::LOAD_MATRICES && ended) fail("an operation on matrices needs all 32 lanes of a warp");
        for (unsigned i = 0; i < size; i++) {
            if (!(named >> i & 1) || lanes[i].state != State::AT_WARP || lanes[i].mask != one.mask) continue;
            if (lanes[i].meeting != one.meeting) fail("lanes of a warp wait at different operations");
            came |= 1u << i;
            turns |= uint32_t(lanes[i].turn) << i;
        }
        waiting &= ~came;
        if (came != named) continue;
        released = true;
        if (one.meeting == Meeting::SYNC) order_warp(first, came);
        for (unsigned i = 0; i < size; i++) {
            if (!(came >> i & 1)) continue;
            lanes[i].state = State::READY;
            lanes[i].came = came;
            lanes[i].turns = turns;
            lanes[i].turn ^= 1;
        }
    }
    return released;
}

// Resumes the threads of the block that no longer wait; returns whether there are any.
static bool release() {
    unsigned at_block = 0;
    for (unsigned i = 0; i < count; i++) at_block += block->threads[i].state == State::AT_BLOCK;
    if (at_block + block->done == count) {
        for (unsigned i = 0; i < count; i++) {
            if (block->threads[i].state == State::AT_BLOCK) block->threads[i].state = State::READY;
        }
        order_block();
        return true;
    }
    bool released = false;
    for (unsigned first = 0; first < count; first += WARP_THREADS) released = release_warp(first) || released;
    return released;
}

// Runs every thread of the block that can run, until it waits or ends.
static void pass() {
    for (place = 0; place < count;) {
        unsigned i = unsigned(in_order(place++, count));
        if (block->threads[i].state != State::READY) continue;
        become(i);
        resume(fiber_for(block->threads[i]));
        if (failure) return;
    }
    if (block->done == count) return;
    if (_setjmp(scheduler) == 0 && !release()) failure = "a mask names a lane that never arrives";
}

}  // namespace emulator
