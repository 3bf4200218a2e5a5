//! Weights stored with 4 or 8 bits per element, in the formats of bitsandbytes.
//!
//! A quantized weight is a sequence of *records*. Each record can be read without the others, so a weight may be split
//! between any two records:
//!
//! | format | elements | bytes of a record |
//! |---|---|---|
//! | NF4, FP4 | 64 | scale (f32), 32 bytes of codes |
//! | the same, double quantization | 16,384 | offset (f32), scale of scales (f32), 256 codes of scales, 8,192 bytes of codes |
//! | int8 | one output | scale (f32), one i8 per input |
//!
//! The last record of a weight may be shorter. The elements are those of the matrix `[outputs, inputs]`, row after row.
//! A byte holds two 4-bit codes, the first one in its upper half. Codes and scales are those of bitsandbytes 0.50:
//! `quantize_4bit` in blocks of 64, and `int8_vectorwise_quant`. NF4 and double quantization: Dettmers, Pagnoni,
//! Holtzman, Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023; int8: Dettmers, Lewis,
//! Belkada, Zettlemoyer, "LLM.int8()", NeurIPS 2022.
//!
//! The offset of double quantization is the mean of all scales of a weight. It is summed in f64, so that every machine
//! computes the same value. PyTorch sums in f32, which may differ in the last bits.

mod build;
mod codec;
mod cut;
mod tables;

pub(crate) use build::weight;
pub use build::{QuantizationOptions, asks_inputs_first, asks_quantized, with_quantization};

use crate::kernel::Isa;
use candle_core::{CpuStorage, Error, Result, bail};
use codec::{decode_block, decode_row, encode_block, encode_row, encode_scales};
use std::ops::Range;
use tables::scale_codes;
use zero_model_options::FourBit;

/// Number of elements that share a scale.
const BLOCK: usize = 64;
/// Number of scales that share a second-level scale in double quantization.
const SCALES: usize = 256;
/// Number of bytes of an f32.
const FLOAT: usize = 4;
/// Number of elements that are read at a time while a weight is quantized. As f32 they have 4 MiB.
const PORTION: usize = 1 << 20;

/// How the elements of a weight are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizedFormat {
    /// Blocks of 64 elements, each with its own scale.
    Four {
        /// The values of the codes.
        code: FourBit,
        /// Whether the scales are quantized too, to 8 bits.
        double: bool,
    },
    /// Signed bytes, with a scale for each output.
    Int8,
}

impl QuantizedFormat {
    /// Returns the name: `nf4`, `nf4-double`, `fp4`, `fp4-double` or `int8`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Four { code: FourBit::Nf4, double: false } => "nf4",
            Self::Four { code: FourBit::Nf4, double: true } => "nf4-double",
            Self::Four { code: FourBit::Fp4, double: false } => "fp4",
            Self::Four { code: FourBit::Fp4, double: true } => "fp4-double",
            Self::Int8 => "int8",
        }
    }
}

/// The format and the size of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    format: QuantizedFormat,
    outputs: usize,
    inputs: usize,
    is_transposed: bool,
}

impl Quantization {
    /// Describes the weight of a linear layer. With `is_transposed`, the parameter has shape `[inputs, outputs]`, as in
    /// [`Conv1D`](crate::Conv1D), but its elements are stored in the order of `[outputs, inputs]`.
    #[must_use]
    pub fn new(format: QuantizedFormat, inputs: usize, outputs: usize, is_transposed: bool) -> Self {
        Self { format, outputs, inputs, is_transposed }
    }

