//! Stores optimizer states, in memory and on a disk, in f32, in bf16 or in 8 bits.

use std::ops::Range;

use bytemuck::cast_slice_mut;
use half::bf16;
use zero_model::sink::FlatBuffer;
use zero_optim::{EIGHT_BIT_BLOCK, EightBit};

use crate::error::{ZeroError, missing};
use crate::narrow::{Values, blocks};
use crate::segment::part_of_state;
use crate::threads::{round_into, widen};

/// Type of the values of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    Bf16,
    /// A one-byte index for each element, and an f32 for each block of [`EIGHT_BIT_BLOCK`] elements.
    EightBit,
}

/// The format of one kind of a segment's values: the average of the weights, an optimizer state, or the f32 copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) format: Format,
    /// For a matrix, the number of its elements and the number of its values of this kind; `None` if each element has
    /// one value.
    pub(crate) of_matrix: Option<(usize, usize)>,
}

impl Column {
    /// One f32 for each element.
    pub(crate) const F32: Self = Self { format: Format::F32, of_matrix: None };

    /// Returns the number of values for the first `elements` elements, or for a tile of that size.
    pub(crate) fn values(&self, elements: usize) -> usize {
        self.of_matrix.map_or(elements, |(all, values)| part_of_state(0..elements, all, values).len())
    }

    /// Returns the bytes of the values for the first `elements` elements.
    pub(crate) fn bytes(&self, elements: usize) -> usize {
        let values = self.values(elements);
        match self.format {
            Format::F32 => values * size_of::<f32>(),
            Format::Bf16 => values * size_of::<bf16>(),
            Format::EightBit => values + size_of::<f32>() * values.div_ceil(EIGHT_BIT_BLOCK),
        }
    }

    /// Borrows the values of the state `name`, for the first `elements` elements, from the start of `bytes`, which must
    /// be aligned for f32. With 8 bits, the f32 values of all blocks come before the indices.
    pub(crate) fn in_bytes<'a>(&self, name: &str, elements: usize, bytes: &'a mut [u8]) -> Values<'a> {
        let bytes = &mut bytes[..self.bytes(elements)];
        match self.format {
            Format::F32 => Values::F32(cast_slice_mut(bytes)),
            Format::Bf16 => Values::Bf16(cast_slice_mut(bytes)),
            Format::EightBit => {
                let blocks = self.values(elements).div_ceil(EIGHT_BIT_BLOCK);
                let (largest, indices) = bytes.split_at_mut(blocks * size_of::<f32>());
                Values::EightBit(eight_bit_of(name), indices, cast_slice_mut(largest))
            }
        }
    }
}

/// Returns the table of 256 values for the state `name`. A second moment is never negative, so its table is unsigned.
fn eight_bit_of(name: &str) -> EightBit {
    if name == "exp_avg_sq" { EightBit::Unsigned } else { EightBit::Signed }
}

/// One state of a segment, on the device of the segment's state.
#[derive(Debug)]
pub(crate) enum StateBuffer {
    F32(FlatBuffer),
    /// On the host.
    Bf16(Vec<bf16>),
    /// On the host: the indices, and the largest absolute value of each block.
    EightBit(EightBit, Vec<u8>, Vec<f32>),
}

impl StateBuffer {
    /// Returns the 8-bit state `name`, filled with zeros.
    pub(crate) fn eight_bit(name: &str, elements: usize) -> Self {
        Self::EightBit(eight_bit_of(name), vec![0; elements], vec![0.0; elements.div_ceil(EIGHT_BIT_BLOCK)])
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::EightBit(_, indices, _) => indices.len(),
        }
    }

    /// Returns the values for an update on the host; `None` if they are on a GPU.
    pub(crate) fn host_mut(&mut self) -> Option<Values<'_>> {
        match self {
            Self::F32(values) => values.host_mut().map(Values::F32),
            Self::Bf16(values) => Some(Values::Bf16(values)),
            Self::EightBit(of, indices, largest) => Some(Values::EightBit(*of, indices, largest)),
        }
    }

    /// Overwrites values starting at `start`, rounded to nearest. A range of 8-bit states must consist of whole blocks.
    pub(crate) fn write(&mut self, start: usize, values: &[f32]) -> Result<(), ZeroError> {
        match self {
            Self::F32(state) => Ok(state.write(start, values)?),
            narrow => narrow.host_mut().ok_or_else(missing)?.write(start, values),
        }
    }
}

impl Values<'_> {
    /// Overwrites values starting at `start`, rounded to nearest. A range of 8-bit states must consist of whole blocks.
    pub(crate) fn write(self, start: usize, values: &[f32]) -> Result<(), ZeroError> {
        let range = start..start + values.len();
        if range.end > self.len() {
            return Err(missing());
        }
        match self {
            Self::F32(stored) => stored[range].copy_from_slice(values),
            Self::Bf16(stored) => round_into(values, &mut stored[range])?,
            Self::EightBit(of, indices, largest) => {
                let of_blocks = &mut largest[whole_blocks(&range, indices.len())?];
                of.quantize(values, &mut indices[range], of_blocks)?;
            }
        }
        Ok(())
    }

    /// Reads values starting at `start`. A range of 8-bit states must consist of whole blocks; writing the values back
    /// restores all bits.
    pub(crate) fn read(self, start: usize, values: &mut [f32]) -> Result<(), ZeroError> {
        let range = start..start + values.len();
        if range.end > self.len() {
            return Err(missing());
        }
        match self {
            Self::F32(stored) => values.copy_from_slice(&stored[range]),
            Self::Bf16(stored) => widen(&stored[range], values)?,
            Self::EightBit(of, indices, largest) => read_eight_bit(of, (indices, largest), range, values)?,
        }
        Ok(())
    }
}

/// Reads a range of whole blocks. Writing the values back restores all bits.
pub(crate) fn read_eight_bit(
    of: EightBit,
    (indices, largest): (&[u8], &[f32]),
    range: Range<usize>,
    values: &mut [f32],
) -> Result<(), ZeroError> {
    let of_blocks = largest.get(whole_blocks(&range, indices.len())?).ok_or_else(missing)?;
    Ok(of.dequantize_losslessly(&indices[range], of_blocks, values)?)
}

/// Returns the blocks of a range of a state with `elements` elements. The range must begin and end at block boundaries.
fn whole_blocks(range: &Range<usize>, elements: usize) -> Result<Range<usize>, ZeroError> {
    let is_whole = |at: usize| at.is_multiple_of(EIGHT_BIT_BLOCK) || at == elements;
    if range.start > range.end || range.end > elements {
        return Err(missing());
    }
    match is_whole(range.start) && is_whole(range.end) {
        true => Ok(blocks(range)),
        false => Err(ZeroError::internal("a range of states in 8 bits cuts a block")),
    }
}
