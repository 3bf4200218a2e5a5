// Softmax and negative log-likelihood over the rows of logits [rows, classes].
//
// Z is Σ e^x of a row; a z-loss adds z_loss·ln²Z to its loss.
//
// Forward, in one pass: each row's largest logit, Σ e^(x − largest) and the target's logit. Then the mean of the rows'
// losses, summed in f64 in an order that depends only on the number of rows. Backward: softmax times a factor, minus
// the factor at the target, optionally in place. With a z-loss, softmax is also multiplied by 1 + 2·z_loss·ln Z. A
// target out of range makes its row's loss and gradient NaN. A row with NO_TARGET is not part of the mean; its loss and
// its gradient are 0.
//
// If ranks have parts of the classes, each rank computes the statistics of its part. They are joined before the mean
// and the backward. The target's logit is 0 on ranks for which the target is ELSEWHERE.
#include "fault.cuh"
#include "math.cuh"
#include "pack.cuh"
#include "target.cuh"

struct CrossEntropyArgs {
    uint64_t logits;
    // u32 of [rows].
    uint64_t targets;
    // Three floats per row: written by the forward, read by the backward.
    uint64_t statistics;
    // Gradient of the logits; backward only. May overwrite the logits. Its row stride in bytes is that of the logits.
    uint64_t out;
    uint64_t classes;
    // Row stride of the logits, in elements.
    uint64_t stride;
    // Address of the mean's gradient, one float; 0 to use `gradient` instead.
    uint64_t upstream;
    // Address of the number of rows of the mean, one u32; 0 to use `rows` instead.
    uint64_t counted;
    float gradient;
    // The number of rows of the mean.
    float rows;
    // Backward only.
    float z_loss;
    uint32_t unused;
};

// A mean over no rows is 0.
DEVICE uint32_t divisor(uint64_t counted) {
    uint32_t rows = *as<uint32_t>(counted);
    return rows == 0 ? 1 : rows;
}

template <class T> DEVICE const T* row_of(const CrossEntropyArgs& a) { return as<T>(a.logits) + blockIdx.x * a.stride; }

// Packs of a row that a thread loads at a time.
template <class T> constexpr unsigned TURN = 16 / Pack<T>::COUNT;

// The largest of some numbers, and Σ e^(x − largest). For no numbers, or only −∞: −∞ and 0.
struct Softmax {
    float largest, sum;

    // Rescales the sum to a larger maximum.
    DEVICE void raise(float to) {
        if (to > largest) sum *= exponential(largest - to), largest = to;
    }
};

// One turn of a thread: packs from `first` on, `step` apart. WHOLE: all of them are within the row.
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

// Processes a thread's part of a row in one pass: packs that are one block width apart.
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
    uint64_t target = as<uint32_t>(a.targets)[blockIdx.x];
    float* statistics = as_mut<float>(a.statistics) + 3 * uint64_t(blockIdx.x);
    if (target == NO_TARGET) {
        // With these statistics, the row's loss is 0.
        if (threadIdx.x == 0) statistics[0] = 0.0f, statistics[1] = 1.0f, statistics[2] = 0.0f;
        return;
    }
    const T* x = row_of<T>(a);
    Softmax own = in_packs(x) ? softmax<true>(x, a.classes) : softmax<false>(x, a.classes);
    float largest = over_block<Max>(own.largest, room);
    own.raise(largest);
    float sum = over_block<Add>(own.sum, room);
    if (threadIdx.x == 0) {
        statistics[0] = largest;
        statistics[1] = sum;
        statistics[2] = target < a.classes ? load(x[target]) : target == ELSEWHERE ? 0.0f : NAN;
    }
}

