// A 16-bit float that computes in f32 and is rounded after each operation.
#pragma once
#include <type_traits>

#include "toolkit.h"

namespace emulator {

template <class FORMAT> struct Narrow {
    uint16_t bits;

    Narrow() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> Narrow(T x) {
        bits = FORMAT::rounded(sizeof(T) < 4 || std::is_same_v<T, float> ? float(x) : to_odd(double(x)));
    }
    static Narrow of(uint16_t bits) {
        Narrow x;
        x.bits = bits;
        return x;
    }
    operator float() const { return FORMAT::widened(bits); }

    friend Narrow operator+(Narrow a, Narrow b) { return float(a) + float(b); }
    friend Narrow operator-(Narrow a, Narrow b) { return float(a) - float(b); }
    friend Narrow operator*(Narrow a, Narrow b) { return float(a) * float(b); }
    friend Narrow operator/(Narrow a, Narrow b) { return float(a) / float(b); }
    friend Narrow operator-(Narrow a) { return of(a.bits ^ 0x8000); }
    friend bool operator==(Narrow a, Narrow b) { return float(a) == float(b); }
    friend bool operator!=(Narrow a, Narrow b) { return float(a) != float(b); }
    friend bool operator<(Narrow a, Narrow b) { return float(a) < float(b); }
    friend bool operator<=(Narrow a, Narrow b) { return float(a) <= float(b); }
    friend bool operator>(Narrow a, Narrow b) { return float(a) > float(b); }
    friend bool operator>=(Narrow a, Narrow b) { return float(a) >= float(b); }
    Narrow& operator+=(Narrow x) { return *this = *this + x; }
    Narrow& operator*=(Narrow x) { return *this = *this * x; }
};

}  // namespace emulator

template <class F> bool __hisnan(emulator::Narrow<F> x) { return std::isnan(float(x)); }
template <class F> emulator::Narrow<F> __hmax_nan(emulator::Narrow<F> a, emulator::Narrow<F> b) {
    return __hisnan(a) || !(__hisnan(b) || a < b) ? a : b;
}
template <class F> emulator::Narrow<F> __hmin_nan(emulator::Narrow<F> a, emulator::Narrow<F> b) {
    return __hisnan(a) || !(__hisnan(b) || b < a) ? a : b;
}
template <class F> emulator::Narrow<F> __habs(emulator::Narrow<F> x) { return x.of(x.bits & 0x7fff); }
template <class F> emulator::Narrow<F> hsqrt(emulator::Narrow<F> x) { return sqrtf(x); }
template <class F> emulator::Narrow<F> hcos(emulator::Narrow<F> x) { return cosf(x); }
template <class F> emulator::Narrow<F> hsin(emulator::Narrow<F> x) { return sinf(x); }
template <class F> emulator::Narrow<F> hlog(emulator::Narrow<F> x) { return logf(x); }
template <class F> emulator::Narrow<F> hexp(emulator::Narrow<F> x) { return expf(x); }
