// libcublasLt.so.13 on the mock driver: column-major matrix products with an epilogue, as cuBLASLt defines them.
//
// It supports the epilogues that we use: a bias, a bias and GELU with its operand, and GELU's derivative. It rejects
// what the documentation forbids: wrong sizes, types, leading dimensions or alignment, an algorithm chosen for another
// product, a workspace that is too small.
#include <math.h>

#include "products.h"

enum { COMPUTE_32F = 68, ALIGNMENT = 16, OF_A_HANDLE = 0x17ab1a5 };
enum { EPILOGUE_DEFAULT = 1, BIAS = 4, GELU_AUX_BIAS = 164, DGELU = 192 };

typedef struct { int magic; } Handle;
int cublasLtCreate(Handle **handle) {
    *handle = NULL;
    if (!mock_current()) return NOT_INITIALIZED;
    *handle = malloc(sizeof **handle);
    (*handle)->magic = OF_A_HANDLE;
    return 0;
}
int cublasLtDestroy(Handle *handle) { free(handle); return 0; }

typedef struct { int type; uint64_t rows, columns; int64_t step; } Layout;
int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t columns, int64_t step) {
    *layout = malloc(sizeof **layout);
    **layout = (Layout){type, rows, columns, step};
    return 0;
}
int cublasLtMatrixLayoutDestroy(Layout *layout) { free(layout); return 0; }

typedef struct { int compute, scale, turned[2]; unsigned epilogue; const void *bias; void *aux; int64_t aux_step; } Description;
int cublasLtMatmulDescCreate(Description **description, int compute, int scale) {
    *description = calloc(1, sizeof **description);
    (*description)->compute = compute;
    (*description)->scale = scale;
    (*description)->epilogue = EPILOGUE_DEFAULT;
    return 0;
}
int cublasLtMatmulDescDestroy(Description *description) { free(description); return 0; }
static int put(void *to, size_t wanted, const void *from, size_t bytes) {
    if (!to || bytes != wanted) return INVALID_VALUE;
    memcpy(to, from, bytes);
    return 0;
}
int cublasLtMatmulDescSetAttribute(Description *of, int attribute, const void *from, size_t bytes) {
    switch (attribute) {
        case 3: return put(&of->turned[0], sizeof of->turned[0], from, bytes);
        case 4: return put(&of->turned[1], sizeof of->turned[1], from, bytes);
        case 7: return put(&of->epilogue, sizeof of->epilogue, from, bytes);
        case 8: return put(&of->bias, sizeof of->bias, from, bytes);
        case 11: return put(&of->aux, sizeof of->aux, from, bytes);
        case 12: return put(&of->aux_step, sizeof of->aux_step, from, bytes);
        default: return INVALID_VALUE;
    }
}

typedef struct { uint64_t workspace; uint32_t reductions, alignment[4]; } Preference;
int cublasLtMatmulPreferenceCreate(Preference **preference) {
    *preference = malloc(sizeof **preference);
    **preference = (Preference){0, 7, {256, 256, 256, 256}};
    return 0;
}
int cublasLtMatmulPreferenceDestroy(Preference *preference) { free(preference); return 0; }
int cublasLtMatmulPreferenceSetAttribute(Preference *of, int attribute, const void *from, size_t bytes) {
    switch (attribute) {
        case 1: return put(&of->workspace, sizeof of->workspace, from, bytes);
        case 3: return put(&of->reductions, sizeof of->reductions, from, bytes);
        case 5: case 6: case 7: case 8: return put(&of->alignment[attribute - 5], sizeof(uint32_t), from, bytes);
        default: return INVALID_VALUE;
    }
}

