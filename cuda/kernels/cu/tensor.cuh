// Products of 16-bit matrices on tensor cores, warp by warp, with operands loaded from shared memory to registers (PTX
// ISA, "Matrix multiply-accumulate operation using mma instruction": m16n8k16), and asynchronous copies to shared
// memory.
//
// Of 16 × 16 numbers, thread 4·g + t of a warp holds those in rows g and g + 8 and in columns 2t, 2t + 1, 2t + 8 and 2t
// + 9.
#pragma once
#include "device.cuh"

// A thread's share of 16 × 16 sums. The lowest bit of an index selects the column of a pair, the next the half of the
// rows, the highest the half of the columns.
struct Sums {
    float at[8];

    DEVICE static unsigned row(unsigned i) { return threadIdx.x % WARP / 4 + i / 2 % 2 * 8; }
    DEVICE static unsigned column(unsigned i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
};

// A thread's share of 16 × 16 factors: pairs of neighbours, in the order of `Sums`. When transposed, the halves of the
// rows and the halves of the columns swap roles.
struct Factors { uint32_t of[4]; };

// Rows of SIZE numbers in shared memory, padded by eight so that eight rows are in different banks if SIZE is a power
// of two.
template <class T, unsigned SIZE> struct Tile {
    static constexpr unsigned WIDTH = SIZE + 8;
    T* at;
    DEVICE T* row(unsigned i) const { return at + i * WIDTH; }
};

#ifdef __CUDACC__
// Before a loop that nvcc would otherwise unroll, running out of registers.
#define ROLLED _Pragma("unroll 1")
DEVICE uint32_t in_shared(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// Begins to copy 16 bytes, or to write 16 zero bytes without reading anything.
DEVICE void begin_copy(void* to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(in_shared(to)), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}
// Waits for the copies begun by this thread.
DEVICE void end_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Thread i of a warp passes the address of row i % 8 of matrix i / 8; the matrices are 8 × 8.
DEVICE Factors load_matrices(const void* row) {
    Factors f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.of[0]), "=r"(f.of[1]), "=r"(f.of[2]), "=r"(f.of[3])
                 : "r"(in_shared(row))
                 : "memory");
    return f;
}
DEVICE Factors load_matrices_transposed(const void* row) {
    Factors f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.of[0]), "=r"(f.of[1]), "=r"(f.of[2]), "=r"(f.of[3])
                 : "r"(in_shared(row))
                 : "memory");
    return f;
}

// Computes four of the sums of a · b, where b has eight columns.
#define MULTIPLY(TYPE, NAME) \
    DEVICE void multiply_eight(TYPE, float* to, const Factors& a, uint32_t b0, uint32_t b1) { \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
            "{%0, %1, %2, %3};" \
            : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3]) \
            : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "r"(b0), "r"(b1)); \
    }
MULTIPLY(Bf16, "bf16")
MULTIPLY(F16, "f16")

// Two adjacent numbers in memory, aligned to 4 bytes.
DEVICE uint32_t load_pair(const void* from) { return *static_cast<const uint32_t*>(from); }
DEVICE void store_pair(void* to, uint32_t both) { *static_cast<uint32_t*>(to) = both; }

// 2^x within 2 units in the last place; subnormal results are flushed to 0.
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
#define ROLLED
DEVICE void begin_copy(void* to, const void* from, bool is_there) { emulator::begin_copy(to, is_there ? from : nullptr); }
DEVICE void end_copies() { emulator::end_copies(); }
DEVICE Factors load_matrices(const void* row) {
    Factors f;
    emulator::load_matrices(f.of, row, false);
    return f;
}
DEVICE Factors load_matrices_transposed(const void* row) {
    Factors f;
    emulator::load_matrices(f.of, row, true);
    return f;
}
template <class T> DEVICE void multiply_eight(T, float* to, const Factors& a, uint32_t b0, uint32_t b1) {
    emulator::multiply(to, a.of, b0, b1, [](uint16_t bits) { return load(T{bits}); });
}
DEVICE uint32_t load_pair(const void* from) { return emulator::load_pair(from); }
DEVICE void store_pair(void* to, uint32_t both) { emulator::store_pair(to, both); }
DEVICE float power_of_two(float x) { return exp2f(x); }
#endif

// Loads 16 × 16 numbers of a tile, from a row and a column on, both multiples of 8, as the left factor of a product.
template <class T, unsigned SIZE> DEVICE Factors factors(Tile<T, SIZE> tile, unsigned row, unsigned column) {
    unsigned lane = threadIdx.x % WARP;
    return load_matrices(tile.row(lane % 16) + lane / 16 * 8 + (row * tile.WIDTH + column));
}

// Loads the right factor of `multiply_transposed`, so that the operands of one instruction are in adjacent registers.
template <class T, unsigned SIZE> DEVICE Factors columns(Tile<T, SIZE> tile, unsigned row, unsigned column) {
    unsigned lane = threadIdx.x % WARP;
    return load_matrices(tile.row(lane / 16 * 8 + lane % 8) + lane / 8 % 2 * 8 + (row * tile.WIDTH + column));
}

// Loads the right factor of `multiply`.
template <class T, unsigned SIZE> DEVICE Factors transposed(Tile<T, SIZE> tile, unsigned row, unsigned column) {
    unsigned lane = threadIdx.x % WARP;
    return load_matrices_transposed(tile.row(lane % 16) + lane / 16 * 8 + (row * tile.WIDTH + column));
}

template <class T> DEVICE Factors rounded(const Sums& sums) {
    Factors f;
    for (unsigned i = 0; i < 4; i++) f.of[i] = pair(T{}, sums.at[2 * i], sums.at[2 * i + 1]);
    return f;
}

// to += a · b, where b was loaded by `transposed`.
template <class T> DEVICE void multiply(Sums& to, const Factors& a, const Factors& b) {
    multiply_eight(T{}, to.at, a, b.of[0], b.of[1]);
    multiply_eight(T{}, to.at + 4, a, b.of[2], b.of[3]);
}

// to += a · bᵀ, where b was loaded by `columns`.
template <class T> DEVICE void multiply_transposed(Sums& to, const Factors& a, const Factors& b) {
    multiply_eight(T{}, to.at, a, b.of[0], b.of[1]);
    multiply_eight(T{}, to.at + 4, a, b.of[2], b.of[3]);
}
