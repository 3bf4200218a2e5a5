//! Codes and errors by their definitions, in f64, and on every instruction set.

use half::{bf16, f16};

use super::*;

const BLOCK: usize = LARGEST;
use crate::rounded;

const BOTH: [BlockCodes; 2] = [BlockCodes::Int8, BlockCodes::Int4];
const LENGTHS: [usize; 8] = [0, 1, 2, 511, BLOCK, BLOCK + 1, 3 * BLOCK + 77, 8 * BLOCK];

/// Values of many magnitudes, of both signs, with a block of zeros, and blocks of subnormal and of huge ones.
fn values(n: usize) -> Vec<f32> {
    let wave = |i: usize| ((i * i * 31 + i * 7) % 2039) as f32 / 1024.0 - 0.99;
    let scale = |i: usize| [1.0, 1e-30, 0.0, 1e30, 1e-3, 3e-39, 2e38, 7.0][i / BLOCK % 8];
    (0..n).map(|i| wave(i).powi(3) * scale(i)).collect()
}

fn quantized(isa: Isa, codes: BlockCodes, src: &[f32]) -> Vec<u8> {
    let mut dst = vec![0xaa; codes.bytes(src.len())];
    run(isa, Quantize { codes, src, dst: &mut dst });
    dst
}

fn restored(codes: BlockCodes, src: &[u8], n: usize) -> Vec<f32> {
    let mut dst = vec![9.0; n];
    codes.dequantize(src, &mut dst).unwrap();
    dst
}

