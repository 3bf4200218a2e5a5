// Rotation of pairs (x[i], x[i + half]) of each head by its position's angle: the bits of the CPU's
// (model/src/ops/kernel/rotary.rs). A thread takes one pair.
#include "device.cuh"

// x and y are [batch, time, heads, 2·half]; cos and sin are f32 of [positions, half], with positions at least time. y may be x.
struct RotaryArgs {
    uint64_t x, cos, sin, y;
    uint64_t pairs;
    uint32_t time, heads, half;
    // Rotates by the angle, or back by it.
    uint32_t back;
};

template <class T> DEVICE void rotary(const RotaryArgs& a) {
    for (uint64_t pair = global_thread(); pair < a.pairs; pair += global_threads()) {
        uint32_t i = pair % a.half;
        uint64_t head = pair / a.half;
        uint64_t angle = head / a.heads % a.time * a.half + i;
        float cos = as<float>(a.cos)[angle], sin = as<float>(a.sin)[angle];
        sin = a.back ? -sin : sin;
        const T* x = as<T>(a.x) + head * 2 * a.half + i;
        T* y = as_mut<T>(a.y) + head * 2 * a.half + i;
        float first = load(x[0]), second = load(x[a.half]);
        store(y[0], fmaf(first, cos, -(second * sin)));
        store(y[a.half], fmaf(second, cos, first * sin));
    }
}

KERNEL(rotary, RotaryArgs, 256)
