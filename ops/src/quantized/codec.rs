//! Encodes and decodes the blocks and rows of a quantized weight.

use super::tables::{bounds, nearest_scale, pairs};
use super::{BLOCK, FLOAT, FourBit};
use crate::kernel::{Isa, vectorised};

/// Writes the codes of a block. The code of an element is the number of bounds below it.
pub(super) fn encode_block(isa: Isa, code: FourBit, scaled: &[f32; BLOCK], codes: &mut [u8]) {
    let mut below = [0u8; BLOCK];
    let (bounds, order) = bounds(code);
    count_below(isa, scaled, &bounds, &mut below);
    for (byte, pair) in codes.iter_mut().zip(below.as_chunks::<2>().0) {
        let [first, second] = pair.map(|index| order[usize::from(index)]);
        *byte = first << 4 | second;
    }
}

vectorised! {
    fn count_below(scaled: &[f32; BLOCK], bounds: &[f32; 15], below: &mut [u8; BLOCK]) {
        let mut counts = [0u32; BLOCK];
        for bound in bounds {
            for (count, value) in counts.iter_mut().zip(scaled) {
                *count += u32::from(*bound < *value);
            }
        }
        for (below, count) in below.iter_mut().zip(counts) {
            *below = count as u8;
        }
    }
}

pub(super) fn decode_block(isa: Isa, code: FourBit, codes: &[u8], is_second: bool, scale: f32, out: &mut [f32]) {
    let table = pairs(code);
    let skip = usize::from(is_second);
    if is_second {
        out[0] = table[usize::from(codes[0])][1] * scale;
    }
    decode_pairs(isa, table, &codes[skip..], scale, &mut out[skip..]);
}

vectorised! {
    fn decode_pairs(table: &[[f32; 2]; 256], codes: &[u8], scale: f32, out: &mut [f32]) {
        let (whole, rest) = out.as_chunks_mut::<2>();
        let count = whole.len();
        for (out, &byte) in whole.iter_mut().zip(codes) {
            *out = table[usize::from(byte)].map(|value| value * scale);
        }
        if let ([last], Some(&byte)) = (rest, codes.get(count)) {
            *last = table[usize::from(byte)][0] * scale;
        }
    }
}

/// Writes the record of one output: LLM.int8() without outliers.
pub(super) fn encode_row(values: &[f32], record: &mut [u8]) {
    let scale = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    record[..FLOAT].copy_from_slice(&scale.to_le_bytes());
    let factor = 127.0 / scale;
    for (code, value) in record[FLOAT..].iter_mut().zip(values) {
        // A row of zeros has no factor.
        *code = if scale == 0.0 { 0 } else { (value * factor).round_ties_even() as i8 as u8 };
    }
}

vectorised! {
    fn decode_row(codes: &[u8], scale: f32, out: &mut [f32]) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = f32::from(code as i8) * scale * (1.0 / 127.0);
        }
    }
}

/// Writes the head of a record with double quantization: `offset`, the scale of scales, and the codes of the scales
/// minus `offset`.
pub(super) fn encode_scales(scales: &[f32], offset: f32, record: &mut [u8]) {
    let largest = scales.iter().fold(0.0f32, |largest, scale| largest.max((scale - offset).abs()));
    record[..FLOAT].copy_from_slice(&offset.to_le_bytes());
    record[FLOAT..2 * FLOAT].copy_from_slice(&largest.to_le_bytes());
    for (code, scale) in record[2 * FLOAT..].iter_mut().zip(scales) {
        // bitsandbytes gives the first code to scales that all equal their mean. They read back as the mean.
        *code = if largest == 0.0 { 0 } else { nearest_scale((scale - offset) / largest) };
    }
}