/// The scale of the block of an element.
fn scale(codes: BlockCodes, bytes: &[u8], element: usize) -> f64 {
    let record = &bytes[element / codes.block() * codes.record(codes.block())..];
    bf16::from_le_bytes([record[0], record[1]]).to_f64()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// By definition: in f64, and element by element.
#[test]
fn codes_are_the_nearest_and_errors_at_most_half_a_scale() {
    for codes in BOTH {
        for n in LENGTHS {
            let src = values(n);
            let bytes = quantized(Isa::BASELINE, codes, &src);
            let dst = restored(codes, &bytes, n);
            for (i, (&x, &restored)) in src.iter().zip(&dst).enumerate() {
                let start = i / codes.block() * codes.block();
                let block = &src[start..n.min(start + codes.block())];
                let largest = block.iter().fold(0.0f64, |max, &x| f64::from(x).abs().max(max));
                let scale = scale(codes, &bytes, i);
                let exact = largest / f64::from(codes.largest());
                // bf16 has 8 significant bits, and subnormal ones are multiples of 2^−133.
                let above = (exact * (1.0 + 1.0 / 128.0)).max(exact + 2f64.powi(-133));
                assert!(scale * (1.0 + f64::from(f32::EPSILON)) >= exact && scale <= above, "{codes:?}, {i}");
                assert!((f64::from(x) - f64::from(restored)).abs() <= scale / 2.0, "{codes:?}, {i}: {x:e}");
                if scale > 0.0 {
                    let nearest = (f64::from(x) / scale).round_ties_even();
                    assert!(nearest.abs() <= f64::from(codes.largest()));
                    assert_eq!(f64::from(restored), nearest * scale, "{codes:?}, {i}: {x:e}");
                }
            }
        }
    }
}

/// DeepSpeed 0.19's quantizer (`csrc/includes/quantization_utils.h`, `Params<Type::Symmetric, …>`), in f64.
#[test]
fn errors_are_smaller_than_those_of_the_formula_of_deepspeed() {
    for codes in BOTH {
        let steps = f64::from(codes.largest()) + 1.0;
        let src = &values(4 * BLOCK)[..];
        let dst = restored(codes, &quantized(Isa::current(), codes, src), src.len());
        for (src, dst) in src.chunks(codes.block()).zip(dst.chunks(codes.block())) {
            let largest = src.iter().fold(0.0f64, |max, &x| f64::from(x).abs().max(max));
            let theirs = |x: f32| match largest == 0.0 {
                true => 0.0,
                false => {
                    (f64::from(x) * steps / largest).round_ties_even().clamp(-steps, steps - 1.0) * largest / steps
                }
            };
            let (mut worst, mut worst_of_theirs) = (0.0f64, 0.0f64);
            for (&x, &ours) in src.iter().zip(dst) {
                let (x, theirs, ours) = (f64::from(x), theirs(x), f64::from(ours));
                // Half a step of each; a clipped element of theirs is off by a whole step.
                let step = largest / (steps - 1.0) * (1.0 + 1.0 / 128.0);
                assert!((ours - theirs).abs() <= 1.5 * step, "{codes:?}: {x:e}, {ours:e}, {theirs:e}");
                worst = worst.max((x - ours).abs());
                worst_of_theirs = worst_of_theirs.max((x - theirs).abs());
            }
            assert!(worst <= worst_of_theirs, "{codes:?}: {worst:e}, {worst_of_theirs:e}");
        }
    }
}

#[test]
fn every_instruction_set_has_the_same_bits() {
    for codes in BOTH {
        for n in LENGTHS {
            let src = values(n);
            let expected = quantized(Isa::BASELINE, codes, &src);
            let start: Vec<f32> = (0..n).map(|i| (i as f32).sin()).collect();
            let results = |isa| {
                let (mut dst, mut sum) = (vec![1.0; n], start.clone());
                run(isa, Dequantize::<false> { codes, src: &expected, dst: &mut dst });
                run(isa, Dequantize::<true> { codes, src: &expected, dst: &mut sum });
                (bits(&dst), bits(&sum))
            };
            let of_baseline = results(Isa::BASELINE);
            let sums = restored(codes, &expected, n).into_iter().zip(&start).map(|(value, start)| start + value);
            assert_eq!(of_baseline.1, sums.map(f32::to_bits).collect::<Vec<_>>(), "{codes:?}, {n}");
            for isa in Isa::available() {
                assert_eq!(quantized(isa, codes, &src), expected, "{isa:?}, {codes:?}, {n}");
                assert!(results(isa) == of_baseline, "{isa:?}, {codes:?}, {n}");
            }
        }
    }
}

/// A range that begins at a multiple of a block has the codes that it has within the whole.
#[test]
fn blocks_do_not_depend_on_where_a_range_is_cut() {
    for codes in BOTH {
        let src = values(5 * BLOCK + 33);
        let whole = quantized(Isa::current(), codes, &src);
        for cut in 0..=5 {
            let (first, second) = src.split_at(cut * BLOCK);
            let parts = [quantized(Isa::current(), codes, first), quantized(Isa::current(), codes, second)];
            assert_eq!(parts.concat(), whole);
        }
    }
}

#[test]
fn values_in_16_bits_are_read_exactly_and_rounded_once() {
    fn same<H: HalfFloat + PartialEq + std::fmt::Debug>(codes: BlockCodes, src: &[f32]) {
        let narrow = rounded::<H>(src);
        let mut wide = vec![0.0; src.len()];
        read_half(&narrow, &mut wide).unwrap();
        let mut bytes = vec![0; codes.bytes(src.len())];
        codes.quantize_half(&narrow, &mut bytes).unwrap();
        assert_eq!(bytes, quantized(Isa::current(), codes, &wide));
        let mut back = narrow.clone();
        codes.dequantize_half(&bytes, &mut back).unwrap();
        assert_eq!(back, rounded::<H>(&restored(codes, &bytes, src.len())));
    }
    for codes in BOTH {
        let src: Vec<f32> = (0..2 * BLOCK + 5).map(|i| (i as f32).sin()).collect();
        same::<bf16>(codes, &src);
        same::<f16>(codes, &src);
    }
}

#[test]
fn a_block_with_a_number_that_is_not_finite_becomes_nan() {
    for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for codes in BOTH {
            let mut src = values(3 * BLOCK);
            src[BLOCK + 100] = wrong;
            let bytes = quantized(Isa::current(), codes, &src);
            let dst = restored(codes, &bytes, src.len());
            let mut sum = vec![1.0; src.len()];
            codes.add(&bytes, &mut sum).unwrap();
            for (i, (value, sum)) in dst.iter().zip(&sum).enumerate() {
                let is_wrong = i / codes.block() == (BLOCK + 100) / codes.block();
                assert_eq!((value.is_nan(), sum.is_nan()), (is_wrong, is_wrong), "{i}");
            }
        }
    }
}

#[test]
fn lengths_are_checked() {
    for codes in BOTH {
        let bytes = codes.bytes(600);
        assert!(codes.quantize(&[1.0; 600], &mut vec![0; bytes - 1]).is_err());
        assert!(codes.quantize_half(&[bf16::ONE; 600], &mut vec![0; bytes + 1]).is_err());
        assert!(codes.dequantize(&vec![0; bytes - 1], &mut [0.0; 600]).is_err());
        assert!(codes.dequantize_half(&vec![0; bytes + 1], &mut [bf16::ONE; 600]).is_err());
        assert!(codes.add(&vec![0; bytes + 1], &mut [0.0; 600]).is_err());
    }
    assert_eq!((BlockCodes::Int8.bytes(513), BlockCodes::Int4.bytes(513)), (514 + 3, 2 * 130 + 3));
}
