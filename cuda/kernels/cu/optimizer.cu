// Optimizer steps over flat shards, the gradient norm that precedes them, and conversions between types. All are
// bit-identical to the CPU's (optim/), so an update may be split between a GPU and its host.
#include "gradient_norm.cuh"
#include "pack.cuh"

struct UpdateRange {
    // f32 of [count] each: master parameters, optimizer states (0 for those that the optimizer lacks) and reduced
    // gradients.
    uint64_t params, states[2];
    uint64_t grads;
    // The working parameters, in the entry's type; 0 if layers read the master parameters.
    uint64_t working;
    // f32 averages of the parameters; 0 if there are none.
    uint64_t averages;
    uint64_t count;
    uint32_t first_block;
    // Which of the two sets of factors, and the type in which gradients were communicated.
    uint16_t factors, communicated;
};

constexpr unsigned UPDATE_RANGES = 60;
constexpr int FACTORS = 10;
// Elements per block.
constexpr uint64_t TILE = 4096;

struct UpdateArgs {
    UpdateRange ranges[UPDATE_RANGES];
    // With weight decay and without, each in the order that optim/src/factors.rs gives for the formula.
    float factors[2][FACTORS];
    // Address of a Verdict, whose scale replaces the gradient scale in the factors; or 0.
    uint64_t verdict;
    uint32_t used, formula;
    // The share of the new parameters in their averages.
    float average_weight;
    // The limit of a gradient's absolute value before it is scaled; infinite if gradients are not clipped.
    float limit;
};

struct Adam {
    static constexpr int STATES = 2;
    DEVICE static void moments(const float* f, float& param, float grad, float& m, float& v) {
        m = fmaf(f[2], grad - m, m);
        // Multiplies by 1−β₂ before squaring: g² alone overflows f32 from 1.8e19 on.
        v = fmaf(f[4] * grad, grad, f[3] * v);
        param = fmaf(f[7], m / fmaf(sqrtf(v), f[5], f[6]), param);
    }
    DEVICE static void step(const float* f, float& param, float grad, float& m, float& v) {
        moments(f, param, fmaf(f[0], param, grad * f[1]), m, v);
    }
};

struct AdamW {
    static constexpr int STATES = 2;
    DEVICE static void step(const float* f, float& param, float grad, float& m, float& v) {
        param = param * f[0];
        Adam::moments(f, param, grad * f[1], m, v);
    }
};

struct Sgd {
    static constexpr int STATES = 0;
    DEVICE static void step(const float* f, float& param, float grad, float&, float&) {
        param = fmaf(f[2], fmaf(f[0], param, grad * f[1]), param);
    }
};

struct Momentum {
    static constexpr int STATES = 1;
    DEVICE static void step(const float* f, float& param, float grad, float& buffer, float&) {
        buffer = fmaf(f[4], fmaf(f[0], param, grad * f[1]), f[3] * buffer);
        param = fmaf(f[2], buffer, param);
    }
};

struct Nesterov {
    static constexpr int STATES = 1;
    DEVICE static void step(const float* f, float& param, float grad, float& buffer, float&) {
        grad = fmaf(f[0], param, grad * f[1]);
        buffer = fmaf(f[4], grad, f[3] * buffer);
        param = fmaf(f[2], fmaf(f[3], buffer, grad), param);
    }
};

struct Lion {
    static constexpr int STATES = 1;
    DEVICE static void step(const float* f, float& param, float grad, float& m, float&) {
        grad = grad * f[1];
        float direction = fmaf(f[3], grad, f[2] * m);
        m = fmaf(f[5], grad, f[4] * m);
        // A NaN stays NaN, so that it never looks like "no change".
        float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction;
        param = fmaf(f[6], sign, param * f[0]);
    }
};

struct Adagrad {
    static constexpr int STATES = 1;
    DEVICE static void step(const float* f, float& param, float grad, float& sum, float&) {
        grad = fmaf(f[0], param, grad * f[1]);
        sum = fmaf(grad, grad, sum);
        param = fmaf(f[3], grad / (sqrtf(sum) + f[2]), param);
    }
};

struct RmsProp {
    static constexpr int STATES = 1;
    // Returns the decayed gradient, and updates the mean square.
    DEVICE static float square(const float* f, float param, float grad, float& mean) {
        grad = fmaf(f[0], param, grad * f[1]);
        mean = fmaf(f[3] * grad, grad, f[2] * mean);
        return grad;
    }
    DEVICE static void step(const float* f, float& param, float grad, float& mean, float&) {
        grad = square(f, param, grad, mean);
        param = fmaf(f[5], grad / (sqrtf(mean) + f[4]), param);
    }
};

struct RmsPropMomentum {
    static constexpr int STATES = 2;
    DEVICE static void step(const float* f, float& param, float grad, float& mean, float& buffer) {
        grad = RmsProp::square(f, param, grad, mean);
        buffer = fmaf(f[6], buffer, grad / (sqrtf(mean) + f[4]));
        param = fmaf(f[5], buffer, param);
    }
};

