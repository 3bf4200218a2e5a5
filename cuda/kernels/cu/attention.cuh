// Shared by all attention kernels: their arguments, and the mapping from blocks to work.
#pragma once
#include "math.cuh"

struct AttentionArgs {
    uint64_t q, k, v, out;
    // Backward only: the gradient of out, and the outputs for the gradients of q, k and v.
    uint64_t d_out, dq, dk, dv;
    // f32 of [batch, heads, time − from]: ln Σ e^score, written by the forward; Σ out·d_out, written by the backward's
    // first kernel.
    uint64_t log_sums, deltas;
    // u32 of [batch, max(time, keys)]: the first key that each position sees, non-decreasing within a sequence. The
    // address is 0 if all positions see keys from the start of their sequence on.
    uint64_t firsts;
    // Elements from one position to the next; gradients have the layout of their tensors. The heads of a position are
    // contiguous.
    uint64_t q_row, k_row, v_row, out_row;
    // The queries are those at the positions from `from` to `time`. A sequence has time − from rows of q, out and their
    // gradients. It has `keys` rows of k and v, for the positions from 0 on; `keys` may be less or more than `time`.
    // Only the rows before `time` are read and get gradients.
    uint32_t from, time, keys;
    uint32_t heads, kv_heads, size;
    float scale;
    // Whether all rows that are read in tiles can be copied 16 bytes at a time: every row of a head begins and ends at
    // a multiple of 16 bytes.
    uint32_t in_pieces;
    // Number of heads, over all samples, whose blocks are interleaved: the data that they read fits into the device's
    // cache.
    uint32_t together;
    uint32_t unused;
};

// One head's rows of a tensor: those of the queries, from position `begin` on, or those of all keys.
struct Rows {
    uint64_t address, stride;
    // Index of the first element of position 0, which may be below 0.
    uint64_t offset;
    unsigned begin, end;
    DEVICE bool has(unsigned position) const { return begin <= position && position < end; }
    // Index of a row's first element.
    DEVICE uint64_t at(unsigned position) const { return offset + position * stride; }
};

// The key positions that a query may see end here.
DEVICE unsigned keys_end(const AttentionArgs& a) { return a.time < a.keys ? a.time : a.keys; }

// The block's work. Among interleaved heads all first tiles come first, then all second tiles. Where first tiles have
// the most work, the last blocks of a launch have the least, so that multiprocessors finish at about the same time.
struct Place {
    // `tiles` is the number of tiles with queries; the `skipped` tiles before them have none.
    unsigned sample, head, tile, tiles, skipped;
    // `heads` per sample, each divided into tiles of `rows` positions up to `to`; tiles that end at or before `from` are
    // left out.
    DEVICE Place(const AttentionArgs& a, unsigned heads, unsigned rows, unsigned from, unsigned to)
        : tiles((to + rows - 1) / rows - from / rows), skipped(from / rows) {
        unsigned first = blockIdx.x / (a.together * tiles) * a.together, rest = gridDim.x / tiles - first;
        unsigned count = rest < a.together ? rest : a.together, block = blockIdx.x - first * tiles;
        tile = block / count;
        sample = (first + block % count) / heads;
        head = (first + block % count) % heads;
    }
    // The index of the block's tile when tiles are counted from the last.
    DEVICE unsigned from_last() const { return skipped + tiles - 1 - tile; }
    // A head's rows of q, of out, or of the gradient of either.
    DEVICE Rows queries(const AttentionArgs& a, uint64_t address, uint64_t row, unsigned head) const {
        uint64_t rows = uint64_t(sample) * (a.time - a.from) - a.from;
        return {address, row, rows * row + uint64_t(head) * a.size, a.from, a.time};
    }
    // A head's rows of k, of v, or of the gradient of either.
    DEVICE Rows keys(const AttentionArgs& a, uint64_t address, uint64_t row, unsigned head) const {
        return {address, row, uint64_t(sample) * a.keys * row + uint64_t(head) * a.size, 0, keys_end(a)};
    }
    // Index of the statistics of a query. Wraps around for a position before `from`.
    DEVICE uint64_t statistic(const AttentionArgs& a, unsigned head, unsigned query) const {
        return (uint64_t(sample) * a.heads + head) * (a.time - a.from) + query - a.from;
    }
    // Index of the sample's first position in `firsts`.
    DEVICE uint64_t positions(const AttentionArgs& a) const { return uint64_t(sample) * (a.time < a.keys ? a.keys : a.time); }
    // The first key that `position` sees.
    DEVICE unsigned first(const AttentionArgs& a, unsigned position) const {
        return a.firsts ? as<uint32_t>(a.firsts)[positions(a) + position] : 0;
    }
    // The first key that all positions of a tile ending at `end` see; no key for a partial tile.
    DEVICE unsigned last_first(const AttentionArgs& a, unsigned end) const { return end <= a.time ? first(a, end - 1) : ~0u; }
};

DEVICE bool is_query(const AttentionArgs& a, unsigned position) { return a.from <= position && position < a.time; }
