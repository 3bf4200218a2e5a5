// Causal attention as in attention.cu, for 16-bit types on tensor cores: operands as stored, sums in f32, probabilities
// and gradients of scores rounded to the type before they are multiplied (as in Dao, "FlashAttention-2", 2023).
//
// Each of a block's four warps has one or two bands of sixteen queries or keys, and holds their factors in registers.
// The other operands pass through shared memory in stages of two tiles of ROWS rows: while one stage is in use, the
// next arrives. At first the second stage holds the factors that are loaded into registers. A warp multiplies the data
// that it reads from shared memory with all its bands: with a single band, shared memory is slower than the tensor
// cores.
//
// The backward consists of two kernels that both compute scores and gradients of probabilities. Together, they compute
// seven products. A single kernel would compute five, but would have to add up the gradient of q across blocks.
// docs/gpu-kernels.md states the cost.
#include "attention_tiles.cuh"

template <class T, unsigned SIZE> DEVICE void forward(const AttentionArgs& a) {
    // If a warp has two bands, the tile of queries takes both tiles of a stage.
    constexpr unsigned BANDS = BANDS_OF<SIZE>, QUERIES = BANDS * ROWS, STEPS = SIZE / 16, PARTS = ROWS / 16;
    DYNAMIC_SHARED(T, room);
    Place place(a, a.heads, QUERIES, a.from, a.time);
    // The tiles with the most keys come first.
    unsigned begin = place.from_last() * QUERIES;
    unsigned end = begin + QUERIES < keys_end(a) ? begin + QUERIES : keys_end(a);
    unsigned kv_head = place.head / (a.heads / a.kv_heads), band = begin + threadIdx.x / WARP * BANDS * 16;
    unsigned key = place.first(a, begin) / ROWS * ROWS, last_first = place.last_first(a, begin + QUERIES);
    Tile<T, SIZE> tile = Stage<T, SIZE>(room, 1).first;
    begin_fill<QUERIES>(tile, place.queries(a, a.q, a.q_row, place.head), begin, a);
    begin_keys(Stage<T, SIZE>(room, 0), key, place, kv_head, a);
    arrive();
    Factors queries[BANDS][STEPS];
    Sums out[BANDS][STEPS];
    // For the rows that a thread shares: the largest product and, over the thread's own columns, Σ 2^(c·(product −
    // largest)).
    float largest[BANDS][2], sums[BANDS][2];
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        for (unsigned s = 0; s < STEPS; s++) {
            queries[b][s] = factors(tile, band - begin + 16 * b, 16 * s);
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
        // No query of this warp sees a key after the warp's last query.
        if (band + 16 * BANDS <= key) continue;
        Sums scores[BANDS][PARTS];
        for (unsigned part = 0; part < PARTS; part++) {
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) scores[b][part] = Sums{};
            for (unsigned s = 0; s < STEPS; s++) {
                Factors keys = columns(now.first, 16 * part, 16 * s);
                UNROLL
                for (unsigned b = 0; b < BANDS; b++) multiply_transposed<T>(scores[b][part], queries[b][s], keys);
            }
        }
        if (begin < key + ROWS - 1 || key < last_first || a.keys < key + ROWS) {
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) {
                for (unsigned i = 0; i < 8; i++) {
                    unsigned query = band + 16 * b + Sums::row(i);
                    unsigned first = query < a.time ? place.first(a, query) : ~0u;
                    for (unsigned part = 0; part < PARTS; part++) {
                        unsigned position = key + 16 * part + Sums::column(i);
                        if (position < first || query < position || a.keys <= position) scores[b][part].at[i] = -INFINITY;
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
                        if (i / 2 % 2 == half) top = fmaxf(top, scores[b][part].at[i]);
                    }
                }
                top = over_row<Max>(top);
                // A row that has seen no key so far stays unchanged.
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
        float inverse[2];
        for (unsigned half = 0; half < 2; half++) {
            float sum = over_row<Add>(sums[b][half]);
            unsigned query = band + 16 * b + Sums::row(2 * half);
            // A query that sees no key has sums of 0, and ln Σ e^score = −∞.
            inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (is_query(a, query) && threadIdx.x % 4 == 0) {
                as_mut<float>(a.log_sums)[place.statistic(a, place.head, query)] = largest[b][half] * a.scale + logf(sum);
            }
        }
        put<T>(out[b], inverse, place.queries(a, a.out, a.out_row, place.head), band + 16 * b, a);
    }
}