struct RmsPropCentered {
    static constexpr int STATES = 2;
    DEVICE static void step(const float* f, float& param, float grad, float& mean, float& average) {
        grad = RmsProp::square(f, param, grad, mean);
        average = fmaf(f[3], grad - average, average);
        float variance = fmaf(-average, average, mean);
        // Not fmaxf, which would hide a NaN.
        variance = variance < 0.0f ? 0.0f : variance;
        param = fmaf(f[5], grad / (sqrtf(variance) + f[4]), param);
    }
};

struct NAdam {
    static constexpr int STATES = 2;
    DEVICE static void moments(const float* f, float& param, float grad, float& m, float& v) {
        m = fmaf(f[2], grad - m, m);
        v = fmaf(f[4] * grad, grad, f[3] * v);
        param = param + fmaf(f[7], m, f[6] * grad) / (sqrtf(v) + f[5]);
    }
    DEVICE static void step(const float* f, float& param, float grad, float& m, float& v) {
        moments(f, param, fmaf(f[0], param, grad * f[1]), m, v);
    }
};

struct NAdamW {
    static constexpr int STATES = 2;
    DEVICE static void step(const float* f, float& param, float grad, float& m, float& v) {
        param = param * f[0];
        NAdam::moments(f, param, grad * f[1], m, v);
    }
};

struct ScheduleFree {
    static constexpr int STATES = 2;
    DEVICE static void step(const float* f, float& param, float grad, float& offset, float& v) {
        grad = grad * f[1];
        v = fmaf(f[3] * grad, grad, f[2] * v);
        float direction = grad / fmaf(sqrtf(v), f[4], f[5]);
        direction = fmaf(f[0], param, direction);
        param = fmaf(f[7], direction, fmaf(f[6], offset, param));
        offset = f[8] * fmaf(f[9], direction, offset);
    }
};

// Aligned, so that it is read and written in one access: a whole pack in f32, half a pack in 16-bit types.
template <class T> struct alignas(4 * sizeof(T)) Four { T at[4]; };

// A range, and a block's part of it.
template <class T, class FORMULA> struct Update {
    float factors[FACTORS];
    const float* __restrict__ grads;
    float* __restrict__ params;
    float* __restrict__ states[2];
    T* __restrict__ working;
    float* __restrict__ averages;
    float average_weight;
    uint32_t communicated_as;
    float limit;

    // A gradient, rounded to the type in which it was communicated, then clipped. NaN stays NaN.
    DEVICE float read(float grad) const {
        grad = communicated(grad, communicated_as);
        grad = limit < grad ? limit : grad;
        return grad < -limit ? -limit : grad;
    }

    DEVICE float averaged(float average, float param) const {
        return average_weight == 1.0f ? param : fmaf(average_weight, param - average, average);
    }

    DEVICE void one(uint64_t i) {
        float param = params[i], state[2] = {0.0f, 0.0f};
        UNROLL for (int s = 0; s < FORMULA::STATES; s++) state[s] = states[s][i];
        FORMULA::step(factors, param, read(grads[i]), state[0], state[1]);
        params[i] = param;
        UNROLL for (int s = 0; s < FORMULA::STATES; s++) states[s][i] = state[s];
        if (working) store(working[i], param);
        if (averages) averages[i] = averaged(averages[i], param);
    }

    DEVICE void four(uint64_t i) {
        Four<float> param = *reinterpret_cast<const Four<float>*>(params + i), state[2] = {};
        Four<float> grad = *reinterpret_cast<const Four<float>*>(grads + i);
        UNROLL for (int s = 0; s < FORMULA::STATES; s++) state[s] = *reinterpret_cast<const Four<float>*>(states[s] + i);
        Four<T> rounded;
        UNROLL for (int k = 0; k < 4; k++) {
            FORMULA::step(factors, param.at[k], read(grad.at[k]), state[0].at[k], state[1].at[k]);
            store(rounded.at[k], param.at[k]);
        }
        *reinterpret_cast<Four<float>*>(params + i) = param;
        UNROLL for (int s = 0; s < FORMULA::STATES; s++) *reinterpret_cast<Four<float>*>(states[s] + i) = state[s];
        if (working) *reinterpret_cast<Four<T>*>(working + i) = rounded;
        if (!averages) return;
        Four<float> average = *reinterpret_cast<const Four<float>*>(averages + i);
        UNROLL for (int k = 0; k < 4; k++) average.at[k] = averaged(average.at[k], param.at[k]);
        *reinterpret_cast<Four<float>*>(averages + i) = average;
    }
};

// Whether element i of an array at `address` can be accessed as a Four.
template <class T> DEVICE bool is_aligned(uint64_t address, uint64_t i) {
    return (address + i * sizeof(T)) % sizeof(Four<T>) == 0;
}

