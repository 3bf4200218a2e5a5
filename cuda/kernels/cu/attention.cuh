// What all kernels of attention share: their arguments, and where a block finds what it works on.
#pragma once
#include "math.cuh"

struct AttentionArgs {
    uint64_t q, k, v, out;
    // Backward only: gradient of out, and where those of q, k and v go.
    uint64_t d_out, dq, dk, dv;
    // f32 of [batch, heads, time]: ln Σ e^score, written by the forward; Σ out·d_out, written by the backward's first kernel.
    uint64_t log_sums, deltas;
    // u32 of [batch, time], the first position that each sees, never decreasing in a row; 0 if all see from their own sequence's begin.
    uint64_t firsts;
    // Elements from one position to the next; gradients lie as what they are of. Heads of a position follow each other.
    uint64_t q_row, k_row, v_row, out_row;
    uint32_t time, heads, kv_heads, size;
    float scale;
    // Whether 16 bytes at a time can be copied from all that is read in tiles: every row of a head begins at a multiple, and ends at one.
    uint32_t in_pieces;
    // Heads of all samples whose blocks are mixed: what they read fits the device's cache.
    uint32_t together;
};

// What a block works on. Of heads that are together all first tiles come first, then all second tiles: where first tiles have the most work,
// the last blocks of a launch have the least, and multiprocessors end at about the same time.
struct Place {
    unsigned sample, head, tile, tiles;
    // Of `heads` in a sample, each in tiles of `rows` positions.
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
    // Of [batch, heads, time].
    DEVICE uint64_t statistic(const AttentionArgs& a, unsigned head) const {
        return (uint64_t(sample) * a.heads + head) * a.time;
    }
    // The first position that `position` sees.
    DEVICE unsigned first(const AttentionArgs& a, unsigned position) const {
        return a.firsts ? as<uint32_t>(a.firsts)[uint64_t(sample) * a.time + position] : 0;
    }
    // The first that all positions before `end` see, of a tile; none where it is not whole.
    DEVICE unsigned last_first(const AttentionArgs& a, unsigned end) const { return end <= a.time ? first(a, end - 1) : ~0u; }
};
