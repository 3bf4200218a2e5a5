//! The values that codes stand for.

use super::FourBit;
use zero_optim::EightBit;

/// The values of NF4, in ascending order: Dettmers et al., "QLoRA", NeurIPS 2023, appendix E.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The values of FP4: twelfths of 0, 1/16, 8, 12, 4, 6, 2 and 3, then the same values negated.
const FP4: [f32; 16] = {
    let twelfths = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 8 {
        values[code] = twelfths[code] / 12.0;
        // A negative zero has the value of zero.
        values[code + 8] = if code == 0 { 0.0 } else { -values[code] };
        code += 1;
    }
    values
};

/// The codes of FP4 in the order of ascending value. The first of the two zeros counts as the lower one.
const FP4_ORDER: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];

const fn values(code: FourBit) -> [f32; 16] {
    match code {
        FourBit::Nf4 => NF4,
        FourBit::Fp4 => FP4,
    }
}

/// Returns the bounds halfway between adjacent values, and the codes in the order of ascending value.
pub(super) const fn bounds(code: FourBit) -> ([f32; 15], [u8; 16]) {
    let order = match code {
        FourBit::Nf4 => [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        FourBit::Fp4 => FP4_ORDER,
    };
    let (values, mut bounds, mut at) = (values(code), [0.0; 15], 0);
    while at < 15 {
        bounds[at] = (values[order[at] as usize] + values[order[at + 1] as usize]) / 2.0;
        at += 1;
    }
    (bounds, order)
}

/// Returns the values of the two codes of each byte.
pub(super) fn pairs(code: FourBit) -> &'static [[f32; 2]; 256] {
    static PAIRS: [[[f32; 2]; 256]; 2] = [all_pairs(FourBit::Nf4), all_pairs(FourBit::Fp4)];
    &PAIRS[code as usize]
}

const fn all_pairs(code: FourBit) -> [[f32; 2]; 256] {
    let (values, mut pairs, mut byte) = (values(code), [[0.0; 2]; 256], 0);
    while byte < 256 {
        pairs[byte] = [values[byte >> 4], values[byte & 15]];
        byte += 1;
    }
    pairs
}

/// Returns the values of the 8-bit codes of scales, in ascending order. An 8-bit optimizer uses the same values for its
/// first moment. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016.
pub(super) fn scale_codes() -> &'static [f32; 256] {
    EightBit::Signed.all()
}

/// Returns the code of the value nearest to `scaled`. In a tie, returns the lower one. As in bitsandbytes' kernel for
/// CPUs, `scaled` is first rounded to one of 65,536 numbers from −1 to 1.
pub(super) fn nearest_scale(scaled: f32) -> u8 {
    const STEPS: f32 = 65_535.0;
    let step = ((scaled + 1.0) * 0.5 * STEPS + 0.5).floor();
    let scaled = f64::from(step) / f64::from(STEPS) * 2.0 - 1.0;
    let codes = scale_codes();
    let above = codes.partition_point(|&code| f64::from(code) <= scaled).clamp(1, 255);
    let (low, high) = (f64::from(codes[above - 1]), f64::from(codes[above]));
    (if (scaled - high).abs() < (scaled - low).abs() { above } else { above - 1 }) as u8
}
