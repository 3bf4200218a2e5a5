// Checks the memory accesses of kernels, like compute-sanitizer's memcheck and racecheck, in a library compiled with
// -DEMULATED_CHECKS and -fsanitize=thread. The compiler inserts a call before each access; the functions here take the
// place of libtsan's.
//
// An access must be within valid memory. If two threads of a block access the same bytes and one writes, a barrier of
// the block, or a __syncwarp of their warp, must come between; a shuffle is not enough. Threads of different blocks
// must not conflict at all, unless both accesses are atomic. These rules hold for every order of threads, so blocks run
// one after the other here.
#pragma once

#ifndef EMULATED_CHECKS
namespace emulator {
constexpr bool CHECKS = false;
struct OfKernel {};
struct NotOfKernel { NotOfKernel() {} };
static inline void access(const void*, size_t, bool, bool = false) {}
static inline void order_warp(unsigned, uint32_t) {}
static inline void order_block() {}
static inline void on_stack(const void*) {}
static inline void order_blocks() {}
static inline void begin_checks(const Launch&, const Segment&) {}
static inline void end_checks() {}
}  // namespace emulator
#else

#include <stdarg.h>
#include <stdlib.h>

#include <algorithm>

#define UNWATCHED __attribute__((no_sanitize_thread))

namespace emulator {

// The valid memory, by address.
struct Range { uintptr_t start; size_t bytes; };
struct Ranges { const Range* of; size_t count; };

// Bytes of global memory in one launch. `read` counts each byte that is read before the launch writes it, and `written`
// each byte that is written, once each. `accessed` counts the bytes of all accesses. A byte that is accessed both
// singly and in a larger unit is counted for each of the two.
struct Traffic { size_t read, written, accessed; };

}  // namespace emulator

// The loader of the library may set this to a function that returns the memory that is valid during a launch by the
// calling thread. If it is unset, or returns no memory, only shared memory is checked.
extern "C" __attribute__((visibility("default"))) emulator::Ranges (*emulated_memory)() = nullptr;
// The loader may set this to receive the traffic of each launch, at its end, on the thread that launched.
extern "C" __attribute__((visibility("default"))) void (*emulated_traffic)(const emulator::Traffic*) = nullptr;

namespace emulator {

constexpr bool CHECKS = true;

// A scope of kernel code, or of emulator code called by a kernel.
template <bool OF_KERNEL> struct Watch {
    bool before = watched;
    UNWATCHED Watch() { watched = OF_KERNEL; }
    UNWATCHED ~Watch() { watched = before; }
};
using OfKernel = Watch<true>;
using NotOfKernel = Watch<false>;

// Identifies an access: the clock (advanced wherever threads are ordered), a bit for atomics, and the thread.
using Stamp = uint64_t;
constexpr unsigned CLOCK = 16;
constexpr Stamp ATOMIC = 1 << 15, THREAD = MOST_THREADS - 1;
// The history of two bytes, or of one where single bytes are accessed: the last writer, and the last two threads that
// read.
struct Cell { Stamp writer, readers[2]; };
struct Watched {
    uintptr_t start;
    size_t bytes;
    bool is_shared;
    Cell *pairs, *singles;
};

// The dynamic shared memory, the declared shared memory, and the memory that the loader named, by address.
constexpr size_t SHARED = 2;
static std::vector<Watched> memory;
// The stack of the running thread.
static uintptr_t stack;
static Watched* last;
// Memory that holds arguments, constants and thread-local variables, but no kernel data: the library and the arguments.
static uintptr_t library_start, library_bytes;
static uint64_t now = 1, launch_began, block_began, barrier;
static Traffic traffic;
// The clock at which a thread was last synchronized with each other lane of its warp.
static uint64_t heard[MOST_THREADS][WARP_THREADS];

static int find_library(dl_phdr_info* library, size_t, void*) {
    uintptr_t first = ~uintptr_t(0), end = 0, inside = reinterpret_cast<uintptr_t>(&find_library);
    for (unsigned i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr)& segment = library->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD) continue;
        uintptr_t start = library->dlpi_addr + segment.p_vaddr;
        if (start < first) first = start;
        if (start + segment.p_memsz > end) end = start + segment.p_memsz;
    }
    if (inside < first || inside >= end) return 0;
    library_start = first;
    library_bytes = end - first;
    return 1;
}

