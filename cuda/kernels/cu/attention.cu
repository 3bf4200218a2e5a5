// Causal attention over tiles of keys, forward and backward, without a matrix of scores in memory (Dao et al.,
// "FlashAttention", 2022; Dao, "FlashAttention-2", 2023).
//
// A block of 16 × 16 threads processes a tile of queries of one head, or of keys of one key and value head. Thread (y,
// x) holds some consecutive rows of the tile, and of each row every sixteenth column starting at x. Tiles of keys begin
// at multiples of KEYS, independent of the queries, so a row's bits depend only on that row and the keys that it sees.
// No atomics are used: the gradient of q has its own kernel, and one block adds up the gradients of a tile of keys,
// head by head and query by query. These are the f32 kernels, with fused multiply-adds; attention_tensor.cu has those
// of narrower types.
#include "attention.cuh"

constexpr unsigned SIDE = 16;
constexpr unsigned KEYS = 32;

// The block's work, and this thread's place in the block.
struct Seat : Place {
    unsigned x, y;
    DEVICE Seat(const AttentionArgs& a, unsigned heads, unsigned rows, unsigned from, unsigned to)
        : Place(a, heads, rows, from, to), x(threadIdx.x % SIDE), y(threadIdx.x / SIDE) {}
};

// Queries per tile in the forward and in the gradient of q, for heads padded to SIZE.
template <unsigned SIZE> constexpr unsigned QUERIES_OF = SIZE <= 64 ? 64 : 32;

// A tile of rows of SIZE floats, each padded by one float so that the elements of a column are in different banks.
template <unsigned SIZE> struct Tile {
    static constexpr unsigned WIDTH = SIZE + 1;
    float* at;
    DEVICE float* row(unsigned i) const { return at + i * WIDTH; }
};

// Fills COUNT rows of a tile with one head's rows from position `first` on, with zeros at positions without a row
// and beyond the head's size.
template <unsigned COUNT, unsigned SIZE>
DEVICE void fill(Tile<SIZE> tile, Rows rows, unsigned first, const AttentionArgs& a) {
    for (unsigned i = threadIdx.x; i < COUNT * SIZE; i += blockDim.x) {
        unsigned row = i / SIZE, column = i % SIZE, position = first + row;
        bool is_there = rows.has(position) && column < a.size;
        tile.row(row)[column] = is_there ? as<float>(rows.address)[rows.at(position) + column] : 0.0f;
    }
}

// Reduces over the sixteen threads that share rows.
template <class OP> DEVICE float over_side(float x) {
    for (unsigned distance = SIDE / 2; distance > 0; distance /= 2) x = OP::of(x, __shfl_xor_sync(ALL, x, distance));
    return x;
}

// Computes rows · columnsᵀ of two tiles: to[r][c] is the product of row y·ROWS + r with column x + 16·c.
template <unsigned SIZE, unsigned ROWS, unsigned COLUMNS>
DEVICE void products(Tile<SIZE> rows, Tile<SIZE> columns, unsigned y, unsigned x, float (&to)[ROWS][COLUMNS]) {
    for (unsigned r = 0; r < ROWS; r++) {
        for (unsigned c = 0; c < COLUMNS; c++) to[r][c] = 0.0f;
    }
    for (unsigned i = 0; i < SIZE; i++) {
        float column[COLUMNS];
        for (unsigned c = 0; c < COLUMNS; c++) column[c] = columns.row(x + SIDE * c)[i];
        for (unsigned r = 0; r < ROWS; r++) {
            float row = rows.row(y * ROWS + r)[i];
            for (unsigned c = 0; c < COLUMNS; c++) to[r][c] = fmaf(row, column[c], to[r][c]);
        }
    }
}

// Stores the tile rows of thread (y, x) in one head's rows, from position `first` on.
template <unsigned ROWS, unsigned PARTS>
DEVICE void put(
    const float (&rows)[ROWS][PARTS], Rows to, unsigned first, const Seat& place, const AttentionArgs& a) {
    for (unsigned r = 0; r < ROWS; r++) {
        unsigned position = first + place.y * ROWS + r;
        if (!to.has(position)) continue;
        float* row = as_mut<float>(to.address) + to.at(position);
        for (unsigned e = 0; e < PARTS; e++) {
            unsigned column = place.x + SIDE * e;
            if (column < a.size) row[column] = rows[r][e];
        }
    }
}