// A warp's queries: factors, and statistics of the rows that each thread shares. Queries that do not exist see nothing.
template <class T, unsigned SIZE> struct Queries {
    static constexpr unsigned BANDS = BANDS_OF<SIZE>, STEPS = SIZE / 16;
    Factors of[BANDS][STEPS], upstream[BANDS][STEPS];
    Sums dq[BANDS][STEPS];
    unsigned firsts[BANDS][2];
    float log_sums[BANDS][2], deltas[BANDS][2];

    // Adds the contribution of sixteen keys of a stage to the gradient of q; the first key is at position `key`. `all`:
    // every query sees every key.
    DEVICE void add(
        Stage<T, SIZE> keys, unsigned part, unsigned key, unsigned query, unsigned keys_end, float c, bool all) {
        Sums scores[BANDS], dp[BANDS];
        UNROLL
        for (unsigned b = 0; b < BANDS; b++) scores[b] = dp[b] = Sums{};
        for (unsigned s = 0; s < STEPS; s++) {
            Factors k = columns(keys.first, 16 * part, 16 * s), v = columns(keys.second, 16 * part, 16 * s);
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) {
                multiply_transposed<T>(scores[b], of[b][s], k);
                multiply_transposed<T>(dp[b], upstream[b][s], v);
            }
        }
        Factors ds[BANDS];
        UNROLL
        for (unsigned b = 0; b < BANDS; b++) {
            for (unsigned i = 0; i < 8; i++) {
                unsigned half = i / 2 % 2, position = key + Sums::column(i);
                unsigned last = query + 16 * b + Sums::row(i);
                bool is_seen = all || (firsts[b][half] <= position && position <= last && position < keys_end);
                float e = power_of_two(fmaf(scores[b].at[i], c, -log_sums[b][half])), p = is_seen ? e : 0.0f;
                dp[b].at[i] = p * (dp[b].at[i] - deltas[b][half]);
            }
            ds[b] = rounded<T>(dp[b]);
        }
        for (unsigned s = 0; s < STEPS; s++) {
            Factors k = transposed(keys.first, 16 * part, 16 * s);
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) multiply<T>(dq[b][s], ds[b], k);
        }
    }
};

// Computes the gradient of q, and Σ out·d_out for the gradients of k and v.
template <class T, unsigned SIZE> DEVICE void queries_backward(const AttentionArgs& a) {
    constexpr unsigned BANDS = BANDS_OF<SIZE>, QUERIES = BANDS * ROWS, STEPS = SIZE / 16, PARTS = ROWS / 16;
    DYNAMIC_SHARED(T, room);
    Place place(a, a.heads, QUERIES, a.from, a.time);
    unsigned begin = place.from_last() * QUERIES, band = begin + threadIdx.x / WARP * BANDS * 16;
    unsigned end = begin + QUERIES < keys_end(a) ? begin + QUERIES : keys_end(a);
    unsigned kv_head = place.head / (a.heads / a.kv_heads);
    unsigned key = place.first(a, begin) / ROWS * ROWS, last_first = place.last_first(a, begin + QUERIES);
    unsigned band_first = band < a.time ? place.first(a, band) : ~0u;
    Tile<T, SIZE> tile = Stage<T, SIZE>(room, 1).first;
    begin_fill<QUERIES>(tile, place.queries(a, a.q, a.q_row, place.head), begin, a);
    begin_keys(Stage<T, SIZE>(room, 0), key, place, kv_head, a);
    Queries<T, SIZE> queries;
    float c = a.scale * LOG2_E;
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        float sums[2] = {0.0f, 0.0f};
        for (unsigned s = 0; s < STEPS; s++) {
            Rows of_d_out = place.queries(a, a.d_out, a.out_row, place.head);
            Factors d_out = from_memory<T>(of_d_out, band + 16 * b, 16 * s, a);
            Factors out = from_memory<T>(place.queries(a, a.out, a.out_row, place.head), band + 16 * b, 16 * s, a);
            for (unsigned i = 0; i < 4; i++) {
                for (unsigned shift = 0; shift < 32; shift += 16) {
                    T x{uint16_t(out.of[i] >> shift)}, d{uint16_t(d_out.of[i] >> shift)};
                    sums[i % 2] = fmaf(load(x), load(d), sums[i % 2]);
                }
            }
            queries.upstream[b][s] = d_out;
        }
        for (unsigned half = 0; half < 2; half++) {
            unsigned query = band + 16 * b + Sums::row(2 * half);
            uint64_t at = place.statistic(a, place.head, query);
            bool is_there = is_query(a, query);
            queries.firsts[b][half] = is_there ? place.first(a, query) : ~0u;
            queries.log_sums[b][half] = is_there ? as<float>(a.log_sums)[at] * LOG2_E : 0.0f;
            queries.deltas[b][half] = over_row<Add>(sums[half]);
            if (is_there && threadIdx.x % 4 == 0) as_mut<float>(a.deltas)[at] = queries.deltas[b][half];
        }
    }
    arrive();
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        for (unsigned s = 0; s < STEPS; s++) {
            queries.of[b][s] = factors(tile, band - begin + 16 * b, 16 * s);
            queries.dq[b][s] = Sums{};
        }
    }
    for (unsigned stage = 0; key < end; key += ROWS, stage ^= 1) {
        Stage<T, SIZE> now(room, stage);
        arrive();
        if (key + ROWS < end) begin_keys(Stage<T, SIZE>(room, stage ^ 1), key + ROWS, place, kv_head, a);
        if (key + ROWS - 1 <= begin && last_first <= key && key + ROWS <= a.keys) {
            ROLLED
            for (unsigned part = 0; part < PARTS; part++) queries.add(now, part, key + 16 * part, band, a.keys, c, true);
            continue;
        }
        ROLLED
        for (unsigned part = 0; part < PARTS; part++) {
            unsigned first = key + 16 * part;
            if (first + 16 <= band_first || band + 16 * BANDS <= first) continue;
            queries.add(now, part, first, band, a.keys, c, false);
        }
    }
    const float scale[2] = {a.scale, a.scale};
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        put<T>(queries.dq[b], scale, place.queries(a, a.dq, a.q_row, place.head), band + 16 * b, a);
    }
}

