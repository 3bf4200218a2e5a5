//! A parameter in the manifest: its shape, its pieces, and how it was cut or quantized.

use std::ops::Range;

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};
use zero_model::Parameter;
use zero_model::ops::{Cut, Quantization};
use zero_partition::part_of_state;

use super::LocalPiece;

/// A parameter and where its elements are stored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterEntry {
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// Whether the parameter was frozen, so that it has no optimizer state. The key is left out if it was not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// The number of values of each optimizer state, if the optimizer updated the parameter as a whole matrix. Each
    /// value of a state is stored in the piece that has the element with the same index. All values beyond the last
    /// element are stored with the last element. A matrix may have only the first few states of the run. The key is
    /// left out for other parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_values: Option<Vec<usize>>,
    /// The names of the parameter's optimizer states, if they are not the first states of the run because another
    /// optimizer updates the parameter. Otherwise the key is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub states: Option<Vec<String>>,
    /// How the parameter was stored if it was quantized. The key is left out if it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantized: Option<QuantizedEntry>,
    /// How the ranks of a tensor group cut the parameter. The key is left out if they did not cut it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<CutEntry>,
    /// Consecutive ranges that cover the row-major elements, or the bytes of a quantized parameter, without gaps. If
    /// the parameter was cut, they cover the slice of each rank, one slice after the other. The tensors of a piece are
    /// named `name@start` for the parameter and `name@start/state` for an optimizer state. All are F32, except that the
    /// bytes of a quantized parameter are U8.
    pub pieces: Vec<PieceEntry>,
    /// Further tensors that the replicates of a run with local steps save. The key is left out without local steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub local: Vec<LocalPiece>,
}

impl ParameterEntry {
    /// Returns the element type of the parameter's tensors.
    pub(crate) fn dtype(&self) -> Dtype {
        if self.quantized.is_some() { Dtype::U8 } else { Dtype::F32 }
    }

    /// Returns the number of tensors of each piece: the parameter and its optimizer states. `states` is the number of
    /// states of the run.
    #[must_use]
    pub fn tensors_per_piece(&self, states: usize) -> usize {
        1 + match (self.frozen, &self.state_values, &self.states) {
            (true, ..) => 0,
            (false, Some(values), _) => values.len(),
            (false, None, Some(own)) => own.len(),
            (false, None, None) => states,
        }
    }

    /// Returns the names of the parameter's optimizer states; `all` lists those of the run.
    pub(crate) fn own_states<'a>(&'a self, all: &'a [String]) -> &'a [String] {
        let names = self.states.as_deref().unwrap_or(all);
        &names[..names.len().min(self.tensors_per_piece(all.len()) - 1)]
    }

    /// Returns the number of elements of each slice of a parameter with `elements` elements.
    pub(super) fn slices(&self, elements: usize) -> Result<Vec<usize>, String> {
        match &self.cut {
            None => Ok(vec![elements]),
            // `Manifest::check` has compared the number of ranks with the number of shards, and multiplied the sizes of
            // the shape.
            Some(cut) => {
                let of_slice = |slice| {
                    let Some(cut) = self.slice(slice)? else { return Ok(0) };
                    match cut.whole().iter().product::<usize>() {
                        whole if whole == elements => Ok(cut.elements()),
                        whole => Err(format!("its slices are parts of {whole} of {elements} elements")),
                    }
                };
                (0..cut.ranks).map(of_slice).collect()
            }
        }
    }

    /// Returns how a slice was cut from the parameter; `None` if it is the whole parameter.
    pub(crate) fn slice(&self, slice: usize) -> Result<Option<Cut>, String> {
        let Some(cut) = &self.cut else { return Ok(None) };
        let rows_of_bytes = self.quantized.as_ref().map(|quantized| cut.shape_of_bytes(quantized.bytes));
        let shape = rows_of_bytes.as_ref().map_or(&*self.shape, |shape| shape);
        let cut = Cut::after_shared(cut.shared, shape, cut.dimension, &cut.parts, (slice, cut.ranks));
        cut.map(Some).map_err(|error| error.to_string())
    }

    /// Returns the number of values of the parameter and of its optimizer states; `states` is the number of states of
    /// the run.
    #[must_use]
    pub fn stored_values(&self, states: usize) -> usize {
        let elements = self.shape.iter().fold(1usize, |product, &size| product.saturating_mul(size));
        let tensors =
            (0..self.tensors_per_piece(states)).map(|tensor| self.stored(tensor.checked_sub(1), 0..elements).len());
        tensors.fold(0, usize::saturating_add)
    }

    /// Returns the range of a state's values that is stored with a range of elements. `state` is an index into the
    /// parameter's states; `None` stands for the parameter itself.
    pub(crate) fn stored(&self, state: Option<usize>, range: Range<usize>) -> Range<usize> {
        match state.and_then(|state| self.state_values.as_ref()?.get(state)) {
            Some(&values) => part_of_state(range, self.shape.iter().product(), values),
            None => range,
        }
    }
}

/// How the ranks of a tensor group cut a parameter into slices, one per rank. One dimension of the parameter is the
/// concatenation of parts. Each part is divided into shares of ⌈length / ranks⌉ indices; the last shares may be shorter
/// or empty. A slice has one share of each part, and all indices before the parts. If the parameter is quantized, its
/// bytes are cut as a matrix with one row per output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CutEntry {
    /// The dimension, counted from 0.
    pub dimension: usize,
    /// Number of indices before the parts; every slice contains them. In an 8-bit parameter that is cut along its
    /// inputs, they are the bytes of each output's scale. The key is left out if it is 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared: usize,
    /// Lengths of the parts.
    pub parts: Vec<usize>,
    /// Number of slices.
    pub ranks: usize,
}

impl CutEntry {
    pub(crate) fn of(parameter: &Parameter) -> Option<Self> {
        let entry = |cut: &Cut| Self {
            dimension: cut.dimension(),
            shared: cut.shared(),
            parts: cut.parts().to_vec(),
            ranks: cut.ranks(),
        };
        parameter.stored_cut().map(entry)
    }

    /// Returns the shape of a quantized parameter's bytes as a matrix. One of its dimensions is the concatenation of
    /// the shared indices and the parts.
    fn shape_of_bytes(&self, bytes: usize) -> [usize; 2] {
        let parts = self.parts.iter().copied().fold(self.shared, usize::saturating_add);
        let others = bytes / parts.max(1);
        if self.dimension == 0 { [parts, others] } else { [others, parts] }
    }
}

/// The format of a quantized parameter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantizedEntry {
    /// Name of the format: see [`QuantizedFormat::name`](zero_model::ops::QuantizedFormat::name).
    pub format: String,
    /// Number of bytes of the whole parameter.
    pub bytes: usize,
}

impl QuantizedEntry {
    /// Describes a parameter; `None` if it is not quantized.
    pub(crate) fn of(parameter: &Parameter) -> Option<Self> {
        let bytes = parameter.stored_cut().map(|cut| cut.whole().iter().product());
        let entry = |of: Quantization| Self {
            format: of.format().name().to_string(),
            bytes: bytes.unwrap_or_else(|| of.bytes()),
        };
        parameter.quantization().map(entry)
    }
}

/// A range of a parameter and the shard that stores it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceEntry {
    /// Index into `shards`.
    pub shard: usize,
    /// Index of the slice, if the parameter was cut. The key is left out for slice 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub slice: usize,
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
    /// CRC-32 (IEEE) of the bytes of each tensor of the piece: first the parameter, then each state in the order of
    /// `states`.
    pub crc32: Vec<u32>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(crate) fn is_zero(number: &usize) -> bool {
    *number == 0
}
