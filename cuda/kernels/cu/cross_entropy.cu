// Softmax and negative log-likelihood over the rows of logits [rows, classes].
//
// Forward: each row's largest logit, Σ e^(x − largest) and its target's logit. Then the mean of the rows' losses, summed in f64 in an
// order that depends on their number alone. Backward: softmax times a factor, less the factor at the target, in place if one likes. A
// target that is no class makes the loss and the gradient of its row NaN.
#include "fault.cuh"
#include "math.cuh"

struct CrossEntropyArgs {
    uint64_t logits;
    // u32 of [rows].
    uint64_t targets;
    // Three floats a row: written by the forward, read by the backward.
    uint64_t statistics;
    // Gradient of the logits; backward only. May be where the logits are. Its rows begin as many bytes apart.
    uint64_t out;
    uint64_t classes;
    // Logits from the beginning of one row to that of the next.
    uint64_t stride;
    // Where the gradient of the mean is, one float; 0 if it is `gradient`.
    uint64_t upstream;
    float gradient;
    // That the mean is over.
    float rows;
};

template <class T> DEVICE const T* row_of(const CrossEntropyArgs& a) { return as<T>(a.logits) + blockIdx.x * a.stride; }

template <class T> DEVICE void cross_entropy(const CrossEntropyArgs& a) {
    DYNAMIC_SHARED(float, room);
    const T* x = row_of<T>(a);
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
        uint64_t target = as<uint32_t>(a.targets)[blockIdx.x];
        statistics[2] = target < a.classes ? load(x[target]) : NAN;
    }
}

// From logits of one type to a gradient of another, of at most its size. A thread's gradient may lie on a logit that another thread reads
// in the same turn or has read before, and on none that is read later.
template <class From, class To> DEVICE void gradient(const CrossEntropyArgs& a) {
    const float* statistics = as<float>(a.statistics) + 3 * uint64_t(blockIdx.x);
    uint64_t target = as<uint32_t>(a.targets)[blockIdx.x];
    float factor = (a.upstream ? *as<float>(a.upstream) : a.gradient) / a.rows;
    if (target >= a.classes) factor = NAN;
    float largest = statistics[0], scaled = factor / statistics[1];
    const From* x = row_of<From>(a);
    To* out = as_mut<To>(a.out + blockIdx.x * a.stride * sizeof(From));
    for (uint64_t start = 0; start < a.classes; start += blockDim.x) {
        uint64_t i = start + threadIdx.x;
        float p = i < a.classes ? scaled * exponential(load(x[i]) - largest) : 0.0f;
        if (sizeof(To) < sizeof(From)) __syncthreads();
        // As the CPU has it, so that what comes next multiplies no subnormal numbers there.
        p = fabsf(p) < 1e-30f ? 0.0f : p;
        if (i < a.classes) store(out[i], i == target ? p - factor : p);
    }
}

template <class T> DEVICE void cross_entropy_backward(const CrossEntropyArgs& a) { gradient<T, T>(a); }
// Of f32 logits.
template <class T> DEVICE void cross_entropy_backward_to(const CrossEntropyArgs& a) { gradient<float, T>(a); }

// The mean of the losses of rows, one float.
struct MeanLossArgs {
    uint64_t statistics, loss;
    uint64_t rows;
};

ENTRY(mean_loss, MeanLossArgs, 256) {
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
    if (threadIdx.x == 0) *as_mut<float>(a.loss) = float(sums[0] / double(a.rows));
}

// Gradients that were made for one gradient of the loss, for the one that it has.
struct RescaleArgs {
    uint64_t x, y;
    // Where the loss's gradient is, one float.
    uint64_t upstream;
    uint64_t count;
    // That x was made for.
    float gradient;
    // Onto what is there, or instead of it.
    uint32_t add;
};

template <class T> DEVICE void rescale(const RescaleArgs& a) {
    float upstream = *as<float>(a.upstream);
    float scale = upstream == a.gradient ? 1.0f : upstream / a.gradient;
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        T& y = as_mut<T>(a.y)[i];
        float x = load(as<T>(a.x)[i]) * scale;
        store(y, a.add ? load(y) + x : x);
    }
}

// That the loss has the gradient that was foreseen, where what was made for that is used up.
struct ForeseenArgs {
    uint64_t upstream;
    // A Fault: of `what`, with the bits of both.
    uint64_t fault, what;
    float gradient;
    uint32_t unused;
};

ENTRY(foreseen, ForeseenArgs, 32) {
    float upstream = *as<float>(a.upstream);
    if (threadIdx.x == 0 && !(upstream == a.gradient)) {
        report(a.fault, a.what, to_bits(upstream), to_bits(a.gradient), 0);
    }
}

KERNEL(cross_entropy, CrossEntropyArgs, 512)
KERNEL(cross_entropy_backward, CrossEntropyArgs, 512)
KERNEL(cross_entropy_backward_to, CrossEntropyArgs, 512)
KERNEL(rescale, RescaleArgs, 256)
