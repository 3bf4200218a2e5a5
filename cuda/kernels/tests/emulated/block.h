// Blocks on one thread of the host: the threads of a block are fibers, which give way to each other at barriers and where a warp meets only.
//
// Several blocks may be resident: each goes on until all of its threads wait, then the next one has its turn.
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
// Storage that belongs to the thread is all that a kernel declares in this way, so it is found as one segment of the library.
#define __shared__ thread_local

struct Dim3 { unsigned x, y, z; };
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

// Watched threads keep more there.
#ifdef EMULATED_CHECKS
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif
constexpr size_t SENTINELS = 64;
constexpr unsigned WARP_THREADS = 32;
constexpr unsigned MOST_THREADS = 1024;
// Blocks that are there at a time where they take turns.
constexpr unsigned RESIDENT = 3;
// Bytes that a thread hands to others of its warp.
constexpr size_t HANDED = 24;
enum class State : uint8_t { READY, AT_BLOCK, AT_WARP, DONE };
// What the lanes of a warp meet for. Only __syncwarp orders memory; matrices need all 32 lanes.
enum class Meeting : uint8_t { SYNC, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, VOTE, LOAD_MATRICES, MULTIPLY };

// Runs one thread after the other, until one waits; that one keeps it.
struct Fiber {
    // Begins with a context; after that _setjmp and _longjmp switch, without the system call that swapcontext makes.
    ucontext_t context;
    jmp_buf resume;
    bool begun = false;
    std::unique_ptr<char[]> stack{new char[STACK]};
};

struct Thread {
    State state;
    Meeting meeting;
    // Which of the two it hands next: who is late reads what was handed before.
    bool turn;
    // Where it waits; none before it begins.
    Fiber* fiber;
    // Lanes that the meeting is for, as the caller says, those that came, and the turn of each.
    uint32_t mask, came, turns;
    alignas(8) unsigned char handed[2][HANDED];
};

// What a caller says of a launch: sizes, bytes of dynamic shared memory, and the order: 0 first to last, 1 last to first, one block after the
// other; 2 and 3 mixed, several blocks at a time, which take turns where all threads of one wait.
struct Launch {
    const unsigned *grid, *block;
    size_t shared_bytes;
    unsigned order;
};

// What the kernels of this library have declared as shared.
struct Segment { void* start; size_t bytes; };

struct Kernel { void (*run)(const void* args); const void* args; size_t bytes; };

// Of 16 bytes, which a thread has begun and not waited for; zeros come from nowhere.
struct Copy { void* to; const void* from; };

// A block that is resident.
struct Block {
    Dim3 index;
    unsigned done;
    // Dynamic shared memory with sentinels behind it, and what the kernel has declared, as long as another block has its place.
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

// The order of `of` things.
static uint64_t in_order(uint64_t place, uint64_t of) {
    switch (order) {
        case 0: return place;
        case 1: return of - 1 - place;
        // A prime that no size is a multiple of: a bijection.
        default: return (place * 2654435761ull + order * 40503u) % of;
    }
}

static void become(unsigned thread) {
    current = thread;
    threadIdx = Dim3{thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
}

// Whether what is read and written is the kernel's, and not the emulator's.
static bool watched;

// Ends the launch.
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
            if (!block->begun[current].empty()) fail("a thread ends before its copies");
            block->threads[current].state = State::DONE;
            block->done++;
            // The next one goes on here if it has not begun: most kernels have no barrier, and need one fiber.
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

// Lets those lanes of a warp go on whom all have come to whom their mask names. Lanes that have ended, or that a block of this size does not
// have, may be named: nobody waits for them.
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
        if (one.meeting >= Meeting::LOAD_MATRICES && ended) fail("matrices need all 32 lanes of a warp");
        for (unsigned i = 0; i < size; i++) {
            if (!(named >> i & 1) || lanes[i].state != State::AT_WARP || lanes[i].mask != one.mask) continue;
            if (lanes[i].meeting != one.meeting) fail("lanes of a warp meet for different operations");
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

// Lets those threads of the block go on that wait for nobody any more; whether there are any.
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

// Runs all threads of the block that can, until they wait or end.
static void pass() {
    for (place = 0; place < count;) {
        unsigned i = unsigned(in_order(place++, count));
        if (block->threads[i].state != State::READY) continue;
        become(i);
        resume(fiber_for(block->threads[i]));
        if (failure) return;
    }
    if (block->done == count) return;
    if (_setjmp(scheduler) == 0 && !release()) failure = "a warp's mask names a lane that does not come";
}

}  // namespace emulator
