// Stands in for the toolkit's header of this name.
#pragma once
#include "narrow.h"

using __half = emulator::Narrow<emulator::Binary16>;
static inline float __half2float(__half x) { return x; }
static inline __half __float2half(float x) { return x; }
static inline unsigned short __half_as_ushort(__half x) { return x.bits; }
static inline __half __ushort_as_half(unsigned short bits) { return __half::of(bits); }
