// Rotates the pairs (x[i], x[i + half]) of each head by the position's angle; bit-identical to the CPU's
// (ops/src/kernel/rotary.rs).
#include "pack.cuh"

// x and y are [batch, time, heads, 2·half]; cos and sin are f32 of [positions, half]. positions is u32 of [batch,
// time], or 0 if the first token of each row is position 0. y may be x.
struct RotaryArgs {
    uint64_t x, cos, sin, positions, y;
    // batch·time
    uint64_t tokens;
    uint32_t time, heads, half;
    // Whether to rotate by the opposite angle.
    uint32_t back;
};

// One token per block; a thread processes packs of pairs.
template <bool PACKED, class T> DEVICE void rotate(const RotaryArgs& a) {
    constexpr unsigned N = Pack<T>::COUNT;
    uint32_t packs = (a.half + N - 1) / N;
    for (uint64_t token = blockIdx.x; token < a.tokens; token += gridDim.x) {
        uint32_t position = a.positions ? as<uint32_t>(a.positions)[token] : uint32_t(token % a.time);
        uint64_t angles = uint64_t(position) * a.half, row = token * a.heads * 2 * a.half;
        for (uint64_t at = threadIdx.x; at < uint64_t(a.heads) * packs; at += blockDim.x) {
            // A token has fewer than 2³² elements.
            uint32_t head = uint32_t(at) / packs, i = uint32_t(at) % packs * N, left = a.half - i;
            uint64_t first = row + uint64_t(head) * 2 * a.half + i, second = first + a.half;
            const float *cos = as<float>(a.cos) + angles + i, *sin = as<float>(a.sin) + angles + i;
            Pack<T> xs = load_pack<PACKED>(as<T>(a.x) + first, left), ys = load_pack<PACKED>(as<T>(a.x) + second, left);
            float to[2][N];
            UNROLL
            for (unsigned j = 0; j < N; j += 4) {
                uint32_t rest = left < j ? 0 : left - j;
                Pack<float> c = load_pack<PACKED>(cos + j, rest), s = load_pack<PACKED>(sin + j, rest);
                UNROLL
                for (unsigned k = 0; k < 4; k++) {
                    float angle = a.back ? -s[k] : s[k], x = xs[j + k], y = ys[j + k];
                    to[0][j + k] = fmaf(x, c[k], -(y * angle));
                    to[1][j + k] = fmaf(y, c[k], x * angle);
                }
            }
            store_pack<PACKED>(as_mut<T>(a.y) + first, left, Pack<T>::of(to[0]));
            store_pack<PACKED>(as_mut<T>(a.y) + second, left, Pack<T>::of(to[1]));
        }
    }
}

template <class T> DEVICE void rotary(const RotaryArgs& a) {
    bool packed = a.half % Pack<T>::COUNT == 0 && in_packs(as<T>(a.x), as<T>(a.y)) && in_packs(as<float>(a.cos), as<float>(a.sin));
    packed ? rotate<true, T>(a) : rotate<false, T>(a);
}

KERNEL(rotary, RotaryArgs, 256)
