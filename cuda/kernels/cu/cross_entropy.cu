// Softmax and negative log-likelihood over the rows of logits [rows, classes].
//
// Forward, in one pass: each row's largest logit, Σ e^(x − largest) and its target's logit. Then the mean of the rows' losses, summed in f64 in an
// order that depends on their number alone. Backward: softmax times a factor, less the factor at the target, in place if one likes. A
// target that is no class makes the loss and the gradient of its row NaN.
#include "fault.cuh"
#include "math.cuh"
#include "pack.cuh"

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

// Packs of a row that a thread has on their way at a time.
template <class T> constexpr unsigned TURN = 16 / Pack<T>::COUNT;

// The largest of some numbers, and Σ e^(x − largest); of none, or of −∞ alone, −∞ and 0.
struct Softmax {
    float largest, sum;

    // As if it had been known from the beginning that there is a larger one.
    DEVICE void raise(float to) {
        if (to > largest) sum *= exponential(largest - to), largest = to;
    }
};

// A turn of a thread: packs from `first` on, `step` apart, all of them there if it is WHOLE.
template <bool WHOLE, bool PACKED, class T>
DEVICE void take(Softmax& all, const T* x, uint64_t first, uint64_t step, uint64_t size) {
    constexpr unsigned N = Pack<T>::COUNT;
    Pack<T> packs[TURN<T>];
    UNROLL
    for (unsigned k = 0; k < TURN<T>; k++) {
        uint64_t at = first + k * step;
        if (PACKED && (WHOLE || at + N <= size)) packs[k] = load_pack<N>(x + at);
        else if (at < size) packs[k] = load_pack<false>(x + at, size - at);
    }
    auto each_of = [&](auto f) {
        UNROLL
        for (unsigned k = 0; k < TURN<T>; k++) {
            UNROLL
            for (unsigned i = 0; i < N; i++) {
                if (WHOLE || first + k * step + i < size) f(packs[k][i]);
            }
        }
    };
    float largest = all.largest;
    each_of([&](float x) { largest = Max::of(largest, x); });
    all.raise(largest);
    float from = all.largest == -INFINITY ? 0.0f : all.largest;
    each_of([&](float x) { all.sum += exponential(x - from); });
}

// A thread's part of a row, packs that are a block apart from each other, in one pass.
template <bool PACKED, class T> DEVICE Softmax softmax(const T* x, uint64_t size) {
    constexpr unsigned N = Pack<T>::COUNT;
    Softmax all = {-INFINITY, 0.0f};
    uint64_t first = uint64_t(threadIdx.x) * N, step = uint64_t(blockDim.x) * N;
    for (; first + (TURN<T> - 1) * step + N <= size; first += TURN<T> * step) take<true, PACKED>(all, x, first, step, size);
    if (first < size) take<false, PACKED>(all, x, first, step, size);
    return all;
}

template <class T> DEVICE void cross_entropy(const CrossEntropyArgs& a) {
    DYNAMIC_SHARED(float, room);
    const T* x = row_of<T>(a);
    Softmax own = in_packs(x) ? softmax<true>(x, a.classes) : softmax<false>(x, a.classes);
    float largest = over_block<Max>(own.largest, room);
    own.raise(largest);
    float sum = over_block<Add>(own.sum, room);
    if (threadIdx.x == 0) {
        float* statistics = as_mut<float>(a.statistics) + 3 * uint64_t(blockIdx.x);
        statistics[0] = largest;
        statistics[1] = sum;
        uint64_t target = as<uint32_t>(a.targets)[blockIdx.x];
        statistics[2] = target < a.classes ? load(x[target]) : NAN;
    }
}

// From logits of one type to a gradient of another, of at most its size, sixteen bytes of the gradient a thread and turn. A thread's gradient
// may lie on a logit that another thread reads in the same turn or has read before, and on none that is read later.
template <bool PACKED, class From, class To> DEVICE void row_gradient(const CrossEntropyArgs& a, const From* x, To* out) {
    constexpr unsigned N = Pack<To>::COUNT;
    const float* statistics = as<float>(a.statistics) + 3 * uint64_t(blockIdx.x);
    uint64_t target = as<uint32_t>(a.targets)[blockIdx.x];
    float factor = (a.upstream ? *as<float>(a.upstream) : a.gradient) / a.rows;
    if (target >= a.classes) factor = NAN;
    float largest = statistics[0], scaled = factor / statistics[1];
    for (uint64_t start = 0; start < a.classes; start += uint64_t(blockDim.x) * N) {
        uint64_t first = start + threadIdx.x * N;
        bool whole = PACKED && first + N <= a.classes;
        float p[N];
        if (whole) {
            Pack<From, N> pack = load_pack<N>(x + first);
            UNROLL
            for (unsigned i = 0; i < N; i++) p[i] = pack[i];
        } else {
            UNROLL
            for (unsigned i = 0; i < N; i++) p[i] = first + i < a.classes ? load(x[first + i]) : 0.0f;
        }
        UNROLL
        for (unsigned i = 0; i < N; i++) {
            p[i] = scaled * exponential(p[i] - largest);
            // As the CPU has it, so that what comes next multiplies no subnormal numbers there.
            p[i] = fabsf(p[i]) < 1e-30f ? 0.0f : p[i];
            p[i] = first + i == target ? p[i] - factor : p[i];
        }
        if (sizeof(To) < sizeof(From)) __syncthreads();
        if (whole) {
            store_pack(out + first, Pack<To>::of(p));
        } else {
            UNROLL
            for (unsigned i = 0; i < N; i++) {
                if (first + i < a.classes) store(out[first + i], p[i]);
            }
        }
    }
}

template <class From, class To> DEVICE void gradient(const CrossEntropyArgs& a) {
    const From* x = row_of<From>(a);
    To* out = as_mut<To>(a.out + blockIdx.x * a.stride * sizeof(From));
    in_packs(x) && in_packs(out) ? row_gradient<true>(a, x, out) : row_gradient<false>(a, x, out);
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
    T* y = as_mut<T>(a.y);
    if (a.add) {
        each<Pack<T>::COUNT>(a.count, {y}, [=](float* to, float before, float x) { *to = before + x * scale; }, y, as<T>(a.x));
    } else {
        each<Pack<T>::COUNT>(a.count, {y}, [=](float* to, float x) { *to = x * scale; }, as<T>(a.x));
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
