// A row added to, or put into, all rows of a matrix; and the sum of all rows.
//
// Sums over rows go as those of a norm's weights do: rows by 64 in order, then those partial sums in order.
#include "device.cuh"

// y[row, column] = from[column]
struct SpreadArgs {
    uint64_t from, y;
    uint64_t rows, size;
};

template <class T> DEVICE void spread(const SpreadArgs& a) {
    const T* from = as<T>(a.from);
    T* y = as_mut<T>(a.y);
    for (uint64_t i = global_thread(); i < a.rows * a.size; i += global_threads()) y[i] = from[i % a.size];
}

// Rows whose sum is one partial sum.
constexpr uint64_t BLOCK = 64;

// f32 of [blocks of rows, size]. A thread takes a column, blockIdx.y the rows.
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

// The partial sums in order, f32 of [size]; onto what is there, or instead of it.
struct PartialSumsArgs {
    uint64_t partials, to;
    uint64_t blocks, size;
    uint64_t add;
};

ENTRY(partial_sums, PartialSumsArgs, 256) {
    uint64_t column = global_thread();
    if (column >= a.size) return;
    float* to = as_mut<float>(a.to) + column;
    float sum = a.add == 2 ? *to : 0.0f;
    for (uint64_t block = 0; block < a.blocks; block++) sum += as<float>(a.partials)[block * a.size + column];
    *to = a.add == 1 ? *to + sum : sum;
}

KERNEL(spread, SpreadArgs, 256)
KERNEL(row_sums, RowSumsArgs, 256)