// The product of a description and its matrices; c is the output. Unsupported products return the real library's code.
static int product_of(Product *of, const Description *by, const Layout *a, const Layout *b, const Layout *c, const Layout *d) {
    const Layout *both[2] = {a, b};
    uint64_t rows[2], columns[2];
    for (int i = 0; i < 2; i++) {
        if (by->turned[i] < 0 || by->turned[i] > 1) return INVALID_VALUE;
        rows[i] = by->turned[i] ? both[i]->columns : both[i]->rows;
        columns[i] = by->turned[i] ? both[i]->rows : both[i]->columns;
        Matrix *to = i ? &of->b : &of->a;
        *to = (Matrix){NULL, both[i]->type, by->turned[i] ? both[i]->step : 1, by->turned[i] ? 1 : both[i]->step, 0};
    }
    of->m = d->rows, of->n = d->columns, of->k = columns[0];
    of->c = (Matrix){NULL, d->type, 1, d->step, 0};
    if (rows[0] != d->rows || columns[1] != d->columns || columns[0] != rows[1] || memcmp(c, d, sizeof *c)) return INVALID_VALUE;
    if (by->compute != COMPUTE_32F || by->scale != R32F || a->type == R64F) return NOT_SUPPORTED;
    // Both operands have one type; the result has the same type or, for 16-bit operands, may be f32.
    if (a->type != b->type || (d->type != a->type && d->type != R32F)) return NOT_SUPPORTED;
    const Layout *all[3] = {a, b, d};
    for (int i = 0; i < 3; i++) {
        if (all[i]->step < (int64_t)all[i]->rows) return INVALID_VALUE;
        if (all[i]->type != R32F && all[i]->type != R16F && all[i]->type != R16BF) return NOT_SUPPORTED;
        // Products with an epilogue run on tensor cores, which need this alignment.
        if (by->epilogue != EPILOGUE_DEFAULT && all[i]->step * width(all[i]->type) % ALIGNMENT) return NOT_SUPPORTED;
    }
    int with_bias = by->epilogue == BIAS || by->epilogue == GELU_AUX_BIAS, with_aux = by->epilogue == GELU_AUX_BIAS || by->epilogue == DGELU;
    if (!with_bias && !with_aux && by->epilogue != EPILOGUE_DEFAULT) return NOT_SUPPORTED;
    if (with_bias && (!by->bias || (uintptr_t)by->bias % ALIGNMENT)) return INVALID_VALUE;
    if (with_aux && (!by->aux || (uintptr_t)by->aux % ALIGNMENT || by->aux_step < of->m || by->aux_step % 8)) return INVALID_VALUE;
    return 0;
}

// The product that an algorithm is for. It alone determines the size of the workspace.
typedef struct { uint64_t workspace, m, n, k; unsigned epilogue; int types[2], turned[2]; } Way;
typedef struct { uint64_t data[8]; } Algorithm;
_Static_assert(sizeof(Way) <= sizeof(Algorithm), "an algorithm has room");
int mock_workspace; // workspace bytes of every algorithm, if a test sets it
static Way way_of(const Product *of, const Description *by) {
    Way way;
    memset(&way, 0, sizeof way);
    way.workspace = mock_workspace ? mock_workspace : of->k > 64 ? 4096 : 0;
    way.m = of->m, way.n = of->n, way.k = of->k, way.epilogue = by->epilogue;
    way.types[0] = of->a.type, way.types[1] = of->c.type, way.turned[0] = by->turned[0], way.turned[1] = by->turned[1];
    return way;
}
typedef struct { Algorithm algorithm; size_t workspace; int status; float waves; int reserved[4]; } Heuristic;
int cublasLtMatmulAlgoGetHeuristic(Handle *handle, const Description *by, const Layout *a, const Layout *b, const Layout *c, const Layout *d,
    const Preference *preference, int wanted, Heuristic *results, int *found) {
    *found = 0;
    if (!handle || handle->magic != OF_A_HANDLE || wanted < 1) return INVALID_VALUE;
    Product of = {0};
    int code = product_of(&of, by, a, b, c, d);
    if (code) return code;
    // Reductions that round to the result's type in between, and reductions in place, are less exact.
    if (preference->reductions & ~2u) return NOT_SUPPORTED;
    for (int i = 0; i < 4; i++) if (preference->alignment[i] < ALIGNMENT) return NOT_SUPPORTED;
    Way way = way_of(&of, by);
    if (way.workspace > preference->workspace) return NOT_SUPPORTED;
    memset(results, 0, sizeof *results);
    memcpy(&results->algorithm, &way, sizeof way);
    results->workspace = way.workspace;
    results->waves = 1;
    *found = 1;
    return 0;
}

