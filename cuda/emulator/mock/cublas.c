// libcublas.so.13 on the mock driver: column-major matrix products on the handle's stream, as cuBLAS defines them.
#include "products.h"

enum { COMPUTE_16F = 64, COMPUTE_16F_PEDANTIC = 65, COMPUTE_64F = 70, COMPUTE_64F_PEDANTIC = 71 };

static char *of_batch(const Matrix *matrix, long long batch) {
    return matrix->start + batch * matrix->batch_step * width(matrix->type);
}
static double scalar(const void *from, const Product *of) { return of->in_f64 ? *(const double *)from : *(const float *)from; }
static void multiply(void *argument) {
    Product *of = argument;
    if (of->alpha_at) of->alpha = scalar(of->alpha_at, of), of->beta = scalar(of->beta_at, of);
    count_bytes(of);
    for (int batch = 0; batch < of->batches; batch++) {
        char *a = of_batch(&of->a, batch), *b = of_batch(&of->b, batch), *c = of_batch(&of->c, batch);
        of->in_f64 ? product_f64(of, a, b, c) : product_f32(of, a, b, c);
    }
    free(of);
}

typedef struct { Stream *stream; int pointer_mode, math_mode; } Handle;
int cublasCreate_v2(Handle **handle) {
    *handle = NULL;
    if (!mock_current()) return NOT_INITIALIZED;
    *handle = calloc(1, sizeof **handle);
    return 0;
}
int cublasDestroy_v2(Handle *handle) { free(handle); return 0; }
int cublasSetStream_v2(Handle *handle, Stream *stream) { handle->stream = stream; return 0; }
int cublasGetStream_v2(Handle *handle, Stream **stream) { *stream = handle->stream; return 0; }
int cublasSetWorkspace_v2(Handle *handle, void *start, size_t bytes) { (void)handle, (void)start, (void)bytes; return 0; }
int cublasSetMathMode(Handle *handle, int mode) { handle->math_mode = mode; return 0; }
int cublasGetMathMode(Handle *handle, int *mode) { *mode = handle->math_mode; return 0; }
int cublasSetPointerMode_v2(Handle *handle, int mode) { handle->pointer_mode = mode; return 0; }
int cublasGetPointerMode_v2(Handle *handle, int *mode) { *mode = handle->pointer_mode; return 0; }

static int is_type(int type) { return type == R32F || type == R64F || type == R16F || type == R16BF; }
// Describes an operand, transposed or not.
static int set(Matrix *matrix, const void *start, int type, int turned, int rows, int step, long long batch_step) {
    if (turned < 0 || turned > 2 || step < (rows > 1 ? rows : 1)) return INVALID_VALUE;
    *matrix = (Matrix){(char *)start, type, turned ? step : 1, turned ? 1 : step, batch_step};
    return is_type(type) ? 0 : NOT_SUPPORTED;
}
int cublasGemmStridedBatchedEx(Handle *handle, int turn_a, int turn_b, int m, int n, int k, const void *alpha, const void *a, int type_a,
    int step_a, long long batch_a, const void *b, int type_b, int step_b, long long batch_b, const void *beta, void *c, int type_c,
    int step_c, long long batch_c, int batches, int compute, int algorithm) {
    (void)algorithm;
    if (!handle || m < 0 || n < 0 || k < 0 || batches < 0) return INVALID_VALUE;
    Product of = {.m = m, .n = n, .k = k, .batches = batches};
    int code = set(&of.a, a, type_a, turn_a, turn_a ? k : m, step_a, batch_a);
    if (!code) code = set(&of.b, b, type_b, turn_b, turn_b ? n : k, step_b, batch_b);
    if (!code) code = set(&of.c, c, type_c, 0, m, step_c, batch_c);
    if (code) return code;
    of.in_f64 = compute == COMPUTE_64F || compute == COMPUTE_64F_PEDANTIC;
    // Both operands have one type; the result has the same type or, for 16-bit operands, may be f32.
    int fits = type_a == type_b && (type_c == type_a || (type_c == R32F && width(type_a) == 2));
    if (!fits || of.in_f64 != (type_a == R64F)) return NOT_SUPPORTED;
    if (compute == COMPUTE_16F || compute == COMPUTE_16F_PEDANTIC) {
        if (handle->pointer_mode || type_a != R16F || type_c != R16F) return NOT_SUPPORTED;
        of.alpha = of_half(*(const uint16_t *)alpha);
        of.beta = of_half(*(const uint16_t *)beta);
    } else if (handle->pointer_mode) {
        of.alpha_at = alpha;
        of.beta_at = beta;
    } else {
        of.alpha = scalar(alpha, &of);
        of.beta = scalar(beta, &of);
    }
    mock_count(&mock_products, 1);
    const void *used[] = {a, b, c, of.alpha_at, of.beta_at};
    for (int i = 0; i < 5; i++) mock_use(handle->stream, used[i]);
    Product *job = malloc(sizeof *job);
    *job = of;
    mock_enqueue(handle->stream, multiply, job);
    return 0;
}
int cublasGemmEx(Handle *handle, int turn_a, int turn_b, int m, int n, int k, const void *alpha, const void *a, int type_a, int step_a,
    const void *b, int type_b, int step_b, const void *beta, void *c, int type_c, int step_c, int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(handle, turn_a, turn_b, m, n, k, alpha, a, type_a, step_a, 0, b, type_b, step_b, 0, beta, c,
        type_c, step_c, 0, 1, compute, algorithm);
}
#define OF_ONE_TYPE(LETTER, TYPE, ID, COMPUTE) \
    int cublas##LETTER##gemmStridedBatched(Handle *handle, int turn_a, int turn_b, int m, int n, int k, const TYPE *alpha, \
        const TYPE *a, int step_a, long long batch_a, const TYPE *b, int step_b, long long batch_b, const TYPE *beta, TYPE *c, \
        int step_c, long long batch_c, int batches) { \
        return cublasGemmStridedBatchedEx(handle, turn_a, turn_b, m, n, k, alpha, a, ID, step_a, batch_a, b, ID, step_b, batch_b, \
            beta, c, ID, step_c, batch_c, batches, COMPUTE, 0); \
    } \
    int cublas##LETTER##gemm_v2(Handle *handle, int turn_a, int turn_b, int m, int n, int k, const TYPE *alpha, const TYPE *a, \
        int step_a, const TYPE *b, int step_b, const TYPE *beta, TYPE *c, int step_c) { \
        return cublas##LETTER##gemmStridedBatched( \
            handle, turn_a, turn_b, m, n, k, alpha, a, step_a, 0, b, step_b, 0, beta, c, step_c, 0, 1); \
    }
OF_ONE_TYPE(S, float, R32F, 68)
OF_ONE_TYPE(D, double, R64F, COMPUTE_64F)
