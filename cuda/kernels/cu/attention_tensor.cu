// Causal attention as in attention.cu, of 16-bit numbers by tensor cores: products of what is stored, sums in f32, probabilities and
// gradients of scores rounded to the type before they are multiplied (as in Dao, "FlashAttention-2", 2023).
//
// Each of the four warps of a block has sixteen rows of queries or of keys, or twice as many, and their factors in registers. What they are
// multiplied with passes in stages of two tiles of ROWS rows: while one is in use, the next arrives. At first the second stage
// holds what goes into the registers.
#include "attention.cuh"
#include "tensor.cuh"

// Queries or keys of a tile.
constexpr unsigned ROWS = 64;
constexpr float LOG2_E = 1.44269504088896340736f;

template <class T, unsigned SIZE> struct Stage {
    Tile<T, SIZE> first, second;
    DEVICE Stage(T* room, unsigned i) : first{room + 2 * i * ROWS * (SIZE + 8)}, second{first.row(ROWS)} {}
};

// Begins to fill COUNT rows of a tile: those of one head from position `begin` on, zeros beyond its size and beyond the sequence.
template <unsigned COUNT, class T, unsigned SIZE>
DEVICE void begin_fill(
    Tile<T, SIZE> tile, uint64_t from, uint64_t stride, uint64_t offset, unsigned begin, const AttentionArgs& a) {
    constexpr unsigned PIECE = 8, PIECES = SIZE / PIECE;
    const T* head = as<T>(from) + offset;
    for (unsigned i = threadIdx.x; i < COUNT * PIECES; i += blockDim.x) {
        unsigned row = i / PIECES, column = i % PIECES * PIECE, position = begin + row;
        T* to = tile.row(row) + column;
        const T* piece = head + position * stride + column;
        if (a.in_pieces) {
            bool is_there = position < a.time && column < a.size;
            begin_copy(to, is_there ? piece : head, is_there);
        } else {
            for (unsigned e = 0; e < PIECE; e++) to[e] = position < a.time && column + e < a.size ? piece[e] : T{0};
        }
    }
}

// One of the two ways: rows of both tiles of a stage from the same position on.
template <class T, unsigned SIZE>
DEVICE void begin_keys(Stage<T, SIZE> stage, unsigned begin, const Place& place, unsigned head, const AttentionArgs& a) {
    begin_fill<ROWS>(stage.first, a.k, a.k_row, place.at(a, a.k_row, head), begin, a);
    begin_fill<ROWS>(stage.second, a.v, a.v_row, place.at(a, a.v_row, head), begin, a);
}

template <class T, unsigned SIZE>
DEVICE void begin_queries(
    Stage<T, SIZE> stage, unsigned begin, const Place& place, unsigned head, const AttentionArgs& a) {
    begin_fill<ROWS>(stage.first, a.q, a.q_row, place.at(a, a.q_row, head), begin, a);
    begin_fill<ROWS>(stage.second, a.d_out, a.out_row, place.at(a, a.out_row, head), begin, a);
}

// The copies that each thread has begun are there for all of them, and all are done with what they read before.
DEVICE void arrive() {
    end_copies();
    __syncthreads();
}

// Sums of a warp's sixteen rows to one head's, times `factor` of each thread's rows, from position `begin` on.
template <class T, unsigned STEPS>
DEVICE void put(
    const Sums (&rows)[STEPS], const float (&factor)[2], uint64_t to, uint64_t stride, uint64_t offset, unsigned begin,
    const AttentionArgs& a) {
    for (unsigned i = 0; i < 8; i++) {
        unsigned position = begin + Sums::row(i);
        if (position >= a.time) continue;
        T* row = as_mut<T>(to) + offset + position * stride;
        for (unsigned s = 0; s < STEPS; s++) {
            unsigned column = 16 * s + Sums::column(i);
            if (column < a.size) store(row[column], rows[s].at[i] * factor[i / 2 % 2]);
        }
    }
}

// Over the four threads that share rows.
template <class OP> DEVICE float over_row(float x) {
    x = OP::of(x, __shfl_xor_sync(ALL, x, 1));
    return OP::of(x, __shfl_xor_sync(ALL, x, 2));
}

// Whether queries from `query` on, as many as there are in a tile or two, all see all keys of the tile from `key` on.
DEVICE bool see_all(const AttentionArgs& a, const Place& place, unsigned query, unsigned queries, unsigned key) {
    unsigned end = query + queries;
    return end <= a.time && key + ROWS - 1 <= query && place.first(a, end - 1) <= key;
}

