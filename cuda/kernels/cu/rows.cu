// Broadcasts a row to all rows of a matrix; and sums all rows.
//
// Sums over rows are added like those of a norm's weights: every 64 rows in order, then those partial sums in order.
#include "device.cuh"

// y[row, column] = from[column]. One column per thread; blockIdx.y is its first row.
struct SpreadArgs {
    uint64_t from, y;
    uint64_t rows, size;
};

template <class T> DEVICE void spread(const SpreadArgs& a) {
    uint64_t column = global_thread();
    if (column >= a.size) return;
    T value = as<T>(a.from)[column];
    for (uint64_t row = blockIdx.y; row < a.rows; row += gridDim.y) as_mut<T>(a.y)[row * a.size + column] = value;
}

// Rows that are added into one partial sum.
constexpr uint64_t BLOCK = 64;
// Numbers that a thread loads at a time.
constexpr int AT_ONCE = 16;

// Adjacent columns, 8 bytes.
template <class T> struct alignas(8) Columns {
    static constexpr int COUNT = 8 / sizeof(T);
    T at[COUNT];
};

// `partials` is f32 of [blocks of rows, size]. A thread processes some columns of the rows of blockIdx.y.
struct RowSumsArgs {
    uint64_t x, partials;
    uint64_t rows, size;
};

template <class T> DEVICE void row_sums(const RowSumsArgs& a) {
    uint64_t column = global_thread();
    if (column >= a.size) return;
    uint64_t first = blockIdx.y * BLOCK, end = first + BLOCK < a.rows ? first + BLOCK : a.rows;
    float sum = 0.0f;
    for (uint64_t row = first; row < end; row++) sum += load(as<T>(a.x)[row * a.size + column]);
    as_mut<float>(a.partials)[uint64_t(blockIdx.y) * a.size + column] = sum;
}

// Like row_sums, if x and each of its rows are aligned to 8 bytes.
template <class T> DEVICE void row_sums_wide(const RowSumsArgs& a) {
    constexpr int N = Columns<T>::COUNT;
    uint64_t at = global_thread(), step = a.size / N;
    if (at >= step) return;
    uint64_t row = blockIdx.y * BLOCK, end = row + BLOCK < a.rows ? row + BLOCK : a.rows;
    const Columns<T>* x = as<Columns<T>>(a.x) + row * step + at;
    float sums[N] = {};
    for (; row + AT_ONCE <= end; row += AT_ONCE, x += AT_ONCE * step) {
        Columns<T> values[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++) values[i] = x[i * step];
        UNROLL for (int i = 0; i < AT_ONCE; i++) {
            UNROLL for (int j = 0; j < N; j++) sums[j] += load(values[i].at[j]);
        }
    }
    for (; row < end; row++, x += step) {
        UNROLL for (int j = 0; j < N; j++) sums[j] += load(x->at[j]);
    }
    float* to = as_mut<float>(a.partials) + uint64_t(blockIdx.y) * a.size + N * at;
    UNROLL for (int j = 0; j < N; j++) to[j] = sums[j];
}

// Adds the partial sums in order. The result `to` is f32 of [size]. `add`: 0 overwrites the existing value, 1 adds the
// sum to it, 2 starts the sum with it.
struct PartialSumsArgs {
    uint64_t partials, to;
    uint64_t blocks, size;
    uint64_t add;
};

ENTRY(partial_sums, PartialSumsArgs, 256) {
    uint64_t column = global_thread();
    if (column >= a.size) return;
    const float* from = as<float>(a.partials) + column;
    float* to = as_mut<float>(a.to) + column;
    float sum = a.add == 2 ? *to : 0.0f;
    uint64_t block = 0;
    for (; block + AT_ONCE <= a.blocks; block += AT_ONCE, from += AT_ONCE * a.size) {
        float values[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++) values[i] = from[i * a.size];
        UNROLL for (int i = 0; i < AT_ONCE; i++) sum += values[i];
    }
    for (; block < a.blocks; block++, from += a.size) sum += *from;
    *to = a.add == 1 ? *to + sum : sum;
}

KERNEL(spread, SpreadArgs, 256)
KERNEL(row_sums, RowSumsArgs, 256)
KERNEL(row_sums_wide, RowSumsArgs, 128)
