// Layer norm and RMS norm over the rows of [rows, size], forward and backward.
//
// A block takes a row. Gradients of weights are sums over rows: rows by 64 are added in order, then those partial sums in order, so
// the bits depend on nothing but the rows.
#include "device.cuh"

struct NormArgs {
    // x; and, if it is not 0, a branch that is added to it first, the sum going to `total`.
    uint64_t x, branch, total;
    uint64_t weight, bias;
    // y forward, the gradient of x backward.
    uint64_t out;
    // Gradient of y; backward only.
    uint64_t d;
    // Two floats a row, mean and 1/√(variance + ε) (0 and 1/√(mean square + ε)): written by the backward for norm_weights.
    uint64_t statistics;
    uint64_t size;
    float eps;
    uint32_t unused;
};

struct Moments { float mean, scale; };

// What `value(i)` gives for the elements of a row, the variance in a second pass over the differences.
template <bool CENTRED, class F> DEVICE Moments moments(uint64_t size, float eps, float* room, F value) {
    float mean = 0.0f;
    if (CENTRED) {
        for (uint64_t i = threadIdx.x; i < size; i += blockDim.x) mean += value(i);
        mean = over_block<Add>(mean, room) / float(size);
    }
    float squares = 0.0f;
    for (uint64_t i = threadIdx.x; i < size; i += blockDim.x) {
        float x = value(i) - mean;
        squares = fmaf(x, x, squares);
    }
    squares = over_block<Add>(squares, room) / float(size);
    return Moments{mean, 1.0f / sqrtf(squares + eps)};
}

template <bool CENTRED, class T> DEVICE void forward(const NormArgs& a) {
    DYNAMIC_SHARED(float, room);
    uint64_t start = uint64_t(blockIdx.x) * a.size;
    const T* x = as<T>(a.x) + start;
    if (a.branch) {
        T* total = as_mut<T>(a.total) + start;
        const T* branch = as<T>(a.branch) + start;
        for (uint64_t i = threadIdx.x; i < a.size; i += blockDim.x) store(total[i], load(x[i]) + load(branch[i]));
        // Each thread reads below what it wrote here.
        x = total;
    }
    Moments m = moments<CENTRED>(a.size, a.eps, room, [&](uint64_t i) { return load(x[i]); });
    const T* weight = as<T>(a.weight);
    T* y = as_mut<T>(a.out) + start;
    for (uint64_t i = threadIdx.x; i < a.size; i += blockDim.x) {
        float normal = (load(x[i]) - m.mean) * m.scale, w = load(weight[i]);
        store(y[i], CENTRED ? fmaf(normal, w, load(as<T>(a.bias)[i])) : normal * w);
    }
}

// dx = (g − mean(g) − x̂·mean(g·x̂))·scale with g = dy·weight; without mean(g) for RMS norm.
template <bool CENTRED, class T> DEVICE void backward(const NormArgs& a) {
    DYNAMIC_SHARED(float, room);
    uint64_t start = uint64_t(blockIdx.x) * a.size;
    const T* x = as<T>(a.x) + start;
    const T* d = as<T>(a.d) + start;
    const T* weight = as<T>(a.weight);
    Moments m = moments<CENTRED>(a.size, a.eps, room, [&](uint64_t i) { return load(x[i]); });
    float mean_g = 0.0f, mean_gx = 0.0f;
    for (uint64_t i = threadIdx.x; i < a.size; i += blockDim.x) {
        float g = load(d[i]) * load(weight[i]);
        mean_g += g;
        mean_gx = fmaf(g, (load(x[i]) - m.mean) * m.scale, mean_gx);
    }
    mean_g = CENTRED ? over_block<Add>(mean_g, room) / float(a.size) : 0.0f;
    mean_gx = over_block<Add>(mean_gx, room) / float(a.size);
    T* dx = as_mut<T>(a.out) + start;
    for (uint64_t i = threadIdx.x; i < a.size; i += blockDim.x) {
        float normal = (load(x[i]) - m.mean) * m.scale;
        store(dx[i], m.scale * fmaf(normal, -mean_gx, load(d[i]) * load(weight[i]) - mean_g));
    }
    if (threadIdx.x == 0) {
        float* statistics = as_mut<float>(a.statistics) + 2 * uint64_t(blockIdx.x);
        statistics[0] = m.mean;
        statistics[1] = m.scale;
    }
}

template <class T> DEVICE void layer_norm(const NormArgs& a) { forward<true, T>(a); }
template <class T> DEVICE void layer_norm_backward(const NormArgs& a) { backward<true, T>(a); }
template <class T> DEVICE void rms_norm(const NormArgs& a) { forward<false, T>(a); }
template <class T> DEVICE void rms_norm_backward(const NormArgs& a) { backward<false, T>(a); }

// Rows whose contributions to the gradients of the weights are one partial sum.
constexpr uint64_t BLOCK = 64;

// Σ dy·x̂ and Σ dy over some rows: partials of [blocks of rows, 2, size]. A thread takes a column, blockIdx.y the rows. x must not have
// been overwritten by its gradient.
struct NormWeightsArgs {
    uint64_t x, d, statistics, partials;
    uint64_t rows, size;
};

template <class T> DEVICE void norm_weights(const NormWeightsArgs& a) {
    uint64_t column = global_thread();
    if (column >= a.size) return;
    uint64_t first = blockIdx.y * BLOCK, end = first + BLOCK < a.rows ? first + BLOCK : a.rows;
    const float* statistics = as<float>(a.statistics);
    float d_weight = 0.0f, d_bias = 0.0f;
    for (uint64_t row = first; row < end; row++) {
        float d = load(as<T>(a.d)[row * a.size + column]), x = load(as<T>(a.x)[row * a.size + column]);
        d_weight = fmaf(d, (x - statistics[2 * row]) * statistics[2 * row + 1], d_weight);
        d_bias += d;
    }
    float* partials = as_mut<float>(a.partials) + 2 * uint64_t(blockIdx.y) * a.size;
    partials[column] = d_weight;
    partials[a.size + column] = d_bias;
}

// The partial sums in order, to the weight's gradient and, if it is not 0, the bias's, both f32; onto what is there, or instead of it.
struct NormSumsArgs {
    uint64_t partials, d_weight, d_bias;
    uint64_t blocks, size;
    uint64_t add;
};

ENTRY(norm_sums, NormSumsArgs, 256) {
    uint64_t column = global_thread();
    if (column >= 2 * a.size) return;
    uint64_t to = column < a.size ? a.d_weight : a.d_bias;
    if (!to) return;
    float sum = 0.0f;
    for (uint64_t block = 0; block < a.blocks; block++) sum += as<float>(a.partials)[block * 2 * a.size + column];
    float& total = as_mut<float>(to)[column % a.size];
    total = a.add ? total + sum : sum;
}

KERNEL(layer_norm, NormArgs, 256)
KERNEL(layer_norm_backward, NormArgs, 256)
KERNEL(rms_norm, NormArgs, 256)
KERNEL(rms_norm_backward, NormArgs, 256)
KERNEL(norm_weights, NormWeightsArgs, 256)