static void begin_checks(const Launch& of, const Segment& declared) {
    dl_iterate_phdr(find_library, nullptr);
    for (Segment shared : {Segment{slots[0]->shared, of.shared_bytes}, declared}) {
        memory.push_back(Watched{reinterpret_cast<uintptr_t>(shared.start), shared.bytes, true, nullptr, nullptr});
    }
    Ranges said = emulated_memory ? emulated_memory() : Ranges{};
    for (size_t i = 0; i < said.count; i++) {
        memory.push_back(Watched{said.of[i].start, said.of[i].bytes, false, nullptr, nullptr});
    }
    last = nullptr;
    traffic = Traffic{};
    launch_began = ++now;
}
static void end_checks() {
    for (Watched& of : memory) {
        free(of.pairs);
        free(of.singles);
    }
    memory.clear();
    if (emulated_traffic) emulated_traffic(&traffic);
}
static void on_stack(const void* of) { stack = reinterpret_cast<uintptr_t>(of); }
// A block begins.
static void order_blocks() { block_began = barrier = ++now; }
// All threads of the block resume after a barrier.
static void order_block() { barrier = ++now; }
// Lanes of a warp resume after a __syncwarp: each is now synchronized with everything that any of them was synchronized
// with.
static void order_warp(unsigned first, uint32_t came) {
    now++;
    uint64_t known[WARP_THREADS] = {};
    for (unsigned lane = 0; lane < WARP_THREADS; lane++) {
        if (!(came >> lane & 1)) continue;
        for (unsigned of = 0; of < WARP_THREADS; of++) known[of] = std::max(known[of], heard[first + lane][of]);
    }
    for (unsigned lane = 0; lane < WARP_THREADS; lane++) {
        if (!(came >> lane & 1)) continue;
        for (unsigned of = 0; of < WARP_THREADS; of++) heard[first + lane][of] = came >> of & 1 ? now : known[of];
    }
}

// Ends the launch with a message. The message is never freed, as there is at most one.
__attribute__((noinline, format(printf, 1, 2))) static void fail_with(const char* format, ...) {
    watched = false;
    char text[300];
    int begun = snprintf(text, sizeof text, "thread %u of block (%u, %u, %u) ", current, blockIdx.x, blockIdx.y, blockIdx.z);
    va_list values;
    va_start(values, format);
    vsnprintf(text + begun, sizeof text - begun, format, values);
    va_end(values);
    fail(strdup(text));
}

static const char* place_of(const Watched& of) { return of.is_shared ? "shared memory" : "memory"; }

// Whether another thread's access is unordered relative to this one.
UNWATCHED static inline bool races(Stamp other, Stamp own) {
    uint64_t then = other >> CLOCK;
    if (then < launch_began || (other & own & ATOMIC)) return false;
    if (then < block_began) return true;
    if (then < barrier || (other & THREAD) == current) return false;
    return (other & THREAD) / WARP_THREADS != current / WARP_THREADS || then >= heard[current][(other & THREAD) % WARP_THREADS];
}

__attribute__((noinline)) static void found(const Watched& of, uintptr_t address, bool writes, Stamp other, bool wrote) {
    const char *does = writes ? "writes" : "reads", *did = wrote ? "writes" : "reads";
    size_t at = address - of.start;
    if (other >> CLOCK < block_began) fail_with("%s byte %zu of memory that another block %s", does, at, did);
    fail_with("%s byte %zu of %s that thread %u %s, with no barrier between", does, at, place_of(of), unsigned(other & THREAD), did);
}

static Watched* find(uintptr_t address, size_t bytes, bool writes) {
    if (address - stack < STACK || address - reinterpret_cast<uintptr_t>(kernel.args) < kernel.bytes) return nullptr;
    for (size_t i = 0; i < SHARED; i++) {
        if (address - memory[i].start < memory[i].bytes) return last = &memory[i];
    }
    const char* does = writes ? "writes" : "reads";
    size_t behind_shared = address - memory[0].start;
    if (behind_shared < memory[0].bytes + SENTINELS) {
        fail_with("%s %zu bytes from byte %zu on of shared memory of %zu bytes", does, bytes, behind_shared, memory[0].bytes);
    }
    if (memory.size() == SHARED) return nullptr;
    auto behind = std::upper_bound(memory.begin() + SHARED, memory.end(), address,
        [](uintptr_t address, const Watched& of) { return address < of.start; });
    if (behind == memory.begin() + SHARED) fail_with("%s %zu bytes before all memory", does, bytes);
    Watched& of = behind[-1];
    size_t at = address - of.start;
    if (at >= of.bytes) fail_with("%s %zu bytes from byte %zu on of memory of %zu bytes", does, bytes, at, of.bytes);
    return last = &of;
}

