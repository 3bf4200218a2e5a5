//! Tests that quantized weights are read back unchanged from any range, that shards are parts of the whole, and that
//! products accept quantized operands.

use super::*;
use crate::random::Stream;

const FORMATS: [QuantizedFormat; 5] = [
    QuantizedFormat::Four { code: FourBit::Nf4, double: false },
    QuantizedFormat::Four { code: FourBit::Nf4, double: true },
    QuantizedFormat::Four { code: FourBit::Fp4, double: false },
    QuantizedFormat::Four { code: FourBit::Fp4, double: true },
    QuantizedFormat::Int8,
];

fn normal(name: &str, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Stream::new(1, name, 0).fill_normal(0, &mut values);
    values
}

fn quantized(is: &Quantization, values: &[f32], bytes: Range<usize>) -> Vec<u8> {
    let read = |start: usize, out: &mut [f32]| -> Result<()> {
        out.copy_from_slice(&values[start..start + out.len()]);
        Ok(())
    };
    is.quantize(bytes, read).unwrap()
}

#[test]
fn errors_are_small_and_shards_match_the_whole() {
    for format in FORMATS {
        for (inputs, outputs) in [(64, 300), (96, 512), (7, 13), (1, 1), (200, 1001)] {
            let is = Quantization::new(format, inputs, outputs, false);
            let values = normal("w", is.elements());
            let whole = quantized(&is, &values, 0..is.bytes());
            assert_eq!(whole.len(), is.bytes());
            let back = is.dequantize(&whole).unwrap();
            let largest = values.iter().fold(0.0f32, |largest, v| largest.max(v.abs()));
            // The tolerance is half the widest gap between two values, plus the error of 8-bit scales.
            let near = largest * if let QuantizedFormat::Int8 = format { 0.6 / 127.0 } else { 0.2 };
            for (value, back) in values.iter().zip(&back) {
                assert!((value - back).abs() <= near, "{format:?}: {back} for {value}");
            }
            let records = is.bytes().div_ceil(is.record_bytes());
            for cut in [0, 1, records / 2, records] {
                let at = (cut * is.record_bytes()).min(is.bytes());
                let parts = [quantized(&is, &values, 0..at), quantized(&is, &values, at..is.bytes())];
                assert!(parts.concat() == whole, "{format:?} {inputs}x{outputs} cut at record {cut}");
            }
            let weight = QuantizedWeight::new(&whole, is).unwrap();
            for (start, len) in [(0, 1), (1, 1), (1, 70), (63, 2), (5, 300)] {
                let (start, mut part) = (start.min(is.elements()), vec![0.0; len]);
                part.truncate(is.elements() - start);
                weight.read(Isa::current(), start, &mut part);
                assert_eq!(part, back[start..start + part.len()], "{format:?} {start}");
                let mut skipped = vec![0.0; part.len()];
                weight.skip(start).read(Isa::current(), 0, &mut skipped);
                assert_eq!(skipped, part);
            }
        }
    }
}

#[test]
fn a_transposed_weight_is_stored_by_outputs() {
    for format in FORMATS {
        let (plain, turned) = (Quantization::new(format, 40, 70, false), Quantization::new(format, 40, 70, true));
        let values = normal("w", 40 * 70);
        let other: Vec<f32> = (0..40 * 70).map(|at| values[at % 70 * 40 + at / 70]).collect();
        let bytes = quantized(&plain, &values, 0..plain.bytes());
        assert!(bytes == quantized(&turned, &other, 0..turned.bytes()));
        let (back, turned) = (plain.dequantize(&bytes).unwrap(), turned.dequantize(&bytes).unwrap());
        assert!((0..40 * 70).all(|at| turned[at] == back[at % 70 * 40 + at / 70]));
    }
}

#[test]
fn zeros_stay_zero_and_other_numbers_are_refused() {
    for format in FORMATS {
        let is = Quantization::new(format, 65, 3, false);
        let bytes = quantized(&is, &[0.0; 195], 0..is.bytes());
        // In bitsandbytes, the scale of a shorter last block is never zero, so the mean of the scales is never zero.
        assert!(is.dequantize(&bytes).unwrap().iter().all(|value| value.abs() < 1e-37), "{format:?}");
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = vec![1.0; 195];
            values[70] = bad;
            let read = |start: usize, out: &mut [f32]| -> Result<()> {
                out.copy_from_slice(&values[start..start + out.len()]);
                Ok(())
            };
            let error = is.quantize(0..is.bytes(), read).unwrap_err().to_string();
            assert!(error.contains("output 1, input 5"), "{error}");
        }
    }
}

/// A product with a quantized operand is bit-identical to the product with the dequantized operand, on either side.
#[test]
fn products_equal_those_of_dequantized_operands() {
    use crate::product::{Elements, Matrix, product};
    for format in FORMATS {
        for (inputs, outputs, count) in [(64, 96, 5), (700, 130, 33), (33, 17, 3), (1030, 50, 9)] {
            let is = Quantization::new(format, inputs, outputs, false);
            let bytes = quantized(&is, &normal("w", is.elements()), 0..is.bytes());
            let (values, weight) = (is.dequantize(&bytes).unwrap(), QuantizedWeight::new(&bytes, is).unwrap());
            let (x, dy) = (normal("x", count * inputs), normal("dy", count * outputs));
            let run = |w: Elements<'_>| {
                let (mut y, mut dx) = (vec![0.0; count * outputs], vec![0.0; count * inputs]);
                let (mut left, mut turned) = (y.clone(), dx.clone());
                let (x, dy) = (Matrix::new(&x, count, inputs), Matrix::new(&dy, count, outputs));
                let w = Matrix::new(w, outputs, inputs);
                product(&mut y, x, w.t(), 2);
                product(&mut dx, dy, w, 2);
                product(&mut left, w, x.t(), 2);
                product(&mut turned, w.t(), dy.t(), 2);
                [y, dx, left, turned].concat()
            };
            let (want, got) = (run(Elements::F32(&values)), run(Elements::Quantized(weight)));
            let same = want.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{format:?} {inputs}x{outputs}");
        }
    }
}
