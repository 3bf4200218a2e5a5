// Stands for a CUDA device, on one thread of the host: the threads of a block are fibers, which give way to each other at barriers
// and shuffles only.
//
// The order in which fibers run is the caller's: a kernel whose result depends on it has a race. Shared memory is full of NaNs when
// a block begins, and the dynamic one has sentinels behind it. A block whose threads wait for what cannot come ends the launch with a message.
// A library runs one launch at a time.
#pragma once

#include <link.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <memory>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "half.h"

#define DEVICE inline
// Storage that belongs to the thread is all that a kernel declares in this way, so it is found as one segment of the library.
#define __shared__ thread_local

struct Dim3 { unsigned x, y, z; };
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr size_t STACK = 64 << 10;
constexpr size_t SENTINELS = 64;
constexpr unsigned WARP_THREADS = 32;
constexpr unsigned MOST_THREADS = 1024;
// Bytes.
constexpr size_t HANDED = 24;
enum class State { READY, AT_BLOCK, AT_WARP, DONE };

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
    // Where it waits; none before it begins.
    Fiber* fiber;
    // What it hands to others of its warp, in turns: who is late reads what was handed before.
    alignas(8) unsigned char handed[2][HANDED];
};

struct Kernel { void (*run)(const void* args); const void* args; };

// Of 16 bytes, which a thread has begun and not waited for; zeros come from nowhere.
struct Copy { void* to; const void* from; };

static std::mutex turn;
static Kernel kernel;
static Thread threads[MOST_THREADS];
static std::vector<Copy> begun[MOST_THREADS];
static unsigned warp_turn[MOST_THREADS / WARP_THREADS];
static unsigned count, order, place, current, done;
static bool waited;
static const char* failure;
static Fiber* running;
static std::vector<Fiber*>* idle;
static jmp_buf scheduler;
static unsigned char* shared;

static unsigned in_order(unsigned place) {
    switch (order) {
        case 0: return place;
        case 1: return count - 1 - place;
        // A prime that no size of a block is a multiple of: a bijection.
        default: return (place * 2654435761ull + order * 40503u) % count;
    }
}