// Like `Queries`, for keys: here a row is a key and a column a query.
template <class T, unsigned SIZE> struct Keys {
    static constexpr unsigned BANDS = BANDS_OF<SIZE>, STEPS = SIZE / 16;
    Factors of[BANDS][STEPS], values[BANDS][STEPS];
    Sums dk[BANDS][STEPS], dv[BANDS][STEPS];

    // Adds the contributions of sixteen queries of a stage to the gradients of k and v; the first query is at position
    // `query`. Queries that do not exist are zeros, as are their gradients, so they add nothing.
    DEVICE void add(
        Stage<T, SIZE> queries, Statistics statistics, unsigned part, unsigned query, unsigned key, float c, bool all) {
        Sums p[BANDS], dp[BANDS];
        UNROLL
        for (unsigned b = 0; b < BANDS; b++) p[b] = dp[b] = Sums{};
        for (unsigned s = 0; s < STEPS; s++) {
            Factors q = columns(queries.first, 16 * part, 16 * s), d = columns(queries.second, 16 * part, 16 * s);
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) {
                multiply_transposed<T>(p[b], of[b][s], q);
                multiply_transposed<T>(dp[b], values[b][s], d);
            }
        }
        for (unsigned i = 0; i < 8; i++) {
            unsigned column = Sums::column(i), at = 16 * part + column;
            float log_sum = statistics.log_sums[at] * LOG2_E, delta = statistics.deltas[at];
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) {
                unsigned position = key + 16 * b + Sums::row(i);
                bool is_seen = all || (statistics.firsts[at] <= position && position <= query + column);
                float e = power_of_two(fmaf(p[b].at[i], c, -log_sum));
                p[b].at[i] = is_seen ? e : 0.0f;
                dp[b].at[i] = p[b].at[i] * (dp[b].at[i] - delta);
            }
        }
        Factors weights[BANDS], ds[BANDS];
        UNROLL
        for (unsigned b = 0; b < BANDS; b++) {
            weights[b] = rounded<T>(p[b]);
            ds[b] = rounded<T>(dp[b]);
        }
        for (unsigned s = 0; s < STEPS; s++) {
            Factors d = transposed(queries.second, 16 * part, 16 * s), q = transposed(queries.first, 16 * part, 16 * s);
            UNROLL
            for (unsigned b = 0; b < BANDS; b++) {
                multiply<T>(dv[b][s], weights[b], d);
                multiply<T>(dk[b][s], ds[b], q);
            }
        }
    }
};