// Computes a gradient of one type from logits of a type that is at least as large, sixteen bytes of the gradient per
// thread and turn. A thread's gradient may overwrite a logit that another thread reads in the same turn or has read
// before, but none that is read later.
template <bool PACKED, class From, class To> DEVICE void row_gradient(const CrossEntropyArgs& a, const From* x, To* out) {
    constexpr unsigned N = Pack<To>::COUNT;
    const float* statistics = as<float>(a.statistics) + 3 * uint64_t(blockIdx.x);
    uint64_t target = as<uint32_t>(a.targets)[blockIdx.x];
    float factor = (a.upstream ? *as<float>(a.upstream) : a.gradient) / (a.counted ? float(divisor(a.counted)) : a.rows);
    bool is_ignored = target == NO_TARGET;
    if (target >= a.classes && target != ELSEWHERE) factor = NAN;
    float largest = statistics[0], scaled = factor / statistics[1];
    if (a.z_loss != 0.0f) {
        double ln_z = log(double(statistics[1])) + double(largest);
        scaled = float(double(factor) * (1.0 + 2.0 * double(a.z_loss) * ln_z)) / statistics[1];
    }
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
            // Flushed to 0 as on the CPU, so that later operations there do not multiply subnormal numbers.
            p[i] = fabsf(p[i]) < 1e-30f ? 0.0f : p[i];
            p[i] = first + i == target ? p[i] - factor : p[i];
            // Not a product with a factor of 0, because a logit may be infinite.
            p[i] = is_ignored ? 0.0f : p[i];
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
// For f32 logits.
template <class T> DEVICE void cross_entropy_backward_to(const CrossEntropyArgs& a) { gradient<float, T>(a); }

// Combines the statistics of all ranks into those of all classes. Sums are added in f64, in rank order.
struct JoinArgs {
    // [ranks, rows, 3]
    uint64_t parts;
    // u32 of [rows].
    uint64_t targets;
    // [rows, 3]
    uint64_t statistics;
    uint64_t ranks, rows;
};

ENTRY(join, JoinArgs, 256) {
    for (uint64_t row = global_thread(); row < a.rows; row += global_threads()) {
        const float* parts = as<float>(a.parts) + 3 * row;
        float* to = as_mut<float>(a.statistics) + 3 * row;
        // Every rank has the same statistics of a row without a target.
        uint64_t ranks = as<uint32_t>(a.targets)[row] == NO_TARGET ? 1 : a.ranks, next = 3 * a.rows;
        float largest = -INFINITY, target = 0.0f;
        for (uint64_t rank = 0; rank < ranks; rank++) {
            largest = fmaxf(largest, parts[rank * next]);
            target += parts[rank * next + 2];
        }
        double sum = 0.0;
        for (uint64_t rank = 0; rank < ranks; rank++) {
            const float* of = parts + rank * next;
            sum += of[0] == largest ? double(of[1]) : double(of[1]) * exp(double(of[0]) - double(largest));
        }
        to[0] = largest, to[1] = float(sum), to[2] = target;
    }
}

// The mean of the rows' losses, one float.
struct MeanLossArgs {
    uint64_t statistics, loss;
    // Address of the part of the loss that the z-loss adds, one float; 0 if it is not wanted.
    uint64_t z;
    uint64_t rows;
    // As in CrossEntropyArgs.
    uint64_t counted;
    float z_loss;
    uint32_t unused;
};

// The sum of one number per thread, in an order that depends only on the number of threads.
DEVICE double added(double own, double* sums) {
    sums[threadIdx.x] = own;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

ENTRY(mean_loss, MeanLossArgs, 256) {
    DYNAMIC_SHARED(double, sums);
    double own = 0.0, own_z = 0.0;
    for (uint64_t row = threadIdx.x; row < a.rows; row += blockDim.x) {
        const float* of = as<float>(a.statistics) + 3 * row;
        double ln_sum = log(double(of[1])), ln_z = ln_sum + double(of[0]);
        own += ln_sum + (double(of[0]) - double(of[2]));
        own_z += ln_z * ln_z;
    }
    double total = added(own, sums), rows = double(a.counted ? divisor(a.counted) : a.rows);
    if (a.z_loss != 0.0f) {
        __syncthreads();
        double z = double(a.z_loss) * added(own_z, sums);
        total += z;
        if (threadIdx.x == 0 && a.z) *as_mut<float>(a.z) = float(z / rows);
    }
    if (threadIdx.x == 0) *as_mut<float>(a.loss) = float(total / rows);
}

// Rescales gradients that were computed for an expected gradient of the loss to the actual one.
struct RescaleArgs {
    uint64_t x, y;
    // Address of the loss's gradient, one float.
    uint64_t upstream;
    uint64_t count;
    // The expected gradient that x was computed for.
    float gradient;
    // Whether to add to y instead of overwriting it.
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

// Checks that the loss has the expected gradient, for results that were computed with the expected gradient and can no
// longer be rescaled.
struct ForeseenArgs {
    uint64_t upstream;
    // A Fault, filled in with `what` and the bits of both gradients.
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
