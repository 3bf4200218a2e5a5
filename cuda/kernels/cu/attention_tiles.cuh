// Attention tiles on tensor cores: loads from memory to shared memory and registers, and stores of sums to memory.
#pragma once
#include "attention.cuh"
#include "tensor.cuh"

// Threads per block.
constexpr unsigned THREADS = 128;
// Queries or keys per tile.
constexpr unsigned ROWS = 64;
constexpr float LOG2_E = 1.44269504088896340736f;
// Bands per warp: the most that fit into its registers.
template <unsigned SIZE> constexpr unsigned BANDS_OF = SIZE <= 64 ? 2 : 1;

template <class T, unsigned SIZE> struct Stage {
    Tile<T, SIZE> first, second;
    DEVICE Stage(T* room, unsigned i) : first{room + 2 * i * ROWS * (SIZE + 8)}, second{first.row(ROWS)} {}
};

// Begins to fill COUNT rows of a tile with one head's rows from position `begin` on, with zeros at positions without a
// row and beyond the head's size.
template <unsigned COUNT, class T, unsigned SIZE>
DEVICE void begin_fill(Tile<T, SIZE> tile, Rows rows, unsigned begin, const AttentionArgs& a) {
    constexpr unsigned PIECE = 8, PIECES = SIZE / PIECE, ROWS_AT_ONCE = THREADS / PIECES;
    unsigned first = threadIdx.x / PIECES, column = threadIdx.x % PIECES * PIECE;
    const T* all = as<T>(rows.address);
    if (a.in_pieces) {
        UNROLL
        for (unsigned i = 0; i < COUNT; i += ROWS_AT_ONCE) {
            unsigned position = begin + first + i;
            bool is_there = rows.has(position) && column < a.size;
            begin_copy(tile.row(first + i) + column, all + rows.at(position) + column, is_there);
        }
        return;
    }
    ROLLED
    for (unsigned row = first; row < COUNT; row += ROWS_AT_ONCE) {
        const T* piece = all + rows.at(begin + row) + column;
        for (unsigned e = 0; e < PIECE; e++) {
            bool is_there = rows.has(begin + row) && column + e < a.size;
            tile.row(row)[column + e] = is_there ? piece[e] : T{0};
        }
    }
}

// Loads 16 × 16 numbers of one head directly from memory, from a position and a column on, in the layout that `factors`
// returns for a tile.
template <class T>
DEVICE Factors from_memory(Rows rows, unsigned begin, unsigned column, const AttentionArgs& a) {
    Factors f;
    for (unsigned i = 0; i < 4; i++) {
        unsigned position = begin + Sums::row(2 * i), left = column + Sums::column(2 * i);
        const T* two = as<T>(rows.address) + rows.at(position) + left;
        bool is_there = rows.has(position) && left < a.size;
        if (a.in_pieces) {
            f.of[i] = is_there ? load_pair(two) : 0;
        } else {
            f.of[i] = is_there ? two[0].bits : 0;
            if (is_there && left + 1 < a.size) f.of[i] |= uint32_t(two[1].bits) << 16;
        }
    }
    return f;
}

// Begins to fill both tiles of a stage: with k and v here, with q and d_out below.
template <class T, unsigned SIZE>
DEVICE void begin_keys(Stage<T, SIZE> stage, unsigned begin, const Place& place, unsigned head, const AttentionArgs& a) {
    begin_fill<ROWS>(stage.first, place.keys(a, a.k, a.k_row, head), begin, a);
    begin_fill<ROWS>(stage.second, place.keys(a, a.v, a.v_row, head), begin, a);
}

template <class T, unsigned SIZE>
DEVICE void begin_queries(
    Stage<T, SIZE> stage, unsigned begin, const Place& place, unsigned head, const AttentionArgs& a) {
    begin_fill<ROWS>(stage.first, place.queries(a, a.q, a.q_row, head), begin, a);
    begin_fill<ROWS>(stage.second, place.queries(a, a.d_out, a.out_row, head), begin, a);
}

// Statistics of the queries of a tile, in shared memory: ln Σ e^score, deltas, and the first key that each query sees.
struct Statistics {
    float *log_sums, *deltas;
    uint32_t* firsts;

    DEVICE Statistics(float* room, unsigned i)
        : log_sums(room + 3 * i * ROWS), deltas(log_sums + ROWS), firsts(reinterpret_cast<uint32_t*>(deltas + ROWS)) {}

    // Begins to fill in the statistics from `begin` on, with zeros where there is no query.
    DEVICE void begin_fill(const AttentionArgs& a, const Place& place, unsigned head, unsigned begin) const {
        constexpr unsigned PIECE = 4, PIECES = ROWS / PIECE;
        uint64_t at = place.statistic(a, head, begin), first = place.positions(a) + begin;
        bool in_pieces = (a.log_sums | a.deltas | a.firsts | 4 * (a.time | a.from | a.keys)) % 16 == 0;
        for (unsigned i = threadIdx.x; i < 3 * PIECES; i += blockDim.x) {
            unsigned which = i / PIECES, row = i % PIECES * PIECE;
            const uint32_t* from = which == 0 ? as<uint32_t>(a.log_sums) + at
                                 : which == 1 ? as<uint32_t>(a.deltas) + at : as<uint32_t>(a.firsts) + first;
            uint32_t* to = reinterpret_cast<uint32_t*>(log_sums + which * ROWS) + row;
            bool is_there = which < 2 || a.firsts;
            if (in_pieces) {
                begin_copy(to, from + row, is_there && is_query(a, begin + row));
            } else {
                for (unsigned e = 0; e < PIECE; e++) {
                    to[e] = is_there && is_query(a, begin + row + e) ? from[row + e] : 0;
                }
            }
        }
    }
};

// Waits until the copies of all threads have arrived, and until all threads are done with what they read before.
DEVICE void arrive() {
    end_copies();
    __syncthreads();
}

// Writes a warp's sixteen rows of sums to one head's rows from position `begin` on, each times the row's `factor`.
template <class T, unsigned STEPS>
DEVICE void put(
    const Sums (&rows)[STEPS], const float (&factor)[2], Rows to, unsigned begin, const AttentionArgs& a) {
    for (unsigned i = 0; i < 8; i += 2) {
        unsigned position = begin + Sums::row(i);
        if (!to.has(position)) continue;
        T* row = as_mut<T>(to.address) + to.at(position);
        for (unsigned s = 0; s < STEPS; s++) {
            unsigned column = 16 * s + Sums::column(i);
            float two[2] = {rows[s].at[i] * factor[i / 2 % 2], rows[s].at[i + 1] * factor[i / 2 % 2]};
            if (a.in_pieces) {
                if (column < a.size) store_pair(row + column, pair(T{}, two[0], two[1]));
            } else {
                for (unsigned e = 0; e < 2; e++) {
                    if (column + e < a.size) store(row[column + e], two[e]);
                }
            }
        }
    }
}

// Reduces over the four threads that share rows.
template <class OP> DEVICE float over_row(float x) {
    x = OP::of(x, __shfl_xor_sync(ALL, x, 1));
    return OP::of(x, __shfl_xor_sync(ALL, x, 2));
}
