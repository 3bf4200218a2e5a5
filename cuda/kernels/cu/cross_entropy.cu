// Softmax and negative log-likelihood over the rows of logits [rows, classes].
//
// Forward: each row's largest logit, Σ e^(x − largest) and its target's logit. Then the sum of the rows' losses, in f64, in an order
// that depends on their number alone. Backward: softmax times a factor, less the factor at the target, in place if one likes.
#include "math.cuh"

struct CrossEntropyArgs {
    uint64_t logits;
    // u32 of [rows], below classes.
    uint64_t targets;
    // Three floats a row: written by the forward, read by the backward.
    uint64_t statistics;
    // Gradient of the logits; backward only. May be where the logits are.
    uint64_t out;
    uint64_t classes;
    // What a row's gradient is multiplied by: upstream gradient over rows.
    float factor;
    uint32_t unused;
};

template <class T> DEVICE void cross_entropy(const CrossEntropyArgs& a) {
    DYNAMIC_SHARED(float, room);
    const T* x = as<T>(a.logits) + uint64_t(blockIdx.x) * a.classes;
    float largest = -INFINITY;
    for (uint64_t i = threadIdx.x; i < a.classes; i += blockDim.x) largest = Max::of(largest, load(x[i]));
    largest = over_block<Max>(largest, room);
    float sum = 0.0f;
    for (uint64_t i = threadIdx.x; i < a.classes; i += blockDim.x) sum += exponential(load(x[i]) - largest);
    sum = over_block<Add>(sum, room);
    if (threadIdx.x == 0) {
        float* statistics = as_mut<float>(a.statistics) + 3 * uint64_t(blockIdx.x);
        statistics[0] = largest;
        statistics[1] = sum;
        statistics[2] = load(x[as<uint32_t>(a.targets)[blockIdx.x]]);
    }
}

template <class T> DEVICE void cross_entropy_backward(const CrossEntropyArgs& a) {
    uint64_t start = uint64_t(blockIdx.x) * a.classes;
    const float* statistics = as<float>(a.statistics) + 3 * uint64_t(blockIdx.x);
    float largest = statistics[0], factor = a.factor / statistics[1];
    uint64_t target = as<uint32_t>(a.targets)[blockIdx.x];
    for (uint64_t i = threadIdx.x; i < a.classes; i += blockDim.x) {
        float p = factor * exponential(load(as<T>(a.logits)[start + i]) - largest);
        // As the CPU has it, so that what comes next multiplies no subnormal numbers there.
        p = fabsf(p) < 1e-30f ? 0.0f : p;
        store(as_mut<T>(a.out)[start + i], i == target ? p - a.factor : p);
    }
}

// The losses of rows: their sum, to one f64.
struct LossSumArgs {
    uint64_t statistics, sum;
    uint64_t rows;
    // Adds to what is there, or writes.
    uint64_t add;
};

ENTRY(loss_sum, LossSumArgs, 256) {
    DYNAMIC_SHARED(double, sums);
    double own = 0.0;
    for (uint64_t row = threadIdx.x; row < a.rows; row += blockDim.x) {
        const float* of = as<float>(a.statistics) + 3 * row;
        own += log(double(of[1])) + (double(of[0]) - double(of[2]));
    }
    sums[threadIdx.x] = own;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) {
        double& sum = *as_mut<double>(a.sum);
        sum = a.add ? sum + sums[0] : sums[0];
    }
}

KERNEL(cross_entropy, CrossEntropyArgs, 512)
KERNEL(cross_entropy_backward, CrossEntropyArgs, 512)
