// A row added to, or put into, all rows of a matrix; and the sum of all rows.
//
// Sums over rows go as those of a norm's weights do: rows by 64 in order, then those partial sums in order.
#include "device.cuh"

// y[row, column] = from[column]. A thread takes a column; blockIdx.y is the first of its rows.
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

// Rows whose sum is one partial sum.
constexpr uint64_t BLOCK = 64;
// Numbers that a thread has on their way from memory at a time.
constexpr int AT_ONCE = 16;

// Neighbouring columns, of 8 bytes.
template <class T> struct alignas(8) Columns {
    static constexpr int COUNT = 8 / sizeof(T);
    T at[COUNT];
};

// f32 of [blocks of rows, size]. A thread takes some columns, blockIdx.y the rows.
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

// The same sums, where x begins at a multiple of 8 bytes and so does each of its rows.
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

// The partial sums in order, f32 of [size]; onto what is there, or instead of it.
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
