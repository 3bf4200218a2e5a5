// Shared by all attention kernels: their arguments, and the mapping from blocks to work.
#pragma once
#include "math.cuh"

struct AttentionArgs {
    uint64_t q, k, v, out;
    // Backward only: the gradient of out, and the outputs for the gradients of q, k and v.
    uint64_t d_out, dq, dk, dv;
    // f32 of [batch, heads, time]: ln Σ e^score, written by the forward; Σ out·d_out, written by the backward's first
    // kernel.
    uint64_t log_sums, deltas;
    // u32 of [batch, time]: the first position that each position sees, non-decreasing within a sequence. 0 if all see
    // from the start of their sequence.
    uint64_t firsts;
    // Elements from one position to the next; gradients have the layout of their tensors. The heads of a position are
    // contiguous.
    uint64_t q_row, k_row, v_row, out_row;
    uint32_t time, heads, kv_heads, size;
    float scale;
    // Whether everything that is read in tiles can be copied 16 bytes at a time: every row of a head begins and ends at
    // a multiple of 16 bytes.
    uint32_t in_pieces;
    // Number of heads, over all samples, whose blocks are interleaved: what they read fits the device's cache.
    uint32_t together;
};

// The block's work. Among interleaved heads all first tiles come first, then all second tiles. Where first tiles have
// the most work, the last blocks of a launch have the least, so that multiprocessors finish at about the same time.
struct Place {
    unsigned sample, head, tile, tiles;
    // `heads` per sample, each in tiles of `rows` positions.
    DEVICE Place(const AttentionArgs& a, unsigned heads, unsigned rows) : tiles((a.time + rows - 1) / rows) {
        unsigned first = blockIdx.x / (a.together * tiles) * a.together, rest = gridDim.x / tiles - first;
        unsigned count = rest < a.together ? rest : a.together, block = blockIdx.x - first * tiles;
        tile = block / count;
        sample = (first + block % count) / heads;
        head = (first + block % count) % heads;
    }
    DEVICE uint64_t at(const AttentionArgs& a, uint64_t row, unsigned head) const {
        return uint64_t(sample) * a.time * row + uint64_t(head) * a.size;
    }
    // Offset of a head's statistics in [batch, heads, time].
    DEVICE uint64_t statistic(const AttentionArgs& a, unsigned head) const {
        return (uint64_t(sample) * a.heads + head) * a.time;
    }
    // The first position that `position` sees.
    DEVICE unsigned first(const AttentionArgs& a, unsigned position) const {
        return a.firsts ? as<uint32_t>(a.firsts)[uint64_t(sample) * a.time + position] : 0;
    }
    // The first key that all positions of a tile ending at `end` see; no key for a partial tile.
    DEVICE unsigned last_first(const AttentionArgs& a, unsigned end) const { return end <= a.time ? first(a, end - 1) : ~0u; }
};
