// Emulates a CUDA device: block.h runs the threads of blocks, warp.h the operations of warps, check.h checks memory
// accesses. This file runs a launch over its blocks.
//
// The caller chooses the order of blocks and threads: a kernel whose result depends on it has a race. Shared memory is
// filled with NaNs when a block begins, and sentinels follow the dynamic shared memory. A block whose threads wait for
// something that cannot come ends the launch with a message. A library runs one launch at a time.
#pragma once

#include <mutex>
#include <new>
#include <tuple>
#include <utility>

#include "half.h"
#include "warp.h"

namespace emulator {

static std::mutex turn;

// The library's thread-local storage, as the dynamic linker knows it; module 0 if the kernels declare nothing as shared.
struct ThreadLocal { size_t module, bytes; };

static int find_thread_local(dl_phdr_info* library, size_t, void* to) {
    const ElfW(Phdr)* segments = library->dlpi_phdr;
    bool ours = false;
    ThreadLocal found{0, 0};
    for (unsigned i = 0; i < library->dlpi_phnum; i++) {
        uintptr_t start = library->dlpi_addr + segments[i].p_vaddr;
        uintptr_t inside = reinterpret_cast<uintptr_t>(&find_thread_local);
        if (segments[i].p_type == PT_LOAD) ours = ours || (inside >= start && inside - start < segments[i].p_memsz);
        if (segments[i].p_type == PT_TLS) found = ThreadLocal{library->dlpi_tls_modid, segments[i].p_memsz};
    }
    if (ours) *static_cast<ThreadLocal*>(to) = found;
    return ours;
}

struct TlsIndex { size_t module, offset; };
extern "C" void* __tls_get_addr(TlsIndex*);

// The calling thread's copy of what the kernels declare as shared. `dlpi_tls_data` would be simpler, but in glibc 2.36 it
// can be null although the thread has a copy, while another thread loads a library.
static Segment find_declared() {
    ThreadLocal found{0, 0};
    dl_iterate_phdr(find_thread_local, &found);
    TlsIndex first{found.module, 0};
    return Segment{found.module ? __tls_get_addr(&first) : nullptr, found.bytes};
}

// The running launch.
static Segment declared;
// The block whose declared shared memory is in place.
static Block* placed;

// Switches to a block.
static void enter(Block* next) {
    block = next;
    blockIdx = next->index;
    shared = next->shared;
    if (placed == next) return;
    unsigned char* start = static_cast<unsigned char*>(declared.start);
    if (placed) placed->declared.assign(start, start + declared.bytes);
    if (!next->declared.empty()) memcpy(start, next->declared.data(), declared.bytes);
    placed = next;
}

static void begin(Block* next, uint64_t index, size_t shared_bytes) {
    next->index = Dim3{unsigned(index % gridDim.x), unsigned(index / gridDim.x % gridDim.y), unsigned(index / gridDim.x / gridDim.y)};
    next->done = 0;
    next->declared.clear();
    for (unsigned i = 0; i < count; i++) {
        Thread& thread = next->threads[i];
        thread.state = State::READY;
        thread.turn = false;
        thread.fiber = nullptr;
        next->begun[i].clear();
    }
    enter(next);
    // Without a barrier, threads cannot have shared anything.
    if (waited || !next->is_clean) {
        memset(shared, 0xff, shared_bytes + SENTINELS);
        memset(declared.start, 0xff, declared.bytes);
    }
    next->is_clean = true;
    waited = false;
    order_blocks();
}

// Called after the threads of the current block have run: returns whether the block has ended, and fails if it is stuck
// or faulty.
static bool end(size_t shared_bytes) {
    if (block->done < count) return false;
    placed = nullptr;
    for (size_t i = 0; i < SENTINELS && !failure; i++) {
        if (shared[shared_bytes + i] != 0xff) failure = "a write beyond the shared memory";
    }
    return true;
}

static const char* launch(const Launch& of, const Kernel& what) {
    std::lock_guard<std::mutex> lock(turn);
    size_t size = size_t(of.block[0]) * of.block[1] * of.block[2];
    if (size == 0 || size > MOST_THREADS) return "a block of this size cannot be";
    if (of.shared_bytes > 227 * 1024) return "more shared memory than a block can have";
    for (Block*& slot : slots) {
        if (!slot) slot = new Block;
        slot->memory.reset(new unsigned char[of.shared_bytes + SENTINELS + 16]);
        slot->shared = slot->memory.get() + (16 - reinterpret_cast<uintptr_t>(slot->memory.get()) % 16) % 16;
        slot->is_clean = false;
    }
    declared = find_declared();
    placed = nullptr;
    kernel = what;
    count = unsigned(size);
    order = of.order;
    failure = nullptr;
    blockDim = Dim3{of.block[0], of.block[1], of.block[2]};
    gridDim = Dim3{of.grid[0], of.grid[1], of.grid[2]};
    begin_checks(of, declared);
    uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z, begun = 0;
    bool is_here[RESIDENT] = {};
    unsigned here = 0, resident = order < 2 || CHECKS ? 1 : RESIDENT;
    while (!failure && (here || begun < blocks)) {
        for (unsigned i = 0; i < resident && !failure; i++) {
            if (!is_here[i] && begun == blocks) continue;
            if (is_here[i]) enter(slots[i]);
            else begin(slots[i], in_order(begun++, blocks), of.shared_bytes), here++;
            pass();
            is_here[i] = !end(of.shared_bytes);
            here -= !is_here[i];
        }
    }
    if (failure) {
        // Some fibers are in the middle of a kernel. Otherwise all are idle, and the next launch uses them.
        idle.clear();
        fibers.clear();
    }
    end_checks();
    return failure;
}

// The emulator's interface to a kernel: the size of its arguments, a function that collects them from the pointers
// passed to cuLaunchKernel, and a function that runs it with arguments, blocks and threads in each dimension, shared
// bytes, and the order. It returns an error message or null.
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
        return launch(Launch{grid, block, shared_bytes, order}, Kernel{thread, args, bytes});
    }
    static constexpr Entry ENTRY{sizeof(Args), collect, run};
};

}  // namespace emulator

#define DYNAMIC_SHARED(TYPE, NAME) TYPE* NAME = reinterpret_cast<TYPE*>(emulator::shared)

// Exports a kernel as `NAME_entry`.
#define EMULATED(NAME, THREADS) \
    extern "C" __attribute__((visibility("default"))) const emulator::Entry NAME##_entry = emulator::Of<NAME, THREADS>::ENTRY;

#define ENTRY(NAME, ARGS, THREADS) \
    extern "C" void NAME(const ARGS a); \
    EMULATED(NAME, THREADS) \
    extern "C" void NAME(const ARGS a)
