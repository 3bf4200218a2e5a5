//! Codes of blocks, and the values and sums restored from them, are bit-identical to those of the CPU.

use std::ops::Range;

use half::{bf16, f16};
use zero_kernels::Dtype;
use zero_kernels::block_codes::{Coded, Senders, dequantize, quantize};
use zero_optim::BlockCodes;

use crate::{Memory, numbers, on_device, rounded};

const COUNT: usize = 6000;
/// Ranges of one launch: their starts are not aligned, and most of their last blocks are short.
const RANGES: [Range<usize>; 5] = [0..1, 3..515, 515..515, 518..4700, 4701..6000];
const SENDERS: usize = 3;

/// Values of many magnitudes, with a block of zeros and, if `has_nan`, a NaN and an infinity in the last range.
fn values(seed: u32, has_nan: bool) -> Vec<f32> {
    let scale = |i: usize| [1.0, 1e-30, 0.0, 1e30, 1e-3, 3e-39, 7.0][i / 512 % 7];
    let mut values: Vec<f32> = numbers(seed, COUNT).iter().enumerate().map(|(i, x)| x.powi(3) * scale(i)).collect();
    if has_nan {
        (values[4800], values[5900]) = (f32::NAN, f32::NEG_INFINITY);
    }
    values
}

/// Codes of the CPU, range by range.
fn coded_on_cpu(codes: BlockCodes, dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let of_range = |range: Range<usize>| {
        let values = &values[range];
        let mut bytes = vec![0; codes.bytes(values.len())];
        match dtype {
            Dtype::F32 => codes.quantize(values, &mut bytes),
            Dtype::Bf16 => {
                codes.quantize_half(&values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), &mut bytes)
            }
            Dtype::F16 => {
                codes.quantize_half(&values.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), &mut bytes)
            }
        }
        .unwrap();
        bytes
    };
    RANGES.into_iter().flat_map(of_range).collect()
}

/// The ranges of values at an address, whose codes follow each other.
fn ranges(codes: BlockCodes, dtype: Dtype, values: u64, mut at: u64) -> Vec<Coded> {
    let of_range = |range: Range<usize>| {
        let coded =
            Coded { values: values + (range.start * dtype.bytes()) as u64, codes: at, count: range.len() as u64 };
        at += codes.bytes(range.len()) as u64;
        coded
    };
    RANGES.into_iter().map(of_range).collect()
}

/// Bytes as words; the last word ends with zeros.
fn words(bytes: &[u8]) -> Vec<u32> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.as_chunks().0.iter().map(|&word| u32::from_ne_bytes(word)).collect()
}

#[test]
fn codes_are_bit_identical_to_the_cpus() {
    for (codes, dtype, has_nan) in cases() {
        let src = rounded(dtype, &values(1, has_nan));
        let want = coded_on_cpu(codes, dtype, &src);
        let Some(found) = on_device(|device| {
            let (mut from, mut to) = (Memory::floats(dtype, &src), Memory::unwritten(want.len()));
            device.run(&quantize(dtype, codes, &ranges(codes, dtype, from.address(), to.address())).unwrap());
            to.bytes()
        }) else {
            return;
        };
        assert!(found == want, "{codes:?}, {dtype:?}, with NaN: {has_nan}");
    }
}

/// The sum of several senders is computed in f32, in their order, and rounded once.
#[test]
fn sums_of_codes_are_bit_identical_to_the_cpus() {
    for (codes, dtype, has_nan) in cases() {
        for (senders, adds) in [(1, false), (SENDERS, false), (SENDERS, true)] {
            let of_sender = |sender: usize| coded_on_cpu(codes, Dtype::F32, &values(sender as u32, has_nan));
            let all: Vec<Vec<u8>> = (0..senders).map(of_sender).collect();
            let apart = all[0].len();
            let Some(found) = on_device(|device| {
                let mut from = Memory::integers(&words(&all.concat()));
                let mut to = Memory::floats(dtype, &vec![7.0; COUNT]);
                let ranges = ranges(codes, dtype, to.address(), from.address());
                device.run(&dequantize(dtype, codes, &ranges, Senders { count: senders, apart, adds }).unwrap());
                // Compared as bits, because a NaN does not equal itself.
                to.to_floats(dtype).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            }) else {
                return;
            };
            let mut want = vec![7.0; COUNT];
            let mut at = 0;
            for range in RANGES {
                let bytes = at..at + codes.bytes(range.len());
                at = bytes.end;
                let rest = if adds { 0 } else { 1 };
                if !adds {
                    codes.dequantize(&all[0][bytes.clone()], &mut want[range.clone()]).unwrap();
                }
                all[rest..].iter().for_each(|of| codes.add(&of[bytes.clone()], &mut want[range.clone()]).unwrap());
            }
            let want = rounded(dtype, &want);
            let is_same = |(&found, want): (&u32, &f32)| {
                found == want.to_bits() || f32::from_bits(found).is_nan() && want.is_nan()
            };
            assert!(
                found.iter().zip(&want).all(is_same),
                "{codes:?}, {dtype:?}, {senders}, {adds}, with NaN: {has_nan}"
            );
            assert_eq!(want.iter().any(|x| x.is_nan()), has_nan);
        }
    }
}

fn cases() -> impl Iterator<Item = (BlockCodes, Dtype, bool)> {
    let both = BlockCodes::ALL.into_iter();
    both.flat_map(|codes| {
        Dtype::ALL.into_iter().flat_map(move |dtype| [false, true].map(|has_nan| (codes, dtype, has_nan)))
    })
}
