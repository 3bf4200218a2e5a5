// Stands in for the toolkit's header of this name.
#pragma once
#include "narrow.h"

using __nv_bfloat16 = emulator::Narrow<emulator::Bfloat16>;
static inline float __bfloat162float(__nv_bfloat16 x) { return x; }
static inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }

struct __nv_bfloat162 { __nv_bfloat16 x, y; };
static inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x + b.x, a.y + b.y}; }
static inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x * b.x, a.y * b.y}; }