    /// Returns the format.
    #[must_use]
    pub fn format(&self) -> QuantizedFormat {
        self.format
    }

    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.inputs, self.outputs)
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.outputs * self.inputs
    }

    /// Returns the size in bytes of the stored weight.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let (full, rest) = (self.elements() / self.record_elements(), self.elements() % self.record_elements());
        full * self.record_bytes() + if rest > 0 { self.bytes_of(rest) } else { 0 }
    }

    fn record_elements(&self) -> usize {
        match self.format {
            QuantizedFormat::Four { double: false, .. } => BLOCK,
            QuantizedFormat::Four { double: true, .. } => BLOCK * SCALES,
            QuantizedFormat::Int8 => self.inputs,
        }
    }

    /// Returns the size in bytes of a full record. The weight may be split at multiples of this size.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        self.bytes_of(self.record_elements())
    }

    /// Returns the size in bytes of a record with this many elements.
    fn bytes_of(&self, elements: usize) -> usize {
        match self.format {
            QuantizedFormat::Four { double: false, .. } => FLOAT + elements.div_ceil(2),
            QuantizedFormat::Four { double: true, .. } => 2 * FLOAT + elements.div_ceil(BLOCK) + elements.div_ceil(2),
            QuantizedFormat::Int8 => FLOAT + elements,
        }
    }

    /// Returns the range of elements whose records are in a range of bytes. The bytes must begin and end between
    /// records.
    fn elements_in(&self, bytes: &Range<usize>) -> Range<usize> {
        let at = |byte: usize| match byte >= self.bytes() {
            true => self.elements(),
            false => byte / self.record_bytes() * self.record_elements(),
        };
        at(bytes.start)..at(bytes.end)
    }

    /// Quantizes the elements that are stored in a range of bytes. The range must begin and end between records. `read`
    /// fills a slice with the parameter's elements starting at an index, in the parameter's own order. Each call of
    /// `read` asks for a few MiB. A transposed weight is held in memory as a whole, because its elements change places.
    ///
    /// # Errors
    /// Fails if an element is infinite or not a number. Returns errors of `read`.
    pub fn quantize<E: From<Error>>(
        &self,
        bytes: Range<usize>,
        mut read: impl FnMut(usize, &mut [f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<Vec<u8>, E> {
        if !self.is_transposed {
            return self.quantize_in_order(bytes, read);
        }
        let (inputs, outputs) = self.sizes();
        let mut all = vec![0.0; self.elements()];
        let mut row = vec![0.0; outputs];
        for input in 0..inputs {
            read(input * outputs, &mut row)?;
            for (output, &value) in row.iter().enumerate() {
                all[output * inputs + input] = value;
            }
        }
        self.quantize_in_order(bytes, |start, out| {
            out.copy_from_slice(&all[start..start + out.len()]);
            Ok(())
        })
    }

    /// Does the same as [`Quantization::quantize`], for elements in the order in which they are stored.
    fn quantize_in_order<E: From<Error>>(
        &self,
        bytes: Range<usize>,
        mut read: impl FnMut(usize, &mut [f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<Vec<u8>, E> {
        let own = self.elements_in(&bytes);
        let unit = match self.format {
            QuantizedFormat::Four { .. } => BLOCK,
            QuantizedFormat::Int8 => self.inputs,
        };
        // The offset of double quantization is the mean of all scales of the whole weight.
        let is_double = matches!(self.format, QuantizedFormat::Four { double: true, .. });
        let wanted = if is_double { 0..self.elements() } else { own.clone() };
        let step = (PORTION / unit).max(1) * unit;
        let mut room = vec![0.0; step.min(wanted.len())];
        let mut out = vec![0; bytes.len()];
        let (mut sum, mut scales) = (0.0f64, vec![]);
        for start in wanted.clone().step_by(step) {
            let values = &mut room[..step.min(wanted.end - start)];
            read(start, values)?;
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                let (inputs, element) = (self.inputs, start + at);
                let message = format!(
                    "cannot quantize {} at output {}, input {}: a quantized weight must be finite",
                    values[at],
                    element / inputs,
                    element % inputs
                );
                return Err(Error::Msg(message).into());
            }
            for (index, values) in values.chunks(unit).enumerate() {
                let element = start + index * unit;
                let record = (own.contains(&element)).then(|| {
                    let at = (element / self.record_elements() * self.record_bytes()) - bytes.start;
                    (at, element % self.record_elements())
                });
                let QuantizedFormat::Four { code, double } = self.format else {
                    if let Some((at, _)) = record {
                        encode_row(values, &mut out[at..]);
                    }
                    continue;
                };
                let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                // In a shorter last block, bitsandbytes divides by the scale instead of multiplying by its reciprocal,
                // and stores a scale of at least `SMALLEST`.
                let is_last = values.len() < BLOCK;
                let scale = if is_last { largest.max(SMALLEST) } else { largest };
                if double {
                    sum += f64::from(scale);
                }
                let Some((at, inside)) = record else { continue };
                let first = if double { 2 * FLOAT + self.scales_at(element) } else { FLOAT };
                let codes = &mut out[at + first + inside / 2..][..values.len().div_ceil(2)];
                let mut scaled = [0.0; BLOCK];
                for (scaled, value) in scaled.iter_mut().zip(values) {
                    *scaled = match is_last {
                        true => value / scale,
                        false => value * (1.0 / largest.max(SMALLEST)),
                    };
                }
                encode_block(Isa::current(), code, &scaled, codes);
                match double {
                    true => scales.push(scale),
                    false => out[at..at + FLOAT].copy_from_slice(&scale.to_le_bytes()),
                }
            }
        }
        if is_double {
            let offset = (sum / self.elements().div_ceil(BLOCK) as f64) as f32;
            for (record, scales) in scales.chunks(SCALES).enumerate() {
                encode_scales(scales, offset, &mut out[record * self.record_bytes()..]);
            }
        }
        Ok(out)
    }

    /// Returns the number of scales in the record of an element.
    fn scales_at(&self, element: usize) -> usize {
        let start = element / self.record_elements() * self.record_elements();
        (self.elements() - start).min(self.record_elements()).div_ceil(BLOCK)
    }

    /// Returns all elements as f32, in the parameter's own order. `bytes` is the whole stored weight.
    ///
    /// # Errors
    /// Fails if the number of bytes is wrong.
    pub fn dequantize(&self, bytes: &[u8]) -> Result<Vec<f32>> {
        let weight = QuantizedWeight::new(bytes, *self)?;
        let mut values = vec![0.0; self.elements()];
        weight.read(Isa::current(), 0, &mut values);
        if !self.is_transposed {
            return Ok(values);
        }
        let (inputs, outputs) = self.sizes();
        Ok((0..inputs * outputs).map(|at| values[at % outputs * inputs + at / outputs]).collect())
    }
}

/// The smallest divisor, so that a block of zeros is not divided by zero. bitsandbytes uses the same value.
const SMALLEST: f32 = 1e-38;

/// Makes storage of a quantized weight. No operation of candle accepts its dtype, so reading such a tensor as numbers
/// is an error.
#[must_use]
pub fn quantized_storage(bytes: Vec<u8>) -> CpuStorage {
    CpuStorage::F6E2M3(bytes)
}

/// Returns the bytes of storage that [`quantized_storage`] made, or `None` for other storage.
#[must_use]
pub fn quantized_bytes(storage: &CpuStorage) -> Option<&[u8]> {
    match storage {
        CpuStorage::F6E2M3(bytes) => Some(bytes),
        _ => None,
    }
}

/// A stored weight whose elements are read as f32.
#[derive(Clone, Copy)]
pub(crate) struct QuantizedWeight<'a> {
    bytes: &'a [u8],
    is: Quantization,
    /// The first element of this view.
    start: usize,
}

impl<'a> QuantizedWeight<'a> {
    pub(crate) fn new(bytes: &'a [u8], is: Quantization) -> Result<Self> {
        if bytes.len() != is.bytes() {
            bail!(
                "a {} weight of {} elements has {} bytes, not {}",
                is.format.name(),
                is.elements(),
                is.bytes(),
                bytes.len()
            );
        }
        Ok(Self { bytes, is, start: 0 })
    }

    pub(crate) fn elements(&self) -> usize {
        self.is.elements() - self.start
    }

    /// Returns the elements starting at `start`.
    pub(crate) fn skip(self, start: usize) -> Self {
        Self { start: self.start + start, ..self }
    }

    /// Dequantizes the elements of the matrix `[outputs, inputs]` starting at `start`.
    pub(crate) fn read(&self, isa: Isa, start: usize, out: &mut [f32]) {
        let (mut at, mut rest) = (self.start + start, out);
        let unit = if let QuantizedFormat::Int8 = self.is.format { self.is.inputs } else { BLOCK };
        while !rest.is_empty() {
            let len = (unit - at % unit).min(rest.len());
            let (now, later) = rest.split_at_mut(len);
            let (record, inside) = (at / self.is.record_elements(), at % self.is.record_elements());
            let record = &self.bytes[record * self.is.record_bytes()..];
            match self.is.format {
                QuantizedFormat::Int8 => decode_row(isa, &record[FLOAT + inside..][..len], float(record), now),
                QuantizedFormat::Four { code, double } => {
                    let (scale, codes) = match double {
                        false => (float(record), &record[FLOAT..]),
                        true => {
                            let (head, codes) = record[2 * FLOAT..].split_at(self.is.scales_at(at));
                            let scale = scale_codes()[usize::from(head[inside / BLOCK])] * float(&record[FLOAT..]);
                            (scale + float(record), codes)
                        }
                    };
                    decode_block(isa, code, &codes[inside / 2..], inside % 2 == 1, scale, now);
                }
            }
            at += len;
            rest = later;
        }
    }
}

fn float(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(f32::NAN, |bytes| f32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests;
