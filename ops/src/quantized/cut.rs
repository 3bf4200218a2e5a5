//! Cuts quantized weights among the ranks of a tensor group. Each part keeps the codes and scales of the whole weight.

use candle_core::{Error, Result, bail};
use std::ops::Range;

use super::{BLOCK, FLOAT, Quantization, QuantizedFormat};
use crate::tensor::{Cut, Run};

impl Quantization {
    /// Returns the part of a whole weight's bytes that belongs to a rank of a tensor group. `cut` describes how the
    /// parameter is cut, and `self` describes the rank's part. The result describes the bytes as a matrix with a row
    /// for each output. In 8 bits, every rank has the scales of its outputs.
    ///
    /// # Errors
    /// Fails if the part does not consist of whole blocks of 64 elements. A weight with double quantization cannot be
    /// cut, because its scales are quantized in groups that span rows.
    pub fn cut_of_bytes(&self, cut: &Cut) -> Result<Cut> {
        let [inputs, outputs] = self.dimensions().map(|at| cut.whole()[at]);
        if self.is_cut_along_inputs(cut) && (cut.parts().len() > 1 || !inputs.is_multiple_of(cut.ranks())) {
            bail!("{inputs} inputs of a quantized weight cannot be divided evenly among {} ranks", cut.ranks());
        }
        let (row, scale) = match self.format {
            QuantizedFormat::Int8 => (FLOAT + inputs, FLOAT),
            QuantizedFormat::Four { double: true, .. } => {
                bail!(
                    "a weight in the format {} cannot be split across ranks\n  help: switch double quantization off",
                    self.format.name()
                )
            }
            QuantizedFormat::Four { .. } => {
                if !inputs.is_multiple_of(BLOCK) || !self.inputs.is_multiple_of(BLOCK) {
                    let own = self.inputs;
                    bail!(
                        "blocks of {BLOCK} elements cannot be split: a row has {inputs} elements, and a rank {own} of \
                         them\n  help: give each rank a multiple of {BLOCK} elements, or list the module in \
                         `quantization_config.llm_int8_skip_modules`"
                    );
                }
                (inputs / BLOCK * self.record_bytes(), 0)
            }
        };
        let place = (cut.index(), cut.ranks());
        match self.is_cut_along_inputs(cut) {
            true => Cut::after_shared(scale, &[outputs, row], 1, &[row - scale], place),
            false => Cut::new(&[outputs, row], 0, cut.parts(), place),
        }
    }

    /// Returns whether scales depend on elements that other ranks have. This is so for an int8 weight that is cut along
    /// its inputs.
    #[must_use]
    pub fn shares_scales(&self, cut: &Cut) -> bool {
        self.format == QuantizedFormat::Int8 && self.is_cut_along_inputs(cut)
    }

    /// Does the same as [`Quantization::quantize`] for a part that [shares scales](Quantization::shares_scales) with
    /// other ranks. `read` fills a slice with elements of the whole parameter.
    ///
    /// # Errors
    /// Fails in the same cases.
    pub fn quantize_part<E: From<Error>>(
        &self,
        cut: &Cut,
        bytes: Range<usize>,
        read: impl FnMut(usize, &mut [f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<Vec<u8>, E> {
        let of_bytes = self.cut_of_bytes(cut)?;
        let whole = Self { inputs: cut.whole()[self.dimensions()[0]], ..*self };
        let [start, end] = [bytes.start, bytes.end].map(|at| at / self.record_bytes() * whole.record_bytes());
        let rows = whole.quantize(start..end, read)?;
        let mut own = Vec::with_capacity(bytes.len());
        for Run { local, whole } in of_bytes.runs(bytes) {
            own.extend_from_slice(&rows[whole - start..][..local.len()]);
        }
        Ok(own)
    }

    /// Returns the dimensions of the parameter that count inputs and outputs.
    fn dimensions(&self) -> [usize; 2] {
        if self.is_transposed { [0, 1] } else { [1, 0] }
    }

    fn is_cut_along_inputs(&self, cut: &Cut) -> bool {
        cut.dimension() == self.dimensions()[0]
    }
}