template <class T, unsigned SIZE> DEVICE void forward(const AttentionArgs& a) {
    // Sixteen rows of a warp are a band. The tile of queries is both of a stage's if there are two.
    constexpr unsigned BANDS = SIZE <= 64 ? 2 : 1, QUERIES = BANDS * ROWS, STEPS = SIZE / 16, PARTS = ROWS / 16;
    DYNAMIC_SHARED(T, room);
    Place place(a.heads);
    // The tiles with most keys first.
    unsigned begin = (gridDim.x - 1 - blockIdx.x) * QUERIES;
    unsigned end = begin + QUERIES < a.time ? begin + QUERIES : a.time;
    unsigned kv_head = place.head / (a.heads / a.kv_heads), warp = threadIdx.x / WARP;
    unsigned key = place.first(a, begin) / ROWS * ROWS;
    Tile<T, SIZE> tile = Stage<T, SIZE>(room, 1).first;
    begin_fill<QUERIES>(tile, a.q, a.q_row, place.at(a, a.q_row, place.head), begin, a);
    begin_keys(Stage<T, SIZE>(room, 0), key, place, kv_head, a);
    arrive();
    Factors queries[BANDS][STEPS];
    Sums out[BANDS][STEPS];
    // Of the rows that a thread shares: the largest product and, of its own columns, Σ 2^(c·(product − largest)).
    float largest[BANDS][2], sums[BANDS][2];
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        for (unsigned s = 0; s < STEPS; s++) {
            queries[b][s] = factors(tile, (warp * BANDS + b) * 16, 16 * s);
            out[b][s] = Sums{};
        }
        for (unsigned half = 0; half < 2; half++) {
            largest[b][half] = -INFINITY;
            sums[b][half] = 0.0f;
        }
    }
    float c = a.scale * LOG2_E;
    for (unsigned stage = 0; key < end; key += ROWS, stage ^= 1) {
        Stage<T, SIZE> now(room, stage);
        arrive();
        if (key + ROWS < end) begin_keys(Stage<T, SIZE>(room, stage ^ 1), key + ROWS, place, kv_head, a);
        Sums scores[BANDS][PARTS];
        for (unsigned part = 0; part < PARTS; part++) {
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) scores[b][part] = Sums{};
            for (unsigned s = 0; s < STEPS; s++) {
                Factors keys = factors(now.first, 16 * part, 16 * s);
                UNROLL
                for (unsigned b = 0; b < BANDS; b++) multiply_transposed<T>(scores[b][part], queries[b][s], keys);
            }
        }
        if (!see_all(a, place, begin, QUERIES, key)) {
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) {
                for (unsigned i = 0; i < 8; i++) {
                    unsigned query = begin + (warp * BANDS + b) * 16 + Sums::row(i);
                    unsigned first = query < a.time ? place.first(a, query) : ~0u;
                    for (unsigned part = 0; part < PARTS; part++) {
                        unsigned position = key + 16 * part + Sums::column(i);
                        if (position < first || query < position) scores[b][part].at[i] = -INFINITY;
                    }
                }
            }
        }
        UNROLL
        for (unsigned b = 0; b < BANDS; b++) {
            float base[2];
            for (unsigned half = 0; half < 2; half++) {
                float top = largest[b][half];
                for (unsigned part = 0; part < PARTS; part++) {
                    for (unsigned i = 0; i < 8; i++) {
                        if (i / 2 % 2 == half) top = Max::of(top, scores[b][part].at[i]);
                    }
                }
                top = over_row<Max>(top);
                // A row that sees nothing of this tile, nor of those before it, stays as it is.
                base[half] = top == -INFINITY ? 0.0f : top * c;
                float correction = top == -INFINITY ? 1.0f : power_of_two((largest[b][half] - top) * c);
                largest[b][half] = top;
                sums[b][half] *= correction;
                for (unsigned s = 0; s < STEPS; s++) {
                    for (unsigned i = 0; i < 8; i++) {
                        if (i / 2 % 2 == half) out[b][s].at[i] *= correction;
                    }
                }
            }
            for (unsigned part = 0; part < PARTS; part++) {
                for (unsigned i = 0; i < 8; i++) {
                    float p = power_of_two(fmaf(scores[b][part].at[i], c, -base[i / 2 % 2]));
                    scores[b][part].at[i] = p;
                    sums[b][i / 2 % 2] += p;
                }
            }
        }
        for (unsigned part = 0; part < PARTS; part++) {
            Factors weights[BANDS];
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) weights[b] = rounded<T>(scores[b][part]);
            for (unsigned s = 0; s < STEPS; s++) {
                Factors values = transposed(now.second, 16 * part, 16 * s);
                UNROLL
                for (unsigned b = 0; b < BANDS; b++) multiply<T>(out[b][s], weights[b], values);
            }
        }
    }
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        unsigned band = begin + (warp * BANDS + b) * 16;
        float inverse[2];
        for (unsigned half = 0; half < 2; half++) {
            float sum = over_row<Add>(sums[b][half]);
            unsigned query = band + Sums::row(2 * half);
            inverse[half] = 1.0f / sum;
            if (query < a.time && threadIdx.x % 4 == 0) {
                as_mut<float>(a.log_sums)[place.statistic(a, place.head) + query] = largest[b][half] * a.scale + logf(sum);
            }
        }
        put<T>(out[b], inverse, a.out, a.out_row, place.at(a, a.out_row, place.head), band, a);
    }
}

