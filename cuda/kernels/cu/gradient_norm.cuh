// The gradient norm, bit-identical to optim/src/norm.rs: squares of every 1024 gradients of a parameter are added in
// f64 in a fixed order, and these sums are added exactly, as integers, in any order. The verdict stays on the device,
// where updates read it.
#pragma once
#include "pack.cuh"
#include "ranges.cuh"

// For updates on the device and, as a separate copy, for the host.
struct Verdict {
    double norm, clip;
    // Factor for the gradients.
    float scale;
    // 0 if the update is skipped.
    uint32_t admitted;
};

// The type in which several ranks would communicate gradients. A single rank rounds gradients to this type when it
// reads them.
enum Communicated : uint32_t { AS_F32, AS_BF16, AS_F16 };

template <class T> DEVICE float rounded_to(float x) {
    T rounded;
    store(rounded, x);
    return load(rounded);
}
DEVICE float communicated(float x, uint32_t as) {
    return as == AS_BF16 ? rounded_to<Bf16>(x) : as == AS_F16 ? rounded_to<F16>(x) : x;
}

struct SquaresRange {
    // f32 of [count].
    uint64_t grads, count;
    // Index of the range's first sum in the launch.
    uint32_t first_sum;
    uint32_t first_block;
    uint32_t communicated, unused;
};

constexpr unsigned SQUARES_RANGES = 112;

struct SquareSumsArgs {
    SquaresRange ranges[SQUARES_RANGES];
    // f64, one for every 1024 gradients of a range.
    uint64_t sums;
    uint32_t used, unused;
};

constexpr uint64_t SQUARES = 1024;
// Threads that compute one sum: each has four of the sixteen lanes.
constexpr unsigned TOGETHER = 4;

// Element i goes to lane i mod 16; the lanes are folded in halves.
ENTRY(square_sums, SquareSumsArgs, 256) {
    const SquaresRange& range = range_of_block(a.ranges, a.used);
    uint64_t sum = uint64_t(blockIdx.x - range.first_block) * (blockDim.x / TOGETHER) + threadIdx.x / TOGETHER;
    uint64_t first = sum * SQUARES, lane = 4 * (threadIdx.x % TOGETHER);
    uint64_t end = first + SQUARES < range.count ? first + SQUARES : range.count;
    const float* grads = as<float>(range.grads);
    double lanes[4] = {0.0, 0.0, 0.0, 0.0};
    auto add = [&](int k, float grad) {
        double x = double(communicated(grad, range.communicated));
        // The square is exact, so a fused multiply-add gives the same bits.
        lanes[k] += x * x;
    };
    bool is_aligned = in_packs(grads);
    uint64_t i = first + lane;
    for (; is_aligned && i + 4 <= end; i += 4 * TOGETHER) {
        Pack<float> four = load_pack<4>(grads + i);
        UNROLL for (int k = 0; k < 4; k++) add(k, four[k]);
    }
    for (; i < end; i += 4 * TOGETHER) {
        UNROLL for (int k = 0; k < 4; k++) {
            if (i + k < end) add(k, grads[i + k]);
        }
    }
    // All threads of a warp take part; those beyond the end contribute nothing.
    for (unsigned distance = TOGETHER / 2; distance > 0; distance /= 2) {
        UNROLL for (int k = 0; k < 4; k++) lanes[k] += __shfl_down_sync(ALL, lanes[k], distance, TOGETHER);
    }
    double total = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    if (lane == 0 && first < range.count) as_mut<double>(a.sums)[range.first_sum + sum] = total;
}

// The limbs of optim/src/exact_sum.rs: digits of 32 bits, from 2^-1074 on, and counts of NaNs and infinities.
constexpr int DIGITS = 67, NANS = DIGITS, INFINITIES = DIGITS + 1, LIMBS = DIGITS + 3;
// Threads for the limbs of one sum, one limb each.
constexpr unsigned FOR_LIMBS = 96;

struct LimbsArgs {
    // f64 of [count], non-negative.
    uint64_t sums, count;
    // i64 of [blocks][LIMBS].
    uint64_t partials;
};

