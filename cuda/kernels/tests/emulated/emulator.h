// Stands for a CUDA device, on one thread of the host: the threads of a block are fibers, which give way to each other at barriers
// and shuffles only.
//
// The order in which fibers run is the caller's: a kernel whose result depends on it has a race. Shared memory is full of NaNs when
// a block begins and has sentinels behind it. A block whose threads wait for what cannot come ends the launch with a message.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

#define DEVICE inline

struct Dim3 { unsigned x, y, z; };
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr size_t STACK = 64 << 10;
constexpr size_t SENTINELS = 64;
constexpr unsigned WARP_THREADS = 32;
enum class State { READY, AT_BLOCK, AT_WARP, DONE };

struct Fiber {
    // Begins with a context; after that _setjmp and _longjmp switch, without the system call that swapcontext makes.
    ucontext_t context;
    jmp_buf resume;
    bool begun;
    std::unique_ptr<char[]> stack;
    State state;
    // What the thread hands to others of its warp.
    uint64_t handed;
};

static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static unsigned current;
static unsigned char* shared;
static const std::function<void()>* body;

static void wait(State state) {
    unsigned self = current;
    fibers[self].state = state;
    if (_setjmp(fibers[self].resume) == 0) _longjmp(scheduler, 1);
}

static void resume(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.resume, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

static void fiber_main() {
    (*body)();
    fibers[current].state = State::DONE;
    _longjmp(scheduler, 1);
}

// Lets those go on who wait for nobody any more; whether there are any.
static bool release(unsigned threads) {
    bool released = false, all = true, any = false;
    for (unsigned i = 0; i < threads; i++) {
        all = all && (fibers[i].state == State::AT_BLOCK || fibers[i].state == State::DONE);
        any = any || fibers[i].state == State::AT_BLOCK;
    }
    if (all && any) {
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].state == State::AT_BLOCK) fibers[i].state = State::READY;
        }
        return true;
    }
    for (unsigned warp = 0; warp < threads; warp += WARP_THREADS) {
        unsigned there = 0;
        for (unsigned i = warp; i < warp + WARP_THREADS; i++) there += fibers[i].state == State::AT_WARP;
        if (there < WARP_THREADS) continue;
        for (unsigned i = warp; i < warp + WARP_THREADS; i++) fibers[i].state = State::READY;
        released = true;
    }
    return released;
}

static unsigned shuffled(unsigned place, unsigned threads, unsigned order) {
    switch (order) {
        case 0: return place;
        case 1: return threads - 1 - place;
        // Odd and less than 2³²: a bijection of powers of two.
        default: return (place * 2654435761u + order * 40503u) % threads;
    }
}

static const char* block(unsigned threads, unsigned order) {
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
        fiber.state = State::READY;
        fiber.begun = false;
    }
    while (true) {
        bool ran = false, done = true;
        for (unsigned place = 0; place < threads; place++) {
            unsigned i = shuffled(place, threads, order);
            if (fibers[i].state != State::READY) continue;
            current = i;
            threadIdx = Dim3{i, 0, 0};
            resume(fibers[i]);
            ran = true;
        }
        for (unsigned i = 0; i < threads; i++) done = done && fibers[i].state == State::DONE;
        if (done) return nullptr;
        if (!release(threads) && !ran) return "threads of a block wait for what cannot come";
    }
}

static const char* launch(
    const unsigned* grid, unsigned threads, size_t shared_bytes, unsigned order, const std::function<void()>& of) {
    if (threads == 0 || threads > 1024 || (threads & (threads - 1)) || threads < WARP_THREADS) {
        return "a block of this size is not emulated";
    }
    if (shared_bytes > 227 * 1024) return "more shared memory than a block can have";
    while (fibers.size() < threads) fibers.push_back(Fiber{{}, {}, false, std::unique_ptr<char[]>(new char[STACK]), State::DONE, 0});
    std::unique_ptr<unsigned char[]> memory(new unsigned char[shared_bytes + SENTINELS + 16]);
    shared = memory.get() + (16 - reinterpret_cast<uintptr_t>(memory.get()) % 16) % 16;
    body = &of;
    blockDim = Dim3{threads, 1, 1};
    gridDim = Dim3{grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = Dim3{x, y, z};
                memset(shared, 0xff, shared_bytes + SENTINELS);
                if (const char* failure = block(threads, order)) return failure;
                for (size_t i = 0; i < SENTINELS; i++) {
                    if (shared[shared_bytes + i] != 0xff) return "a write beyond the shared memory";
                }
            }
        }
    }
    return nullptr;
}

template <class T> T hand(T value, unsigned from) {
    static_assert(sizeof(T) <= 8, "a shuffle of at most eight bytes");
    fibers[current].handed = 0;
    memcpy(&fibers[current].handed, &value, sizeof(T));
    unsigned source = current / WARP_THREADS * WARP_THREADS + from;
    wait(State::AT_WARP);
    T got;
    memcpy(&got, &fibers[source].handed, sizeof(T));
    wait(State::AT_WARP);
    return got;
}

}  // namespace emulator

static inline void __syncthreads() { emulator::wait(emulator::State::AT_BLOCK); }
static inline void __syncwarp() { emulator::wait(emulator::State::AT_WARP); }

template <class T> T __shfl_sync(unsigned, T value, unsigned from) { return emulator::hand(value, from % 32); }

template <class T> T __shfl_xor_sync(unsigned, T value, unsigned distance) {
    return emulator::hand(value, (threadIdx.x % 32) ^ distance);
}

template <class T> T __shfl_down_sync(unsigned, T value, unsigned distance, unsigned width = 32) {
    unsigned lane = threadIdx.x % 32, from = lane + distance;
    return emulator::hand(value, from / width == lane / width ? from : lane);
}

static inline float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

#define DYNAMIC_SHARED(TYPE, NAME) TYPE* NAME = reinterpret_cast<TYPE*>(emulator::shared)

// Bytes of an entry's arguments, and what a launch calls: the arguments, blocks in each dimension, threads of a block, shared bytes, the order of threads. Gives what
// went wrong, or null.
#define ENTRY(NAME, ARGS, THREADS) \
    static void NAME##_thread(const ARGS& a); \
    extern "C" const size_t NAME##_bytes = sizeof(ARGS); \
    extern "C" const char* NAME( \
        const void* args, size_t bytes, const unsigned* grid, unsigned threads, size_t shared_bytes, unsigned order) { \
        if (bytes != sizeof(ARGS)) return "arguments of another size"; \
        if (threads > THREADS) return "more threads than the kernel is compiled for"; \
        return emulator::launch( \
            grid, threads, shared_bytes, order, [args] { NAME##_thread(*static_cast<const ARGS*>(args)); }); \
    } \
    static void NAME##_thread(const ARGS& a)