template <unsigned SIZE> DEVICE void forward(const AttentionArgs& a) {
    constexpr unsigned QUERIES = QUERIES_OF<SIZE>, ROWS = QUERIES / SIDE, COLUMNS = KEYS / SIDE, PARTS = SIZE / SIDE;
    DYNAMIC_SHARED(float, room);
    Tile<SIZE> q{room}, k{q.row(QUERIES)}, v{k.row(KEYS)};
    Tile<KEYS> p{v.row(KEYS)};
    Seat place(a, a.heads, QUERIES, a.from, a.time);
    // The tiles with the most keys come first.
    unsigned begin = place.from_last() * QUERIES;
    unsigned end = begin + QUERIES < keys_end(a) ? begin + QUERIES : keys_end(a);
    unsigned kv_head = place.head / (a.heads / a.kv_heads);
    fill<QUERIES>(q, place.queries(a, a.q, a.q_row, place.head), begin, a);

    unsigned firsts[ROWS];
    float largest[ROWS], sums[ROWS], out[ROWS][PARTS];
    for (unsigned r = 0; r < ROWS; r++) {
        unsigned query = begin + place.y * ROWS + r;
        firsts[r] = query < a.time ? place.first(a, query) : 0;
        largest[r] = -INFINITY;
        sums[r] = 0.0f;
        for (unsigned e = 0; e < PARTS; e++) out[r][e] = 0.0f;
    }
    for (unsigned key = place.first(a, begin) / KEYS * KEYS; key < end; key += KEYS) {
        __syncthreads();
        fill<KEYS>(k, place.keys(a, a.k, a.k_row, kv_head), key, a);
        fill<KEYS>(v, place.keys(a, a.v, a.v_row, kv_head), key, a);
        __syncthreads();
        float scores[ROWS][COLUMNS];
        products<SIZE, ROWS, COLUMNS>(q, k, place.y, place.x, scores);
        for (unsigned r = 0; r < ROWS; r++) {
            unsigned query = begin + place.y * ROWS + r;
            float top = largest[r];
            for (unsigned c = 0; c < COLUMNS; c++) {
                unsigned position = key + place.x + SIDE * c;
                bool is_seen = firsts[r] <= position && position <= query && position < a.keys;
                scores[r][c] = is_seen ? scores[r][c] * a.scale : -INFINITY;
                top = Max::of(top, scores[r][c]);
            }
            top = over_side<Max>(top);
            // A row that has seen no key so far stays unchanged.
            float base = top == -INFINITY ? 0.0f : top;
            float correction = exponential(largest[r] - base), sum = 0.0f;
            for (unsigned c = 0; c < COLUMNS; c++) {
                float e = exponential(scores[r][c] - base);
                p.row(place.y * ROWS + r)[place.x + SIDE * c] = e;
                sum += e;
            }
            sums[r] = fmaf(sums[r], correction, over_side<Add>(sum));
            largest[r] = top;
            for (unsigned e = 0; e < PARTS; e++) out[r][e] *= correction;
        }
        __syncthreads();
        for (unsigned i = 0; i < KEYS; i++) {
            for (unsigned r = 0; r < ROWS; r++) {
                float weight = p.row(place.y * ROWS + r)[i];
                for (unsigned e = 0; e < PARTS; e++) {
                    out[r][e] = fmaf(weight, v.row(i)[place.x + SIDE * e], out[r][e]);
                }
            }
        }
    }
    for (unsigned r = 0; r < ROWS; r++) {
        unsigned query = begin + place.y * ROWS + r;
        if (!is_query(a, query)) continue;
        // A query that sees no key has sums of 0, and ln Σ e^score = −∞.
        for (unsigned e = 0; e < PARTS; e++) out[r][e] = sums[r] == 0.0f ? 0.0f : out[r][e] / sums[r];
        if (place.x == 0) {
            as_mut<float>(a.log_sums)[place.statistic(a, place.head, query)] = largest[r] + logf(sums[r]);
        }
    }
    put(out, place.queries(a, a.out, a.out_row, place.head), begin, place, a);
}

