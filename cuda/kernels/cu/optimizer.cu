// A step of any optimizer over a flat shard, the squares of gradients, and numbers from one type into another: all with the bits of the CPU's
// (optim/), so that what a card and its host share of an update makes no difference.
#include "device.cuh"

struct UpdateArgs {
    // f32 of [count] each: master parameters, the optimizer's states (0 where there are fewer) and reduced gradients.
    uint64_t params, states[2];
    uint64_t grads;
    // The parameters that layers read, in the entry's type; 0 if those are the master parameters.
    uint64_t working;
    uint64_t count;
    // In the order that optim/src/factors.rs gives for each formula.
    float factors[8];
    uint32_t formula;
    uint32_t unused;
};

struct Adam {
    DEVICE static void moments(const float* f, float& param, float grad, float& m, float& v) {
        m = fmaf(f[2], grad - m, m);
        // (1−β₂)g before the second g: g² alone overflows f32 from 1.8e19 on.
        v = fmaf(f[4] * grad, grad, f[3] * v);
        param = fmaf(f[7], m / fmaf(sqrtf(v), f[5], f[6]), param);
    }
    DEVICE static void step(const float* f, float& param, float grad, float& m, float& v) {
        moments(f, param, fmaf(f[0], param, grad * f[1]), m, v);
    }
};

struct AdamW {
    DEVICE static void step(const float* f, float& param, float grad, float& m, float& v) {
        param = param * f[0];
        Adam::moments(f, param, grad * f[1], m, v);
    }
};

struct Sgd {
    DEVICE static void step(const float* f, float& param, float grad, float&, float&) {
        param = fmaf(f[2], fmaf(f[0], param, grad * f[1]), param);
    }
};

struct Momentum {
    DEVICE static void step(const float* f, float& param, float grad, float& buffer, float&) {
        buffer = fmaf(f[4], fmaf(f[0], param, grad * f[1]), f[3] * buffer);
        param = fmaf(f[2], buffer, param);
    }
};

struct Nesterov {
    DEVICE static void step(const float* f, float& param, float grad, float& buffer, float&) {
        grad = fmaf(f[0], param, grad * f[1]);
        buffer = fmaf(f[4], grad, f[3] * buffer);
        param = fmaf(f[2], fmaf(f[3], buffer, grad), param);
    }
};

struct Lion {
    DEVICE static void step(const float* f, float& param, float grad, float& m, float&) {
        grad = grad * f[1];
        float direction = fmaf(f[3], grad, f[2] * m);
        m = fmaf(f[5], grad, f[4] * m);
        // A NaN stays one: it must not pass for "no change".
        float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction;
        param = fmaf(f[6], sign, param * f[0]);
    }
};

struct Adagrad {
    DEVICE static void step(const float* f, float& param, float grad, float& sum, float&) {
        grad = fmaf(f[0], param, grad * f[1]);
        sum = fmaf(grad, grad, sum);
        param = fmaf(f[3], grad / (sqrtf(sum) + f[2]), param);
    }
};

template <class T, class FORMULA> DEVICE void all(const UpdateArgs& a) {
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        float param = as<float>(a.params)[i], states[2] = {0.0f, 0.0f};
        for (int s = 0; s < 2; s++) {
            if (a.states[s]) states[s] = as<float>(a.states[s])[i];
        }
        FORMULA::step(a.factors, param, as<float>(a.grads)[i], states[0], states[1]);
        as_mut<float>(a.params)[i] = param;
        for (int s = 0; s < 2; s++) {
            if (a.states[s]) as_mut<float>(a.states[s])[i] = states[s];
        }
        if (a.working) store(as_mut<T>(a.working)[i], param);
    }
}

// One pass over memory, whatever the optimizer. The entry's type is that of the working parameters.
template <class T> DEVICE void update(const UpdateArgs& a) {
    switch (a.formula) {
        case 0: return all<T, AdamW>(a);
        case 1: return all<T, Adam>(a);
        case 2: return all<T, Sgd>(a);
        case 3: return all<T, Momentum>(a);
        case 4: return all<T, Nesterov>(a);
        case 5: return all<T, Lion>(a);
        case 6: return all<T, Adagrad>(a);
    }
}

// The squares of each 1024 gradients of a parameter, added in f64: element i goes to lane i mod 16, the lanes are folded in halves.
// A sum is half a warp's. The caller adds the sums exactly.
struct SquareSumsArgs {
    uint64_t grads, sums;
    uint64_t count;
};

constexpr uint64_t SQUARES = 1024;
constexpr unsigned LANES = 16;

template <class T> DEVICE void square_sums(const SquareSumsArgs& a) {
    uint64_t sum = global_thread() / LANES;
    unsigned lane = threadIdx.x % LANES;
    uint64_t first = sum * SQUARES, end = first + SQUARES < a.count ? first + SQUARES : a.count;
    double total = 0.0;
    for (uint64_t i = first + lane; i < end; i += LANES) {
        double x = double(load(as<T>(a.grads)[i]));
        total += x * x;
    }
    // All threads of a warp take part, those beyond the end with nothing.
    for (unsigned distance = LANES / 2; distance > 0; distance /= 2) {
        total += __shfl_down_sync(ALL, total, distance, LANES);
    }
    if (lane == 0 && first < a.count) as_mut<double>(a.sums)[sum] = total;
}

struct CastArgs {
    uint64_t from, to;
    uint64_t count;
};

// From the entry's type, exactly.
template <class T> DEVICE void widen(const CastArgs& a) {
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        as_mut<float>(a.to)[i] = load(as<T>(a.from)[i]);
    }
}

// To the entry's type, rounded once.
template <class T> DEVICE void narrow(const CastArgs& a) {
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        store(as_mut<T>(a.to)[i], as<float>(a.from)[i]);
    }
}

// Onto f32: gradients of several micro-batches.
template <class T> DEVICE void add_to(const CastArgs& a) {
    for (uint64_t i = global_thread(); i < a.count; i += global_threads()) {
        as_mut<float>(a.to)[i] += load(as<T>(a.from)[i]);
    }
}

KERNEL(update, UpdateArgs, 256)
KERNEL(square_sums, SquareSumsArgs, 256)
KERNEL(widen, CastArgs, 256)
KERNEL(narrow, CastArgs, 256)
KERNEL(add_to, CastArgs, 256)