template <bool WRITES, size_t BYTES> UNWATCHED static void check(const void* at, size_t bytes = BYTES, bool atomic = false) {
    uintptr_t address = reinterpret_cast<uintptr_t>(at);
    if (address - library_start < library_bytes) return;
    Watched* of = last;
    if (!of || address - of->start >= of->bytes) {
        of = find(address, bytes, WRITES);
        if (!of) return;
    }
    size_t offset = address - of->start;
    if (of->bytes - offset < bytes) {
        fail_with("%s %zu bytes from byte %zu on of %s of %zu bytes", WRITES ? "writes" : "reads", bytes, offset, place_of(*of), of->bytes);
    }
    size_t unit = (address | bytes) & 1 ? 1 : 2;
    Cell*& cells = unit == 1 ? of->singles : of->pairs;
    if (!cells) cells = static_cast<Cell*>(calloc(of->bytes / unit + 1, sizeof(Cell)));
    Stamp own = now << CLOCK | (atomic ? ATOMIC : 0) | current;
    // Older shared-memory accesses belong to earlier blocks, which had their own shared memory.
    uint64_t oldest = of->is_shared ? block_began : launch_began;
    size_t touched = 0;
    for (size_t i = offset / unit; i < (offset + bytes) / unit; i++) {
        Cell& cell = cells[i];
        // Cells are cleared at each launch.
        touched += WRITES ? !cell.writer : !cell.writer && !cell.readers[0];
        if (cell.writer >> CLOCK >= oldest && races(cell.writer, own)) found(*of, of->start + i * unit, WRITES, cell.writer, true);
        if (WRITES) {
            for (Stamp reader : cell.readers) {
                if (reader >> CLOCK >= oldest && races(reader, own)) found(*of, of->start + i * unit, true, reader, false);
            }
            cell.writer = own;
        } else if ((cell.readers[0] ^ own) & THREAD || cell.readers[0] >> CLOCK < block_began) {
            cell.readers[1] = cell.readers[0];
            cell.readers[0] = own;
        } else {
            cell.readers[0] = own;
        }
    }
    if (of->is_shared) return;
    (WRITES ? traffic.written : traffic.read) += unit * touched;
    traffic.accessed += bytes;
}

// An access that the emulator makes on behalf of a kernel.
UNWATCHED static inline void access(const void* at, size_t bytes, bool writes, bool atomic = false) {
    NotOfKernel accesses;
    if (writes) check<true, 0>(at, bytes, atomic);
    else check<false, 0>(at, bytes);
}
// An access in kernel code. is_of_kernel checks the stack, because another thread of the host may be about to launch
// another kernel.
UNWATCHED static inline bool is_of_kernel() {
    return watched && reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) - stack < STACK;
}
template <bool WRITES, size_t BYTES> UNWATCHED static inline void access(const void* at) {
    if (!is_of_kernel()) return;
    watched = false;
    check<WRITES, BYTES>(at);
    watched = true;
}

}  // namespace emulator

// The functions that the compiler inserts calls to.
#define WATCH extern "C" __attribute__((used, visibility("hidden"), no_sanitize_thread)) void
#define OF_SIZE(BYTES) \
    WATCH __tsan_read##BYTES(void* at) { emulator::access<false, BYTES>(at); } \
    WATCH __tsan_write##BYTES(void* at) { emulator::access<true, BYTES>(at); } \
    WATCH __tsan_unaligned_read##BYTES(void* at) { emulator::access<false, BYTES>(at); } \
    WATCH __tsan_unaligned_write##BYTES(void* at) { emulator::access<true, BYTES>(at); } \
    WATCH __tsan_volatile_read##BYTES(void* at) { emulator::access<false, BYTES>(at); } \
    WATCH __tsan_volatile_write##BYTES(void* at) { emulator::access<true, BYTES>(at); }
OF_SIZE(1)
OF_SIZE(2)
OF_SIZE(4)
OF_SIZE(8)
OF_SIZE(16)
WATCH __tsan_read_range(void* at, size_t bytes) { if (emulator::is_of_kernel()) emulator::access(at, bytes, false); }
WATCH __tsan_write_range(void* at, size_t bytes) { if (emulator::is_of_kernel()) emulator::access(at, bytes, true); }
WATCH __tsan_vptr_update(void**, void*) {}
WATCH __tsan_func_entry(void*) {}
WATCH __tsan_func_exit() {}
WATCH __tsan_init() {}
#endif
