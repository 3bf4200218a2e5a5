// The device functions that cu/tensor.cuh needs: products of 16-bit matrices by the threads of a warp, and copies that
// arrive when they are waited for; and the accesses of cu/pack.cuh.
#pragma once

#include "emulator.h"

namespace emulator {

static inline bool in_pieces(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// A 16-byte access between memory and registers.
static inline void copy_pack(void* to, const void* from, const void* memory) {
    if (!in_pieces(memory)) fail("an access of 16 bytes at an address that is not a multiple of 16");
    memcpy(to, from, 16);
}

// The target of a copy is NaN until the copy is waited for.
static inline void begin_copy(void* to, const void* from) {
    if (!in_pieces(to) || !in_pieces(from)) fail("a copy of 16 bytes from or to an address that is not a multiple of 16");
    access(to, 16, true);
    NotOfKernel accesses;
    memset(to, 0xff, 16);
    block->begun[current].push_back(Copy{to, from});
}

static inline void end_copies() {
    NotOfKernel accesses;
    for (const Copy& copy : block->begun[current]) {
        // The copy may have read and written at any time between its start and here.
        if (copy.from) access(copy.from, 16, false);
        access(copy.to, 16, true);
        if (copy.from) memcpy(copy.to, copy.from, 16);
        else memset(copy.to, 0, 16);
    }
    block->begun[current].clear();
}

static inline void pair_at(const void* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % 4 != 0) fail("a pair at an address that is not a multiple of 4");
}
static inline uint32_t load_pair(const void* from) {
    pair_at(from);
    uint32_t both;
    memcpy(&both, from, 4);
    return both;
}
static inline void store_pair(void* to, uint32_t both) {
    pair_at(to);
    memcpy(to, &both, 4);
}

// Thread i passes the address of row i % 8 of matrix i / 8; the matrices are 8 x 8. The thread receives two adjacent
// elements of each.
static inline void load_matrices(uint32_t* to, const void* row, bool transposed) {
    if (!in_pieces(row)) fail("a row of a matrix at an address that is not a multiple of 16");
    FromWarp<const void*> rows(Meeting::LOAD_MATRICES, ALL_LANES, row);
    access(row, 16, false);
    NotOfKernel accesses;
    unsigned high = lane() / 4, low = lane() % 4 * 2;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        uint16_t two[2];
        for (unsigned i = 0; i < 2; i++) {
            unsigned at_row = transposed ? low + i : high, at_column = transposed ? high : low + i;
            memcpy(&two[i], static_cast<const uint16_t*>(rows[matrix * 8 + at_row]) + at_column, 2);
        }
        memcpy(&to[matrix], two, 4);
    }
}

// to += a * b. Of the 16 x 8 sums, thread 4 g + t holds those in rows g and g + 8 and in columns 2 t and 2 t + 1. Of a,
// 16 x 16, it holds a pair in row g, a pair in row g + 8, and the same pairs eight columns further. Of b, 16 x 8, it
// holds in column g the pairs in rows 2 t and 2 t + 8. A device's sums may differ in the last bit: here they are
// computed in double.
template <class WIDENED> void multiply(float* to, const uint32_t* a, uint32_t b0, uint32_t b1, WIDENED widened) {
    struct Operands { uint32_t a[4], b[2]; };
    FromWarp<Operands> warp(Meeting::MULTIPLY, ALL_LANES, Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    NotOfKernel accesses;
    unsigned group = lane() / 4, pair = lane() % 4;
    double sums[4] = {to[0], to[1], to[2], to[3]};
    for (unsigned t = 0; t < 4; t++) {
        Operands row = warp[group * 4 + t];
        for (unsigned column = 0; column < 2; column++) {
            Operands of_b = warp[(pair * 2 + column) * 4 + t];
            for (unsigned i = 0; i < 4; i++) {
                // The half of the rows, and the half of the summed dimension.
                unsigned half = i % 2, over = i / 2;
                for (unsigned shift = 0; shift < 32; shift += 16) {
                    double x = widened(uint16_t(row.a[i] >> shift)), y = widened(uint16_t(of_b.b[over] >> shift));
                    sums[half * 2 + column] += x * y;
                }
            }
        }
    }
    for (unsigned i = 0; i < 4; i++) to[i] = float(sums[i]);
}

}  // namespace emulator