typedef struct { Product product; Description by; char *c, *d, *workspace; size_t workspace_bytes; } Job;
static float gelu(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
static float slope_of_gelu(float x) {
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}
static void multiply_with_epilogue(void *argument) {
    Job *job = argument;
    Product *of = &job->product;
    const Description *by = &job->by;
    Matrix to = of->c;
    float *sums = malloc(sizeof(float) * of->m * of->n + 1);
    double beta = of->beta;
    count_bytes(of);
    long aux = (long)of->m * of->n * width(to.type);
    if (by->epilogue == BIAS || by->epilogue == GELU_AUX_BIAS) mock_count(&mock_product_bytes_read, (long)of->m * width(to.type));
    if (by->epilogue == GELU_AUX_BIAS) mock_count(&mock_product_bytes_written, aux);
    if (by->epilogue == DGELU) mock_count(&mock_product_bytes_read, aux);
    of->c = (Matrix){NULL, R32F, 1, of->m, 0};
    of->beta = 0;
    memset(job->workspace, 0x5A, job->workspace_bytes);
    product_f32(of, of->a.start, of->b.start, (char *)sums);
    // The result is rounded once, after the epilogue.
    for (int column = 0; column < of->n; column++) {
        for (int row = 0; row < of->m; row++) {
            size_t at = place(&to, row, column), at_aux = row + column * (size_t)by->aux_step;
            float value = sums[row + column * (size_t)of->m];
            if (beta != 0) value += (float)beta * read_f32(job->c, to.type, at);
            if (by->epilogue == BIAS || by->epilogue == GELU_AUX_BIAS) value += read_f32(by->bias, to.type, row);
            if (by->epilogue == GELU_AUX_BIAS) write_f32(by->aux, to.type, at_aux, value), value = gelu(value);
            if (by->epilogue == DGELU) value *= slope_of_gelu(read_f32(by->aux, to.type, at_aux));
            write_f32(job->d, to.type, at, value);
        }
    }
    free(sums);
    free(job);
}
int cublasLtMatmul(Handle *handle, const Description *by, const float *alpha, const void *a, const Layout *of_a, const void *b,
    const Layout *of_b, const float *beta, const void *c, const Layout *of_c, void *d, const Layout *of_d, const Algorithm *algorithm,
    void *workspace, size_t workspace_bytes, Stream *stream) {
    if (!handle || handle->magic != OF_A_HANDLE || !a || !b || !c || !d || !algorithm) return INVALID_VALUE;
    Product of = {.batches = 1, .alpha = *alpha, .beta = *beta};
    int code = product_of(&of, by, of_a, of_b, of_c, of_d);
    if (code) return code;
    Way way = way_of(&of, by);
    if (memcmp(algorithm, &way, sizeof way) || workspace_bytes < way.workspace) return INVALID_VALUE;
    if (way.workspace && (!workspace || (uintptr_t)workspace % ALIGNMENT)) return INVALID_VALUE;
    if (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) % ALIGNMENT) return INVALID_VALUE;
    mock_count(&mock_lt_products, 1);
    const void *used[] = {a, b, c, d, workspace, by->bias, by->aux};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) mock_use(stream, used[i]);
    of.a.start = (char *)a, of.b.start = (char *)b;
    Job *job = malloc(sizeof *job);
    *job = (Job){of, *by, (char *)c, d, workspace, way.workspace};
    mock_enqueue(stream, multiply_with_epilogue, job);
    return 0;
}