// Each block adds up a part of the sums. Memory holds too few sums to overflow an i64.
ENTRY(limbs, LimbsArgs, FOR_LIMBS) {
    uint64_t each = (a.count + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each;
    uint64_t end = first + each < a.count ? first + each : a.count;
    int limb = int(threadIdx.x);
    int64_t total = 0;
    for (uint64_t i = first; i < end; i++) {
        uint64_t bits = as<uint64_t>(a.sums)[i], significand = bits & ((uint64_t(1) << 52) - 1);
        int exponent = int(bits >> 52 & 0x7ff);
        if (exponent == 0x7ff) {
            total += limb == (significand ? NANS : INFINITIES);
            continue;
        }
        // significand · 2^(position - 1074); subnormal numbers use the exponent of the smallest normal ones.
        int position = exponent ? exponent - 1 : 0;
        significand |= uint64_t(exponent != 0) << 52;
        int digit = limb - position / 32, shift = position % 32;
        if (digit < 0 || digit > 2) continue;
        int right = 32 * digit - shift;
        uint64_t moved = right <= 0 ? significand << -right : right < 64 ? significand >> right : 0;
        total += int64_t(moved & 0xffffffffu);
    }
    if (limb < LIMBS) as_mut<int64_t>(a.partials)[blockIdx.x * LIMBS + limb] = total;
}

struct VerdictArgs {
    // The partial limbs of the sums; with no blocks the sum is zero.
    uint64_t partials, blocks;
    // i64 of [LIMBS] for callers that add further sums, or 0.
    uint64_t limbs;
    // Output addresses of a Verdict, or 0: on the device, and in host memory.
    uint64_t device, host;
    // The factor that the loss was multiplied by; the largest norm that is not clipped, 0 to disable clipping; the
    // largest norm for which the update is made.
    double loss_scale, max_norm, limit;
    // Whether a non-finite norm skips the update.
    uint64_t skips_overflow;
};

DEVICE double double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Digit i of digits in 0..2^32, the highest of which is `top`.
DEVICE uint64_t digit_at(const int64_t* digits, int top, int i) { return i <= top ? uint64_t(digits[i]) : 0; }

// Rounds once, to nearest, ties to even. First propagates the carries, so that every digit but the last is in 0..2^32.
DEVICE double sum_of(int64_t* limbs) {
    int top = -1;
    for (int i = 0; i < DIGITS; i++) {
        int64_t carry = i < DIGITS - 1 ? limbs[i] >> 32 : 0;
        limbs[i] -= carry << 32;
        if (i < DIGITS - 1) limbs[i + 1] += carry;
        if (limbs[i]) top = i;
    }
    if (limbs[NANS]) return double_of(uint64_t(0x7ff8) << 48);
    // Overflow: 2^-1074 · 2^2112 and more.
    if (limbs[INFINITIES] || top == DIGITS - 1) return double_of(uint64_t(0x7ff0) << 48);
    if (top < 0) return 0.0;
    int length = 32 * top;
    for (uint64_t digit = digit_at(limbs, top, top); digit; digit >>= 1) length++;
    if (length > 2098) return double_of(uint64_t(0x7ff0) << 48);
    int dropped = length > 53 ? length - 53 : 0, place = dropped / 32, shift = dropped % 32;
    uint64_t significand = digit_at(limbs, top, place) >> shift | digit_at(limbs, top, place + 1) << (32 - shift);
    if (shift) significand |= digit_at(limbs, top, place + 2) << (64 - shift);
    if (dropped) {
        int half = dropped - 1;
        uint64_t digit = digit_at(limbs, top, half / 32), below = digit & ((uint64_t(1) << half % 32) - 1);
        for (int i = 0; i < half / 32; i++) below |= digit_at(limbs, top, i);
        if (digit >> half % 32 & 1 && (below || significand & 1)) significand++;
    }
    // A significand of 53 bits contributes the 1 of its exponent field; a shorter one is subnormal.
    uint64_t exponent = dropped ? uint64_t(dropped) << 52 : 0;
    return double_of(exponent + significand);
}

// Blocks whose limbs are added concurrently.
constexpr unsigned ROWS = 8;

// One block: adds up the limbs, and computes the norm and the verdict.
ENTRY(verdict, VerdictArgs, ROWS * FOR_LIMBS) {
    DYNAMIC_SHARED(int64_t, rows);
    unsigned limb = threadIdx.x % FOR_LIMBS, row = threadIdx.x / FOR_LIMBS;
    int64_t total = 0;
    if (limb < LIMBS) {
        for (uint64_t i = row; i < a.blocks; i += ROWS) total += as<int64_t>(a.partials)[i * LIMBS + limb];
    }
    rows[threadIdx.x] = total;
    __syncthreads();
    if (row == 0) {
        for (unsigned other = 1; other < ROWS; other++) total += rows[other * FOR_LIMBS + limb];
        rows[limb] = total;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    double norm = sqrt(sum_of(rows)) / a.loss_scale;
    for (int i = 0; a.limbs && i < LIMBS; i++) as_mut<int64_t>(a.limbs)[i] = rows[i];
    bool is_number = norm == norm, is_finite = norm - norm == 0.0;
    if (!is_number) norm = double_of(uint64_t(0x7ff8) << 48);
    double clip = 1.0;
    if (a.max_norm > 0.0) {
        clip = a.max_norm / (norm + 1e-6);
        clip = !is_number ? norm : clip > 1.0 ? 1.0 : clip;
    }
    Verdict made = {norm, clip, float(clip / a.loss_scale), is_finite ? norm <= a.limit : !a.skips_overflow};
    if (a.device) *as_mut<Verdict>(a.device) = made;
    if (a.host) *as_mut<Verdict>(a.host) = made;
}
