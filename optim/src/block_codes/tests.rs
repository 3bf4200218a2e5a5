//! Tests codes and rounding errors against their definitions in f64, on every instruction set.

use half::{bf16, f16};

use super::*;

const BLOCK: usize = LARGEST;
use crate::rounded;

const LENGTHS: [usize; 8] = [0, 1, 2, 511, BLOCK, BLOCK + 1, 3 * BLOCK + 77, 8 * BLOCK];

/// Returns values of many magnitudes and both signs, with a block of zeros, a block of subnormal values and a block of
/// huge ones.
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

/// Returns the scale of the block that contains an element.
fn scale(codes: BlockCodes, bytes: &[u8], element: usize) -> f64 {
    let record = &bytes[element / codes.block() * codes.record(codes.block())..];
    bf16::from_le_bytes([record[0], record[1]]).to_f64()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns which of the doubled E2M1 numbers is nearest to `units`, and the distance between the two such numbers
/// around `units`.
fn nearest_of_fp4(units: f64) -> (f64, f64) {
    // The numbers in the order of their codes; OCP Microscaling Formats (MX) Specification 1.0, table 5.
    const NUMBERS: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let distance = |code: &usize| (units.abs() - 2.0 * NUMBERS[*code]).abs();
    let nearer = |a: &usize, b: &usize| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    let code = (0..NUMBERS.len()).min_by(nearer).expect("eight codes");
    let step = [4.0, 8.0, 12.0].iter().position(|&end| units.abs() <= end * (1.0 + 1e-6)).expect("not clipped");
    (2.0 * NUMBERS[code] * units.signum(), f64::from(1 << step))
}

/// The expected codes follow from their definition, in f64 and element by element.
#[test]
fn codes_are_the_nearest_and_errors_at_most_half_a_step() {
    for codes in BlockCodes::ALL {
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
                // bf16 has 8 significant bits, and subnormal bf16 numbers are multiples of 2^−133.
                let above = (exact * (1.0 + 1.0 / 128.0)).max(exact + 2f64.powi(-133));
                assert!(scale * (1.0 + f64::from(f32::EPSILON)) >= exact && scale <= above, "{codes:?}, {i}");
                if scale > 0.0 {
                    let units = f64::from(x) / scale;
                    let (nearest, step) = match codes {
                        BlockCodes::Int8 => (units.round_ties_even(), 1.0),
                        BlockCodes::Fp4 => nearest_of_fp4(units),
                    };
                    assert!((units - nearest).abs() <= step / 2.0 && nearest.abs() <= f64::from(codes.largest()));
                    assert_eq!(f64::from(restored), nearest * scale, "{codes:?}, {i}: {x:e}");
                } else {
                    assert_eq!((x, restored), (0.0, 0.0));
                }
            }
        }
    }
}

/// Quantizes and dequantizes with the formula of DeepSpeed 0.19 (`csrc/includes/quantization_utils.h`,
/// `Params<Type::Symmetric, …>`), in f64.
fn of_deepspeed(src: &[f32], steps: f64) -> Vec<f64> {
    let largest = src.iter().fold(0.0f64, |max, &x| f64::from(x).abs().max(max));
    let code = |x: f32| (f64::from(x) * steps / largest).round_ties_even().clamp(-steps, steps - 1.0);
    src.iter().map(|&x| if largest == 0.0 { 0.0 } else { code(x) * largest / steps }).collect()
}

#[test]
fn errors_are_smaller_than_those_of_the_formula_of_deepspeed() {
    // A Laplace distribution: most elements are small, like those of gradients.
    let laplace = |i: usize| {
        let rank = ((i * 733) % 4093 + 1) as f32 / 4095.0;
        -rank.ln() * if i % 3 == 1 { -1.0 } else { 1.0 }
    };
    let of_laplace = (0..4 * BLOCK).map(laplace).collect::<Vec<f32>>();
    let errors = |src: &[f32], of: &[f64]| -> Vec<f64> {
        src.iter().zip(of).map(|(&x, of)| (f64::from(x) - of).abs()).collect()
    };
    for (codes, steps, src) in [(BlockCodes::Int8, 128.0, &values(4 * BLOCK)), (BlockCodes::Fp4, 8.0, &of_laplace)] {
        let dst: Vec<f64> =
            restored(codes, &quantized(Isa::current(), codes, src), src.len()).into_iter().map(f64::from).collect();
        for (src, dst) in src.chunks(codes.block()).zip(dst.chunks(codes.block())) {
            let theirs = of_deepspeed(src, steps);
            let [ours_off, theirs_off] = [dst, &theirs].map(|of| errors(src, of));
            match codes {
                BlockCodes::Int8 => {
                    let worst = |errors: &[f64]| errors.iter().copied().fold(0.0, f64::max);
                    assert!(worst(&ours_off) <= worst(&theirs_off));
                }
                // E2M1 has larger steps near the largest element and smaller steps near 0, where most elements are.
                BlockCodes::Fp4 => {
                    let squares = |errors: &[f64]| errors.iter().map(|error| error * error).sum::<f64>();
                    assert!(squares(&ours_off) <= squares(&theirs_off));
                    let zeros = |of: &[f64]| of.iter().filter(|value| **value == 0.0).count();
                    assert!(zeros(dst) <= zeros(&theirs));
                }
            }
        }
    }
}

#[test]
fn every_instruction_set_has_the_same_bits() {
    for codes in BlockCodes::ALL {
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

/// A range that begins at a block boundary has the same codes, whether it is quantized alone or as part of the whole.
#[test]
fn blocks_do_not_depend_on_where_a_range_is_cut() {
    for codes in BlockCodes::ALL {
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
    for codes in BlockCodes::ALL {
        let src: Vec<f32> = (0..2 * BLOCK + 5).map(|i| (i as f32).sin()).collect();
        same::<bf16>(codes, &src);
        same::<f16>(codes, &src);
    }
}

#[test]
fn a_block_with_a_number_that_is_not_finite_becomes_nan() {
    for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for codes in BlockCodes::ALL {
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
    for codes in BlockCodes::ALL {
        let bytes = codes.bytes(600);
        assert!(codes.quantize(&[1.0; 600], &mut vec![0; bytes - 1]).is_err());
        assert!(codes.quantize_half(&[bf16::ONE; 600], &mut vec![0; bytes + 1]).is_err());
        assert!(codes.dequantize(&vec![0; bytes - 1], &mut [0.0; 600]).is_err());
        assert!(codes.dequantize_half(&vec![0; bytes + 1], &mut [bf16::ONE; 600]).is_err());
        assert!(codes.add(&vec![0; bytes + 1], &mut [0.0; 600]).is_err());
    }
    assert_eq!((BlockCodes::Int8.bytes(513), BlockCodes::Fp4.bytes(513)), (514 + 3, 2 * 130 + 3));
}