// Each warp processes one position of one head.
ENTRY(attention_deltas_f32, AttentionArgs, 256) {
    unsigned rows = blockDim.x / WARP;
    Place place(a, a.heads, rows, a.from, a.time);
    unsigned position = (place.skipped + place.tile) * rows + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (!is_query(a, position)) return;
    uint64_t at = place.queries(a, a.out, a.out_row, place.head).at(position);
    float delta = 0.0f;
    for (unsigned i = lane; i < a.size; i += WARP) delta = fmaf(as<float>(a.out)[at + i], as<float>(a.d_out)[at + i], delta);
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(ALL, delta, distance);
    if (lane == 0) as_mut<float>(a.deltas)[place.statistic(a, place.head, position)] = delta;
}

// The probability of a score, and the gradient of the score; both 0 for an unseen key.
struct Scored { float p, d; };

// The statistics of a query that the forward saved. A query that does not exist has a first key beyond all positions,
// and sees nothing.
struct Query {
    unsigned position, first;
    float log_sum, delta;

    // Computes the probability, and the gradient of the score, from `product`, the product of the query with the key at
    // position `key`, and `dp`, the gradient of the probability.
    DEVICE Scored scored(const AttentionArgs& a, unsigned key, float product, float dp) const {
        bool is_seen = first <= key && key <= position && key < a.keys;
        float p = is_seen ? exponential(fmaf(product, a.scale, -log_sum)) : 0.0f;
        return Scored{p, a.scale * p * (dp - delta)};
    }
};

DEVICE Query query_at(const AttentionArgs& a, const Place& place, unsigned head, unsigned position) {
    if (!is_query(a, position)) return Query{position, ~0u, 0.0f, 0.0f};
    uint64_t at = place.statistic(a, head, position);
    return Query{position, place.first(a, position), as<float>(a.log_sums)[at], as<float>(a.deltas)[at]};
}

template <unsigned SIZE> DEVICE void queries_backward(const AttentionArgs& a) {
    constexpr unsigned QUERIES = QUERIES_OF<SIZE>, ROWS = QUERIES / SIDE, COLUMNS = KEYS / SIDE, PARTS = SIZE / SIDE;
    DYNAMIC_SHARED(float, room);
    Tile<SIZE> q{room}, upstream{q.row(QUERIES)}, k{upstream.row(QUERIES)}, v{k.row(KEYS)};
    Tile<KEYS> ds{v.row(KEYS)};
    Seat place(a, a.heads, QUERIES, a.from, a.time);
    unsigned begin = place.from_last() * QUERIES;
    unsigned end = begin + QUERIES < keys_end(a) ? begin + QUERIES : keys_end(a);
    unsigned kv_head = place.head / (a.heads / a.kv_heads);
    fill<QUERIES>(q, place.queries(a, a.q, a.q_row, place.head), begin, a);
    fill<QUERIES>(upstream, place.queries(a, a.d_out, a.out_row, place.head), begin, a);

    Query of[ROWS];
    float dq[ROWS][PARTS];
    for (unsigned r = 0; r < ROWS; r++) {
        of[r] = query_at(a, place, place.head, begin + place.y * ROWS + r);
        for (unsigned e = 0; e < PARTS; e++) dq[r][e] = 0.0f;
    }
    for (unsigned key = place.first(a, begin) / KEYS * KEYS; key < end; key += KEYS) {
        __syncthreads();
        fill<KEYS>(k, place.keys(a, a.k, a.k_row, kv_head), key, a);
        fill<KEYS>(v, place.keys(a, a.v, a.v_row, kv_head), key, a);
        __syncthreads();
        float scores[ROWS][COLUMNS], dp[ROWS][COLUMNS];
        products<SIZE, ROWS, COLUMNS>(q, k, place.y, place.x, scores);
        products<SIZE, ROWS, COLUMNS>(upstream, v, place.y, place.x, dp);
        for (unsigned r = 0; r < ROWS; r++) {
            for (unsigned c = 0; c < COLUMNS; c++) {
                unsigned column = place.x + SIDE * c;
                Scored s = of[r].scored(a, key + column, scores[r][c], dp[r][c]);
                ds.row(place.y * ROWS + r)[column] = s.d;
            }
        }
        __syncthreads();
        for (unsigned i = 0; i < KEYS; i++) {
            for (unsigned r = 0; r < ROWS; r++) {
                float d = ds.row(place.y * ROWS + r)[i];
                for (unsigned e = 0; e < PARTS; e++) dq[r][e] = fmaf(d, k.row(i)[place.x + SIDE * e], dq[r][e]);
            }
        }
    }
    put(dq, place.queries(a, a.dq, a.q_row, place.head), begin, place, a);
}

