// Watches what kernels read and write, as compute-sanitizer's memcheck and racecheck do, in a library that is compiled with -DEMULATED_CHECKS and
// -fsanitize=thread: the compiler puts a call before each access, to the functions here instead of libtsan's.
//
// An access must be within memory that there is. Two threads that touch the same bytes, one of which writes, must have a barrier of their block
// between them, or a __syncwarp of their warp; a shuffle does not do. Threads of two blocks must not at all, unless both are atomic. That holds
// whatever the order of threads is, so blocks run one after the other here.
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

// Memory that there is, by address.
struct Range { uintptr_t start; size_t bytes; };
struct Ranges { const Range* of; size_t count; };

// Bytes of memory that is not shared: those that a launch reads before it writes them, and those that it writes, each once; and those of all
// accesses. What is accessed by single bytes and by larger numbers as well counts for both.
struct Traffic { size_t read, written, accessed; };

}  // namespace emulator

// Who loads the library may set it to what tells of all memory, for the length of a launch of the thread that asks. Without it, or if there is none,
// only shared memory is watched.
extern "C" __attribute__((visibility("default"))) emulator::Ranges (*emulated_memory)() = nullptr;
// The same for the traffic of each launch, of which the thread that asked for it tells at its end.
extern "C" __attribute__((visibility("default"))) void (*emulated_traffic)(const emulator::Traffic*) = nullptr;

namespace emulator {

constexpr bool CHECKS = true;

// A stretch of a kernel's, or what the emulator does in its midst.
template <bool OF_KERNEL> struct Watch {
    bool before = watched;
    UNWATCHED Watch() { watched = OF_KERNEL; }
    UNWATCHED ~Watch() { watched = before; }
};
using OfKernel = Watch<true>;
using NotOfKernel = Watch<false>;

// Who did something: the clock, that goes on where threads are ordered, a bit for atomics, and the thread.
using Stamp = uint64_t;
constexpr unsigned CLOCK = 16;
constexpr Stamp ATOMIC = 1 << 15, THREAD = MOST_THREADS - 1;
// Of two bytes, or of one where single bytes are accessed: the last that wrote, and the last two threads that read.
struct Cell { Stamp writer, readers[2]; };
struct Watched {
    uintptr_t start;
    size_t bytes;
    bool is_shared;
    Cell *pairs, *singles;
};

// The dynamic shared memory, the declared one, and what the caller has said, by address.
constexpr size_t SHARED = 2;
static std::vector<Watched> memory;
// Of the thread that runs.
static uintptr_t stack;
static Watched* last;
// Where no kernel's data are, but arguments, constants and variables of threads: the library, the arguments.
static uintptr_t library_start, library_bytes;
static uint64_t now = 1, launch_began, block_began, barrier;
static Traffic traffic;
// When a thread has last heard of another one of its warp.
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
// All threads of the block go on behind a barrier.
static void order_block() { barrier = ++now; }
// Lanes of a warp go on behind a __syncwarp: each knows what each knew.
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

// Ends the launch with a message; who asked for it frees nothing, as there is one at most.
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

// Whether what another did is not ordered before what this thread does.
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
    // What other blocks did in shared memory was in theirs.
    uint64_t oldest = of->is_shared ? block_began : launch_began;
    size_t touched = 0;
    for (size_t i = offset / unit; i < (offset + bytes) / unit; i++) {
        Cell& cell = cells[i];
        // Cells are of this launch.
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

// What the emulator does for a kernel.
UNWATCHED static inline void access(const void* at, size_t bytes, bool writes, bool atomic = false) {
    NotOfKernel accesses;
    if (writes) check<true, 0>(at, bytes, atomic);
    else check<false, 0>(at, bytes);
}
// What a kernel does.
// Whether that is so: another thread of the host may be about to launch another kernel.
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

// What the compiler calls.
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