template <class T, unsigned SIZE> DEVICE void keys_backward(const AttentionArgs& a) {
    constexpr unsigned BANDS = BANDS_OF<SIZE>, KEYS = BANDS * ROWS, STEPS = SIZE / 16, PARTS = ROWS / 16;
    DYNAMIC_SHARED(T, room);
    float* statistics = reinterpret_cast<float*>(Stage<T, SIZE>(room, 2).first.at);
    Place place(a, a.kv_heads, KEYS, 0, keys_end(a));
    unsigned group = a.heads / a.kv_heads, begin = place.tile * KEYS, band = begin + threadIdx.x / WARP * BANDS * 16;
    // Queries before a key do not see it. The loop ends at the first tile of queries that see only later keys.
    unsigned start = a.from / ROWS * ROWS < begin ? begin : a.from / ROWS * ROWS;
    unsigned end = begin / ROWS, beyond = (a.time + ROWS - 1) / ROWS;
    while (end < beyond) {
        unsigned middle = (end + beyond) / 2;
        if (place.first(a, middle * ROWS) < begin + KEYS) end = middle + 1;
        else beyond = middle;
    }
    end *= ROWS;

    Tile<T, SIZE> tile = Stage<T, SIZE>(room, 1).first;
    begin_fill<KEYS>(tile, place.keys(a, a.k, a.k_row, place.head), begin, a);
    begin_queries(Stage<T, SIZE>(room, 0), start, place, place.head * group, a);
    Statistics(statistics, 0).begin_fill(a, place, place.head * group, start);
    Keys<T, SIZE> keys;
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        for (unsigned s = 0; s < STEPS; s++) {
            keys.values[b][s] = from_memory<T>(place.keys(a, a.v, a.v_row, place.head), band + 16 * b, 16 * s, a);
        }
    }
    arrive();
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        for (unsigned s = 0; s < STEPS; s++) {
            keys.of[b][s] = factors(tile, band - begin + 16 * b, 16 * s);
            keys.dk[b][s] = keys.dv[b][s] = Sums{};
        }
    }
    float c = a.scale * LOG2_E;
    unsigned stage = 0;
    for (unsigned head = place.head * group; head < (place.head + 1) * group; head++) {
        for (unsigned query = start; query < end; query += ROWS, stage ^= 1) {
            Stage<T, SIZE> now(room, stage);
            Statistics of(statistics, stage);
            arrive();
            bool is_last = query + ROWS >= end;
            if (!is_last || head + 1 < (place.head + 1) * group) {
                unsigned next_head = is_last ? head + 1 : head, next = is_last ? start : query + ROWS;
                begin_queries(Stage<T, SIZE>(room, stage ^ 1), next, place, next_head, a);
                Statistics(statistics, stage ^ 1).begin_fill(a, place, next_head, next);
            }
            if (query + ROWS <= a.time && begin + KEYS - 1 <= query && of.firsts[ROWS - 1] <= begin) {
                ROLLED
                for (unsigned part = 0; part < PARTS; part++) {
                    keys.add(now, of, part, query + 16 * part, band, c, true);
                }
                continue;
            }
            ROLLED
            for (unsigned part = 0; part < PARTS; part++) {
                unsigned first = query + 16 * part;
                if (first + 16 <= band || a.time <= first || band + 16 * BANDS <= of.firsts[16 * part]) continue;
                keys.add(now, of, part, first, band, c, false);
            }
        }
    }
    const float scale[2] = {a.scale, a.scale}, one[2] = {1.0f, 1.0f};
    UNROLL
    for (unsigned b = 0; b < BANDS; b++) {
        put<T>(keys.dk[b], scale, place.keys(a, a.dk, a.k_row, place.head), band + 16 * b, a);
        put<T>(keys.dv[b], one, place.keys(a, a.dv, a.v_row, place.head), band + 16 * b, a);
    }
}

#define ATTENTION_OF(SIZE, TYPE, SUFFIX) \
    ENTRY(attention_##SIZE##_##SUFFIX, AttentionArgs, 128) { forward<TYPE, SIZE>(a); } \
    ENTRY(attention_queries_##SIZE##_##SUFFIX, AttentionArgs, 128) { queries_backward<TYPE, SIZE>(a); } \
    ENTRY(attention_keys_##SIZE##_##SUFFIX, AttentionArgs, 128) { keys_backward<TYPE, SIZE>(a); }
#define ATTENTION(SIZE) ATTENTION_OF(SIZE, Bf16, bf16) ATTENTION_OF(SIZE, F16, f16)

ATTENTION(32)
ATTENTION(64)
ATTENTION(128)
