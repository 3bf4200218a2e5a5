// 16-bit floats on the host, by their bits. All roundings are to nearest, ties to even.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

namespace emulator {

struct Binary16 {
    static float widened(uint16_t half) {
        uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
        if (exponent == 0) return of_bits(sign | to_bits(float(fraction) * of_bits(0x33800000)));
        return of_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
    }
    static uint16_t rounded(float x) {
        uint32_t sign = to_bits(x) >> 16 & 0x8000, bits = to_bits(x) & 0x7fffffff, half;
        if (bits > 0x7f800000) {
            half = 0x7e00;
        } else if (bits >= 0x477ff000) {
            half = 0x7c00;
        } else if (bits < 0x38800000) {
            // Below 2^-14. Floats next to 1/2 have the same unit in the last place as f16's subnormals.
            half = to_bits(of_bits(bits) + 0.5f) - to_bits(0.5f);
        } else {
            half = (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
        }
        return uint16_t(sign | half);
    }
};

struct Bfloat16 {
    static float widened(uint16_t half) { return of_bits(uint32_t(half) << 16); }
    static uint16_t rounded(float x) {
        uint32_t bits = to_bits(x);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
        return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

// Rounds to odd, so that a second rounding to fewer bits gives the same result as a single rounding.
static inline float to_odd(double x) {
    float near = float(x);
    if (isnan(x) || isinf(near) || double(near) == x) return near;
    float toward_zero = fabs(double(near)) > fabs(x) ? nextafterf(near, 0.0f) : near;
    return of_bits(to_bits(toward_zero) | 1);
}

}  // namespace emulator