static void become(unsigned thread) {
    current = thread;
    threadIdx = Dim3{thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
}

// Ends the launch.
[[noreturn]] static void fail(const char* why) {
    failure = why;
    _longjmp(scheduler, 1);
}

static void fiber_main() {
    Fiber* self = running;
    while (true) {
        while (true) {
            kernel.run(kernel.args);
            if (!begun[current].empty()) fail("a thread ends before its copies");
            threads[current].state = State::DONE;
            done++;
            // The next one goes on here if it has not begun: most kernels have no barrier, and need one fiber.
            if (place == count) break;
            unsigned next = in_order(place);
            if (threads[next].state != State::READY || threads[next].fiber) break;
            place++;
            become(next);
        }
        idle->push_back(self);
        if (_setjmp(self->resume) == 0) _longjmp(scheduler, 1);
    }
}

static void wait(State state) {
    threads[current].state = state;
    threads[current].fiber = running;
    waited = true;
    if (_setjmp(running->resume) == 0) _longjmp(scheduler, 1);
}

static void resume(Fiber* fiber) {
    running = fiber;
    if (_setjmp(scheduler) != 0) return;
    if (fiber->begun) _longjmp(fiber->resume, 1);
    fiber->begun = true;
    setcontext(&fiber->context);
}

// Lets those go on who wait for nobody any more; whether there are any.
static bool release() {
    bool released = false, all = true, any = false;
    for (unsigned i = 0; i < count; i++) {
        all = all && (threads[i].state == State::AT_BLOCK || threads[i].state == State::DONE);
        any = any || threads[i].state == State::AT_BLOCK;
    }
    if (all && any) {
        for (unsigned i = 0; i < count; i++) {
            if (threads[i].state == State::AT_BLOCK) threads[i].state = State::READY;
        }
        return true;
    }
    for (unsigned warp = 0; warp < count; warp += WARP_THREADS) {
        unsigned end = warp + WARP_THREADS < count ? warp + WARP_THREADS : count, there = 0;
        for (unsigned i = warp; i < end; i++) there += threads[i].state == State::AT_WARP;
        if (there < end - warp) continue;
        for (unsigned i = warp; i < end; i++) threads[i].state = State::READY;
        warp_turn[warp / WARP_THREADS] ^= 1;
        released = true;
    }
    return released;
}

static const char* block(std::vector<std::unique_ptr<Fiber>>& fibers) {
    for (unsigned i = 0; i < count; i++) {
        threads[i] = Thread{State::READY, nullptr, {}};
        begun[i].clear();
    }
    done = 0;
    while (true) {
        bool ran = false;
        for (place = 0; place < count;) {
            unsigned i = in_order(place++);
            if (threads[i].state != State::READY) continue;
            become(i);
            ran = true;
            Fiber* fiber = threads[i].fiber;
            if (!fiber && !idle->empty()) {
                fiber = idle->back();
                idle->pop_back();
            } else if (!fiber) {
                fibers.emplace_back(new Fiber);
                fiber = fibers.back().get();
                getcontext(&fiber->context);
                fiber->context.uc_stack.ss_sp = fiber->stack.get();
                fiber->context.uc_stack.ss_size = STACK;
                fiber->context.uc_link = nullptr;
                makecontext(&fiber->context, fiber_main, 0);
            }
            resume(fiber);
            if (failure) return failure;
        }
        if (done == count) return nullptr;
        if (!release() && !ran) return "threads of a block wait for what cannot come";
    }
}

// What the kernels of this library have declared as shared.
struct Segment { void* start; size_t bytes; };
static thread_local volatile char anchor;

static int find_segment(dl_phdr_info* library, size_t, void* to) {
    const ElfW(Phdr)* segments = library->dlpi_phdr;
    bool ours = false;
    size_t bytes = 0;
    for (unsigned i = 0; i < library->dlpi_phnum; i++) {
        uintptr_t start = library->dlpi_addr + segments[i].p_vaddr, inside = reinterpret_cast<uintptr_t>(&find_segment);
        if (segments[i].p_type == PT_LOAD) ours = ours || (inside >= start && inside - start < segments[i].p_memsz);
        if (segments[i].p_type == PT_TLS) bytes = segments[i].p_memsz;
    }
    if (ours) *static_cast<Segment*>(to) = Segment{library->dlpi_tls_data, bytes};
    return ours;
}

static const char* launch(
    const unsigned* grid, const unsigned* block_size, size_t shared_bytes, unsigned in_this_order, const Kernel& of) {
    std::lock_guard<std::mutex> lock(turn);
    size_t size = size_t(block_size[0]) * block_size[1] * block_size[2];
    if (size == 0 || size > MOST_THREADS) return "a block of this size cannot be";
    if (shared_bytes > 227 * 1024) return "more shared memory than a block can have";
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber*> are_idle;
    idle = &are_idle;
    std::unique_ptr<unsigned char[]> memory(new unsigned char[shared_bytes + SENTINELS + 16]);
    shared = memory.get() + (16 - reinterpret_cast<uintptr_t>(memory.get()) % 16) % 16;
    anchor = 0; // makes this thread have the segment
    Segment declared{};
    dl_iterate_phdr(find_segment, &declared);
    kernel = of;
    count = unsigned(size);
    order = in_this_order;
    failure = nullptr;
    waited = true;
    blockDim = Dim3{block_size[0], block_size[1], block_size[2]};
    gridDim = Dim3{grid[0], grid[1], grid[2]};
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = Dim3{x, y, z};
                // Without a barrier threads have shared nothing.
                if (waited) {
                    memset(shared, 0xff, shared_bytes + SENTINELS);
                    memset(declared.start, 0xff, declared.bytes);
                    waited = false;
                }
                if (const char* failure = block(fibers)) return failure;
                for (size_t i = 0; i < SENTINELS; i++) {
                    if (shared[shared_bytes + i] != 0xff) return "a write beyond the shared memory";
                }
            }
        }
    }
    return nullptr;
}