template <class T, class FORMULA> DEVICE void all(const UpdateArgs& a) {
    const UpdateRange& range = range_of_block(a.ranges, a.used);
    Update<T, FORMULA> update;
    UNROLL for (int k = 0; k < FACTORS; k++) update.factors[k] = a.factors[range.factors][k];
    if (a.verdict) {
        const Verdict& verdict = *as<Verdict>(a.verdict);
        if (!verdict.admitted) return;
        update.factors[1] = verdict.scale;
    }
    update.grads = as<float>(range.grads);
    update.params = as_mut<float>(range.params);
    UNROLL for (int s = 0; s < 2; s++) update.states[s] = as_mut<float>(range.states[s]);
    update.working = as_mut<T>(range.working);
    update.averages = as_mut<float>(range.averages);
    update.average_weight = a.average_weight;
    update.communicated_as = range.communicated;
    update.limit = a.limit;
    uint64_t count = range.count, block = blockIdx.x - range.first_block;
    // The elements before the first aligned parameter. The other arrays are aligned from there on, or not at all.
    uint64_t head = range.params % sizeof(Four<float>) ? 4 - range.params / sizeof(float) % 4 : 0;
    head = head < count ? head : count;
    bool aligned = is_aligned<float>(range.grads, head) && is_aligned<T>(range.working, range.working ? head : 0);
    aligned = aligned && is_aligned<float>(range.averages, range.averages ? head : 0);
    UNROLL for (int s = 0; s < FORMULA::STATES; s++) aligned = aligned && is_aligned<float>(range.states[s], head);
    if (!aligned) {
        uint64_t end = (block + 1) * TILE < count ? (block + 1) * TILE : count;
        for (uint64_t i = block * TILE + threadIdx.x; i < end; i += blockDim.x) update.one(i);
        return;
    }
    uint64_t fours = (count - head) / 4, tail = head + 4 * fours;
    uint64_t end = (block + 1) * (TILE / 4) < fours ? (block + 1) * (TILE / 4) : fours;
    for (uint64_t i = block * (TILE / 4) + threadIdx.x; i < end; i += blockDim.x) update.four(head + 4 * i);
    if (block > 0) return;
    if (threadIdx.x < head) update.one(threadIdx.x);
    if (threadIdx.x < count - tail) update.one(tail + threadIdx.x);
}

// Updates in one pass over memory, whatever the optimizer. The entry's type is that of the working parameters.
template <class T> DEVICE void update(const UpdateArgs& a) {
    switch (a.formula) {
        case 0: return all<T, AdamW>(a);
        case 1: return all<T, Adam>(a);
        case 2: return all<T, Sgd>(a);
        case 3: return all<T, Momentum>(a);
        case 4: return all<T, Nesterov>(a);
        case 5: return all<T, Lion>(a);
        case 6: return all<T, Adagrad>(a);
        case 7: return all<T, RmsProp>(a);
        case 8: return all<T, RmsPropMomentum>(a);
        case 9: return all<T, RmsPropCentered>(a);
        case 10: return all<T, NAdam>(a);
        case 11: return all<T, NAdamW>(a);
        case 12: return all<T, ScheduleFree>(a);
    }
}

struct CastArgs {
    uint64_t from, to;
    uint64_t count;
};

// Converts from the entry's type to f32, exactly.
template <class T> DEVICE void widen(const CastArgs& a) {
    each<Pack<T>::COUNT>(a.count, {as_mut<float>(a.to)}, [](float* y, float x) { *y = x; }, as<T>(a.from));
}

// Converts from f32 to the entry's type, rounded once.
template <class T> DEVICE void narrow(const CastArgs& a) {
    each<Pack<T>::COUNT>(a.count, {as_mut<T>(a.to)}, [](float* y, float x) { *y = x; }, as<float>(a.from));
}

// Adds to an f32 array, for gradients of several micro-batches.
template <class T> DEVICE void add_to(const CastArgs& a) {
    auto sum = [](float* y, float before, float x) { *y = before + x; };
    each<Pack<T>::COUNT>(a.count, {as_mut<float>(a.to)}, sum, as<float>(a.to), as<T>(a.from));
}

struct AddCommunicatedArgs {
    // Both are f32.
    uint64_t from, to;
    uint64_t count;
    uint32_t from_communicated, to_communicated;
};

// Like add_to, for gradients that are rounded when they are read.
ENTRY(add_communicated, AddCommunicatedArgs, 256) {
    auto sum = [&](float* y, float before, float x) {
        *y = communicated(before, a.to_communicated) + communicated(x, a.from_communicated);
    };
    each<Pack<float>::COUNT>(a.count, {as_mut<float>(a.to)}, sum, as<float>(a.to), as<float>(a.from));
}

KERNEL(update, UpdateArgs, 256)
KERNEL(widen, CastArgs, 256)
KERNEL(narrow, CastArgs, 256)
KERNEL(add_to, CastArgs, 256)
