// Column-major matrix products on host memory, shared by the mocks of cuBLAS and cuBLASLt.
//
// Sums are in f32 (in f64 for f64), in the order of k. The real libraries use another order, and TF32 or f16 internally
// on request.
#pragma once
#include "mock.h"

enum { NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R32F = 0, R64F = 1, R16F = 2, R16BF = 14 };

// Conversions between the bits of a float and the two 16-bit types, rounded to nearest, ties to even.
static float of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static float of_bfloat16(uint16_t bits) { return of_bits((uint32_t)bits << 16); }
static uint16_t to_bfloat16(float x) {
    uint32_t bits = to_bits(x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float of_half(uint16_t half) {
    uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (!exponent) return of_bits(sign | to_bits(fraction * 0x1p-24f));
    return of_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}
static uint16_t to_half(float x) {
    uint32_t bits = to_bits(x) & 0x7fffffff, sign = to_bits(x) >> 16 & 0x8000;
    if (bits > 0x7f800000) return 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00;
    // Floats next to 1/2 have the same unit in the last place as f16's subnormals.
    if (bits < 0x38800000) return sign | (to_bits(of_bits(bits) + 0.5f) - to_bits(0.5f));
    return sign | (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
}

// An element is `row_step` elements from the next in its column and `column_step` from the next in its row.
typedef struct { char *start; int type; size_t row_step, column_step; long long batch_step; } Matrix;
typedef struct { Matrix a, b, c; int m, n, k, batches, in_f64; double alpha, beta; const void *alpha_at, *beta_at; } Product;
static size_t place(const Matrix *matrix, size_t row, size_t column) {
    return row * matrix->row_step + column * matrix->column_step;
}

enum { ROWS = 64, COLUMNS = 4 }; // of a tile
#if defined(__x86_64__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define REAL float
#define SUFFIXED(NAME) NAME##_f32
#include "gemm.h"
#undef REAL
#undef SUFFIXED
#define REAL double
#define SUFFIXED(NAME) NAME##_f64
#include "gemm.h"

static int width(int type) { return type == R32F ? 4 : type == R64F ? 8 : 2; }
// Counts the operands and the result, each once.
static void count_bytes(const Product *of) {
    long a = (long)of->m * of->k * width(of->a.type), b = (long)of->k * of->n * width(of->b.type);
    long c = (long)of->m * of->n * width(of->c.type);
    mock_count(&mock_product_bytes_read, of->batches * (a + b + (of->beta != 0 ? c : 0)));
    mock_count(&mock_product_bytes_written, of->batches * c);
}
