//! What an operation takes in memory, told beside its code: a function of shapes, dtypes and threads.

use crate::graph::output::at_once;
use crate::meta;
use crate::parallel::parts;
use candle_core::{DType, Result, Shape, Tensor};

/// An operation that knows what it takes.
pub(crate) trait Footprint {
    /// Whose values its backward reads. Values that nobody reads are let go at the end of a fused block's forward.
    const READS: Reads;

    /// What it takes for these inputs, of which only shape, dtype and whether a gradient is wanted may be looked at.
    ///
    /// # Errors
    /// Shapes that do not fit.
    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs>;
}

/// The tensors whose values a backward reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reads {
    pub(crate) inputs: [bool; 3],
    pub(crate) output: bool,
}

impl Reads {
    pub(crate) const NOTHING: Self = Self::inputs([false; 3]);

    pub(crate) const fn inputs(inputs: [bool; 3]) -> Self {
        Self { inputs, output: false }
    }
}

/// Bytes, all of them; inputs, of which views are contiguous, are not counted.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    /// Of the output.
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// What the operation keeps for its backward, beyond inputs and output.
    pub(crate) saved: u64,
    /// Whether what is saved becomes the gradient that the backward returns.
    pub(crate) hands_over: bool,
    /// The most that the forward needs at a time, beyond the output and what is saved.
    pub(crate) forward: u64,
    /// The most that the backward needs at a time, beyond the gradients that it returns.
    pub(crate) backward: u64,
    /// The inputs whose gradients it returns where they are wanted. Those of parameters go to the sink.
    pub(crate) gradients: [bool; 3],
    /// Where it has parameters: what putting their gradients off takes.
    pub(crate) deferred: Option<DeferredCosts>,
}

impl Costs {
    /// An operation of no parameters that keeps nothing and needs no room.
    pub(crate) fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
            saved: 0,
            hands_over: false,
            forward: 0,
            backward: 0,
            gradients: [true; 3],
            deferred: None,
        }
    }

    /// Of products with an epilogue, which on a GPU take a workspace of the device's memory.
    pub(crate) fn with_epilogue(self) -> Self {
        let workspace = meta::workspace();
        let deferred =
            self.deferred.map(|deferred| DeferredCosts { backward: deferred.backward.max(workspace), ..deferred });
        Self { forward: self.forward.max(workspace), backward: self.backward.max(workspace), deferred, ..self }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct DeferredCosts {
    /// The input that stays until the gradients are made.
    pub(crate) input: Option<usize>,
    /// What else does.
    pub(crate) bytes: u64,
    /// The most that the backward needs at a time, these bytes included, beyond the gradients that it returns.
    pub(crate) backward: u64,
}

/// Bytes of so many elements.
pub(crate) fn bytes(elements: usize, dtype: DType) -> u64 {
    (elements as u64).saturating_mul(dtype.size_in_bytes() as u64)
}

/// Bytes of so many f32.
pub(crate) fn floats(count: usize) -> u64 {
    bytes(count, DType::F32)
}

/// What [`indices`](crate::graph::operand::indices) takes while it makes them, and what they are.
pub(crate) fn indices_room(ids: &Tensor) -> (u64, u64) {
    let indices = (ids.elem_count() * size_of::<usize>()) as u64;
    (indices + bytes(ids.elem_count(), ids.dtype()), indices)
}

/// What [`build_as`](crate::graph::output::build_as) takes beyond its result, for work that reads `operands` buffers of `dtype` as
/// wide as what it writes: where the dtype is narrower than f32, room for a few rows on each thread.
pub(crate) fn rooms(dtype: DType, units: usize, width: usize, operands: u64) -> u64 {
    match dtype {
        DType::F32 => 0,
        _ => {
            let parts = parts(units, width);
            let at_once = at_once(width).min(units.div_ceil(parts));
            parts as u64 * (1 + operands) * floats(at_once * width)
        }
    }
}

/// [`rooms`] for elements one by one.
pub(crate) fn element_rooms(dtype: DType, elements: usize, operands: u64) -> u64 {
    rooms(dtype, elements, 1, operands)
}