template <class T, unsigned SIZE> DEVICE void queries_backward(const AttentionArgs& a) {
    constexpr unsigned STEPS = SIZE / 16, PARTS = ROWS / 16;
    DYNAMIC_SHARED(T, room);
    Place place(a.heads);
    unsigned begin = (gridDim.x - 1 - blockIdx.x) * ROWS, band = begin + threadIdx.x / WARP * 16;
    unsigned end = begin + ROWS < a.time ? begin + ROWS : a.time;
    unsigned kv_head = place.head / (a.heads / a.kv_heads);
    unsigned key = place.first(a, begin) / ROWS * ROWS;
    Stage<T, SIZE> own(room, 1);
    begin_queries(own, begin, place, place.head, a);
    begin_keys(Stage<T, SIZE>(room, 0), key, place, kv_head, a);
    arrive();
    Factors queries[STEPS], upstream[STEPS];
    Sums dq[STEPS];
    for (unsigned s = 0; s < STEPS; s++) {
        queries[s] = factors(own.first, band - begin, 16 * s);
        upstream[s] = factors(own.second, band - begin, 16 * s);
        dq[s] = Sums{};
    }
    // Of the rows that a thread shares; those beyond the sequence see nothing.
    unsigned firsts[2];
    float log_sums[2], deltas[2], c = a.scale * LOG2_E;
    for (unsigned half = 0; half < 2; half++) {
        unsigned query = band + Sums::row(2 * half);
        bool is_there = query < a.time;
        uint64_t at = place.statistic(a, place.head) + query;
        firsts[half] = is_there ? place.first(a, query) : ~0u;
        log_sums[half] = is_there ? as<float>(a.log_sums)[at] * LOG2_E : 0.0f;
        deltas[half] = is_there ? as<float>(a.deltas)[at] : 0.0f;
    }
    for (unsigned stage = 0; key < end; key += ROWS, stage ^= 1) {
        Stage<T, SIZE> now(room, stage);
        arrive();
        if (key + ROWS < end) begin_keys(Stage<T, SIZE>(room, stage ^ 1), key + ROWS, place, kv_head, a);
        bool all = see_all(a, place, begin, ROWS, key);
        for (unsigned part = 0; part < PARTS; part++) {
            Sums scores{}, dp{};
            for (unsigned s = 0; s < STEPS; s++) {
                multiply_transposed<T>(scores, queries[s], factors(now.first, 16 * part, 16 * s));
                multiply_transposed<T>(dp, upstream[s], factors(now.second, 16 * part, 16 * s));
            }
            for (unsigned i = 0; i < 8; i++) {
                unsigned half = i / 2 % 2, position = key + 16 * part + Sums::column(i);
                bool is_seen = all || (firsts[half] <= position && position <= band + Sums::row(i));
                float p = is_seen ? power_of_two(fmaf(scores.at[i], c, -log_sums[half])) : 0.0f;
                dp.at[i] = p * (dp.at[i] - deltas[half]);
            }
            Factors ds = rounded<T>(dp);
            for (unsigned s = 0; s < STEPS; s++) multiply<T>(dq[s], ds, transposed(now.first, 16 * part, 16 * s));
        }
    }
    const float scale[2] = {a.scale, a.scale};
    put<T>(dq, scale, a.dq, a.q_row, place.at(a, a.q_row, place.head), band, a);
}

// What the forward left of the queries of a tile, in shared memory: log₂ Σ 2^…, deltas, and the first key that each sees.
struct Statistics {
    float *log_sums, *deltas;
    uint32_t* firsts;

    DEVICE Statistics(float* room, unsigned i)
        : log_sums(room + 3 * i * ROWS), deltas(log_sums + ROWS), firsts(reinterpret_cast<uint32_t*>(deltas + ROWS)) {}

    // Of those from `begin` on; those beyond the sequence see nothing.
    DEVICE void fill(const AttentionArgs& a, const Place& place, unsigned head, unsigned begin) const {
        for (unsigned i = threadIdx.x; i < ROWS; i += blockDim.x) {
            bool is_there = begin + i < a.time;
            uint64_t at = place.statistic(a, head) + begin + i;
            log_sums[i] = is_there ? as<float>(a.log_sums)[at] * LOG2_E : 0.0f;
            deltas[i] = is_there ? as<float>(a.deltas)[at] : 0.0f;
            firsts[i] = is_there ? place.first(a, begin + i) : ~0u;
        }
    }
};

