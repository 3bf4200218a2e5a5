// Stands in for the toolkit's header of this name; of the 8-bit types it has only E4M3.
#pragma once
#include "cuda_fp16.h"

enum __nv_fp8_interpretation_t { __NV_E4M3 };

struct __nv_fp8_e4m3 {
    uint8_t __x;

    __nv_fp8_e4m3() = default;
    // Values too large saturate to the largest, 448, as in CUDA's own constructors.
    template <class T> explicit __nv_fp8_e4m3(T value) {
        float x = float(value), size = fabsf(x);
        uint32_t bits = to_bits(size);
        if (size != size) {
            bits = 0x7f;
        } else if (size >= 448.0f) {
            bits = 0x7e;
        } else if (size < 0x1p-6f) {
            bits = uint32_t(nearbyintf(size * 0x1p9f));
        } else {
            bits = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
        }
        __x = uint8_t(to_bits(x) >> 24 & 0x80 | bits);
    }
};

static inline __half __nv_cvt_fp8_to_halfraw(uint8_t bits, __nv_fp8_interpretation_t) {
    unsigned exponent = bits >> 3 & 15, fraction = bits & 7;
    float size = exponent ? ldexpf(8 + fraction, int(exponent) - 10) : ldexpf(fraction, -9);
    if ((bits & 0x7f) == 0x7f) size = NAN;
    return bits & 0x80 ? -size : size;
}