// What a launch needs to know of a kernel: the bytes of its arguments, how they are collected from the pointers that cuLaunchKernel gets,
// and what runs it: arguments, blocks and threads in each dimension, shared bytes, the order of threads. Gives what went wrong, or null.
struct Entry {
    size_t bytes;
    void (*collect)(void* const* parameters, void* to);
    const char* (*run)(
        const void* args, size_t bytes, const unsigned* grid, const unsigned* block, size_t shared_bytes, unsigned order);
};

template <auto KERNEL, unsigned THREADS> struct Of;
template <class... A, void (*KERNEL)(A...), unsigned THREADS> struct Of<KERNEL, THREADS> {
    using Args = std::tuple<A...>;

    template <size_t... I> static void collect_each(void* const* parameters, void* to, std::index_sequence<I...>) {
        new (to) Args(*static_cast<const A*>(parameters[I])...);
    }
    static void collect(void* const* parameters, void* to) {
        collect_each(parameters, to, std::index_sequence_for<A...>());
    }
    static void thread(const void* args) { std::apply(KERNEL, *static_cast<const Args*>(args)); }
    static const char* run(
        const void* args, size_t bytes, const unsigned* grid, const unsigned* block, size_t shared_bytes, unsigned order) {
        if (bytes != sizeof(Args)) return "arguments of another size";
        if (size_t(block[0]) * block[1] * block[2] > THREADS) return "more threads than the kernel is compiled for";
        return launch(grid, block, shared_bytes, order, Kernel{thread, args});
    }
    static constexpr Entry ENTRY{sizeof(Args), collect, run};
};

// Hands something to this warp, and has what each lane has handed.
template <class T> struct FromWarp {
    unsigned first = current / WARP_THREADS * WARP_THREADS, now = warp_turn[current / WARP_THREADS];

    explicit FromWarp(const T& value) {
        static_assert(sizeof(T) <= HANDED, "a thread hands no more than that");
        memcpy(threads[current].handed[now], &value, sizeof(T));
        wait(State::AT_WARP);
    }
    // Of a lane that is not there come NaNs.
    T operator[](unsigned lane) const {
        T got;
        memset(&got, 0xff, sizeof(T));
        if (first + lane < count) memcpy(&got, threads[first + lane].handed[now], sizeof(T));
        return got;
    }
};

template <class T> T hand(T value, unsigned lane) { return FromWarp<T>(value)[lane]; }

static inline unsigned lane() { return current % WARP_THREADS; }

}  // namespace emulator

static inline void __syncthreads() { emulator::wait(emulator::State::AT_BLOCK); }
static inline void __syncwarp() { emulator::wait(emulator::State::AT_WARP); }

template <class T> T __shfl_sync(unsigned, T value, unsigned from) { return emulator::hand(value, from % 32); }

template <class T> T __shfl_xor_sync(unsigned, T value, unsigned distance, unsigned width = 32) {
    unsigned lane = emulator::lane(), from = lane ^ distance;
    return emulator::hand(value, from / width <= lane / width ? from : lane);
}

template <class T> T __shfl_down_sync(unsigned, T value, unsigned distance, unsigned width = 32) {
    unsigned lane = emulator::lane(), from = lane + distance;
    return emulator::hand(value, from / width == lane / width ? from : lane);
}

#define DYNAMIC_SHARED(TYPE, NAME) TYPE* NAME = reinterpret_cast<TYPE*>(emulator::shared)

// Makes a kernel known under its name: `NAME_entry`.
#define EMULATED(NAME, THREADS) \
    extern "C" __attribute__((visibility("default"))) const emulator::Entry NAME##_entry = emulator::Of<NAME, THREADS>::ENTRY;

#define ENTRY(NAME, ARGS, THREADS) \
    extern "C" void NAME(const ARGS a); \
    EMULATED(NAME, THREADS) \
    extern "C" void NAME(const ARGS a)