template <unsigned SIZE> DEVICE void keys_backward(const AttentionArgs& a) {
    // A tile has as many queries as keys.
    constexpr unsigned ROWS = KEYS / SIDE, PARTS = SIZE / SIDE;
    DYNAMIC_SHARED(float, room);
    Tile<SIZE> k{room}, v{k.row(KEYS)}, q{v.row(KEYS)}, upstream{q.row(KEYS)};
    Tile<KEYS> p{upstream.row(KEYS)}, ds{p.row(KEYS)};
    Seat place(a, a.kv_heads, KEYS, 0, keys_end(a));
    unsigned group = a.heads / a.kv_heads, begin = place.tile * KEYS, first_query = a.from / KEYS * KEYS;
    // Queries before a key do not see it.
    if (first_query < begin) first_query = begin;
    fill<KEYS>(k, place.keys(a, a.k, a.k_row, place.head), begin, a);
    fill<KEYS>(v, place.keys(a, a.v, a.v_row, place.head), begin, a);

    float dk[ROWS][PARTS], dv[ROWS][PARTS];
    for (unsigned r = 0; r < ROWS; r++) {
        for (unsigned e = 0; e < PARTS; e++) dk[r][e] = dv[r][e] = 0.0f;
    }
    for (unsigned head = place.head * group; head < (place.head + 1) * group; head++) {
        // Ends at the first query that sees only keys after this tile.
        for (unsigned query = first_query; query < a.time && place.first(a, query) < begin + KEYS; query += KEYS) {
            __syncthreads();
            fill<KEYS>(q, place.queries(a, a.q, a.q_row, head), query, a);
            fill<KEYS>(upstream, place.queries(a, a.d_out, a.out_row, head), query, a);
            __syncthreads();
            float scores[ROWS][ROWS], dp[ROWS][ROWS];
            products<SIZE, ROWS, ROWS>(q, k, place.y, place.x, scores);
            products<SIZE, ROWS, ROWS>(upstream, v, place.y, place.x, dp);
            for (unsigned r = 0; r < ROWS; r++) {
                unsigned row = place.y * ROWS + r;
                Query of = query_at(a, place, head, query + row);
                for (unsigned c = 0; c < ROWS; c++) {
                    unsigned column = place.x + SIDE * c;
                    Scored s = of.scored(a, begin + column, scores[r][c], dp[r][c]);
                    p.row(row)[column] = s.p;
                    ds.row(row)[column] = s.d;
                }
            }
            __syncthreads();
            for (unsigned i = 0; i < KEYS; i++) {
                for (unsigned r = 0; r < ROWS; r++) {
                    float weight = p.row(i)[place.y * ROWS + r], d = ds.row(i)[place.y * ROWS + r];
                    for (unsigned e = 0; e < PARTS; e++) {
                        unsigned column = place.x + SIDE * e;
                        dv[r][e] = fmaf(weight, upstream.row(i)[column], dv[r][e]);
                        dk[r][e] = fmaf(d, q.row(i)[column], dk[r][e]);
                    }
                }
            }
        }
    }
    put(dk, place.keys(a, a.dk, a.k_row, place.head), begin, place, a);
    put(dv, place.keys(a, a.dv, a.v_row, place.head), begin, place, a);
}

#define ATTENTION(SIZE) \
    ENTRY(attention_##SIZE##_f32, AttentionArgs, 256) { forward<SIZE>(a); } \
    ENTRY(attention_queries_##SIZE##_f32, AttentionArgs, 256) { queries_backward<SIZE>(a); } \
    ENTRY(attention_keys_##SIZE##_f32, AttentionArgs, 256) { keys_backward<SIZE>(a); }

ATTENTION(32)
ATTENTION(64)
ATTENTION(128)