template <class T, unsigned SIZE> DEVICE void keys_backward(const AttentionArgs& a) {
    constexpr unsigned STEPS = SIZE / 16, PARTS = ROWS / 16;
    DYNAMIC_SHARED(T, room);
    float* statistics = reinterpret_cast<float*>(Stage<T, SIZE>(room, 2).first.at);
    Place place(a.kv_heads);
    unsigned group = a.heads / a.kv_heads, begin = blockIdx.x * ROWS, band = begin + threadIdx.x / WARP * 16;
    // Queries before a key do not see it; from the first that begins behind this tile on nobody does.
    unsigned end = begin;
    while (end < a.time && place.first(a, end) < begin + ROWS) end += ROWS;

    Stage<T, SIZE> own(room, 1);
    begin_keys(own, begin, place, place.head, a);
    begin_queries(Stage<T, SIZE>(room, 0), begin, place, place.head * group, a);
    Statistics(statistics, 0).fill(a, place, place.head * group, begin);
    arrive();
    Factors keys[STEPS], values[STEPS];
    Sums dk[STEPS], dv[STEPS];
    for (unsigned s = 0; s < STEPS; s++) {
        keys[s] = factors(own.first, band - begin, 16 * s);
        values[s] = factors(own.second, band - begin, 16 * s);
        dk[s] = Sums{};
        dv[s] = Sums{};
    }
    float c = a.scale * LOG2_E;
    unsigned stage = 0;
    for (unsigned head = place.head * group; head < (place.head + 1) * group; head++) {
        for (unsigned query = begin; query < end; query += ROWS, stage ^= 1) {
            Stage<T, SIZE> now(room, stage);
            Statistics of(statistics, stage);
            arrive();
            bool is_last = query + ROWS >= end;
            if (!is_last || head + 1 < (place.head + 1) * group) {
                unsigned next_head = is_last ? head + 1 : head, next = is_last ? begin : query + ROWS;
                begin_queries(Stage<T, SIZE>(room, stage ^ 1), next, place, next_head, a);
                Statistics(statistics, stage ^ 1).fill(a, place, next_head, next);
            }
            bool all = see_all(a, place, query, ROWS, begin);
            // A row is a key, a column a query.
            for (unsigned part = 0; part < PARTS; part++) {
                Sums p{}, dp{};
                for (unsigned s = 0; s < STEPS; s++) {
                    multiply_transposed<T>(p, keys[s], factors(now.first, 16 * part, 16 * s));
                    multiply_transposed<T>(dp, values[s], factors(now.second, 16 * part, 16 * s));
                }
                for (unsigned i = 0; i < 8; i++) {
                    unsigned column = 16 * part + Sums::column(i), position = band + Sums::row(i);
                    bool is_seen = all || (of.firsts[column] <= position && position <= query + column);
                    p.at[i] = is_seen ? power_of_two(fmaf(p.at[i], c, -of.log_sums[column])) : 0.0f;
                    dp.at[i] = p.at[i] * (dp.at[i] - of.deltas[column]);
                }
                Factors weights = rounded<T>(p), ds = rounded<T>(dp);
                for (unsigned s = 0; s < STEPS; s++) {
                    multiply<T>(dv[s], weights, transposed(now.second, 16 * part, 16 * s));
                    multiply<T>(dk[s], ds, transposed(now.first, 16 * part, 16 * s));
                }
            }
        }
    }
    const float scale[2] = {a.scale, a.scale}, one[2] = {1.0f, 1.0f};
    put<T>(dk, scale, a.dk, a.k_row, place.at(a, a.k_row, place.head), band, a);
    put<T>(dv, one, a.dv, a.v_row, place.at(a, a.v_row, place.head), band, a);
}

#define ATTENTION_OF(SIZE, TYPE, SUFFIX) \
    ENTRY(attention_##SIZE##_##SUFFIX, AttentionArgs, 128) { forward<TYPE, SIZE>(a); } \
    ENTRY(attention_queries_##SIZE##_##SUFFIX, AttentionArgs, 128) { queries_backward<TYPE, SIZE>(a); } \
    ENTRY(attention_keys_##SIZE##_##SUFFIX, AttentionArgs, 128) { keys_backward<TYPE, SIZE>(a); }
#define ATTENTION(SIZE) ATTENTION_OF(SIZE, Bf16, bf16) ATTENTION_OF(SIZE, F16, f16)

ATTENTION(32)
ATTENTION(64)
ATTENTION(128)
