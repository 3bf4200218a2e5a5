//! The memory use of operations, declared next to their code as a function of shapes, dtypes and threads.

use crate::graph::output::at_once;
use crate::meta;
use crate::parallel::parts;
use candle_core::{DType, Result, Shape, Storage, Tensor, bail};
use std::ops::{Add, Sub};

/// An operation that declares its memory use.
pub(crate) trait Footprint {
    /// The tensors whose values the backward reads. Values that no backward reads are freed at the end of a fused
    /// block's forward.
    const READS: Reads;

    /// Whether a fused block frees the output's values at the end of its forward, and restores them from the values of
    /// the only input before its backward reads them.
    const REMADE: bool = false;

    /// Makes the values of a [`REMADE`](Self::REMADE) output from its input.
    ///
    /// # Errors
    /// Fails if the operation is not [`REMADE`](Self::REMADE).
    fn make(&self, _: &Tensor) -> Result<Storage> {
        bail!("the output of this operation cannot be computed again")
    }

    /// Returns the exchange of a [`REMADE`](Self::REMADE) operation, if it can overlap with other operations.
    fn exchange(&self) -> Option<&dyn Exchange> {
        None
    }

    /// Returns the memory use for these inputs. May only inspect their shape, their dtype and whether they need a
    /// gradient.
    ///
    /// # Errors
    /// Fails if the shapes do not match.
    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs>;
}

/// Waits for an exchange and stores the values in its output.
pub(crate) type Finish = Box<dyn FnOnce() -> Result<()>>;

/// An exchange of values with other ranks that overlaps with other operations.
pub(crate) trait Exchange {
    /// Starts to restore the values of `output` from those of the input.
    ///
    /// # Errors
    /// Fails if a rank is lost.
    fn start(&self, x: &Tensor, output: &Tensor) -> Result<Finish>;

    /// Runs the backward, and runs `compute` during its exchange.
    ///
    /// # Errors
    /// Returns the error of `compute`. Fails if a rank is lost.
    fn backward_while(&self, x: &Tensor, dy: &Tensor, compute: &mut dyn FnMut() -> Result<()>) -> Result<Tensor>;
}

/// The tensors whose values a backward reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reads {
    pub(crate) inputs: [bool; 3],
    pub(crate) output: bool,
    /// Whether the first input is only read to compute the gradient of the second input, a weight.
    pub(crate) for_weight: bool,
}

impl Reads {
    pub(crate) const NOTHING: Self = Self::inputs([false; 3]);
    /// A linear layer reads its input for the gradient of its weight, and the weight for the gradient of its input.
    pub(crate) const OF_LINEAR: Self = Self { for_weight: true, ..Self::inputs([true, true, false]) };

    pub(crate) const fn inputs(inputs: [bool; 3]) -> Self {
        Self { inputs, output: false, for_weight: false }
    }

    /// Leaves out the first input if it is only read for the gradient of a weight that needs no gradient.
    pub(crate) fn with(self, inputs: &[Tensor]) -> Self {
        match (self.for_weight, inputs) {
            (true, [_, weight, ..]) if !weight.track_op() => Self::inputs([false, self.inputs[1], self.inputs[2]]),
            _ => self,
        }
    }
}

/// Bytes that operations inside of layers send to other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchanged {
    /// Number of bytes sent to the ranks of the head group, which exchange heads of the same sequences.
    pub heads: u64,
    /// Number of bytes sent to the ranks of the query group, which share keys and values of the same sequences.
    pub queries: u64,
    /// Number of bytes sent to the ranks of the tensor group, which split the layers.
    pub tensor: u64,
}

impl Exchanged {
    pub(crate) fn to_heads(bytes: u64) -> Self {
        Self { heads: bytes, ..Self::default() }
    }

    pub(crate) fn to_queries(bytes: u64) -> Self {
        Self { queries: bytes, ..Self::default() }
    }

    pub(crate) fn to_tensor(bytes: u64) -> Self {
        Self { tensor: bytes, ..Self::default() }
    }

    /// Returns the number of bytes sent to all ranks that share the sequences.
    #[must_use]
    pub fn context(self) -> u64 {
        self.heads + self.queries
    }

    /// Returns the sum.
    #[must_use]
    pub fn total(self) -> u64 {
        self.context() + self.tensor
    }
}

impl Add for Exchanged {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            heads: self.heads + other.heads,
            queries: self.queries + other.queries,
            tensor: self.tensor + other.tensor,
        }
    }
}

impl Sub for Exchanged {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            heads: self.heads - other.heads,
            queries: self.queries - other.queries,
            tensor: self.tensor - other.tensor,
        }
    }
}

/// Memory use of an operation, in bytes. Inputs are not counted; views are assumed to be contiguous.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    /// Shape of the output.
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    /// Kept for the backward, in addition to the inputs and the output.
    pub(crate) saved: u64,
    /// Whether the saved memory becomes the gradient that the backward returns.
    pub(crate) hands_over: bool,
    /// Peak of the forward, in addition to the output and the saved memory.
    pub(crate) forward: u64,
    /// Peak of the backward, in addition to the gradients that it returns.
    pub(crate) backward: u64,
    /// The inputs whose gradients the backward returns if they need one. Gradients of parameters go to the sink.
    pub(crate) gradients: [bool; 3],
    /// Bytes that the forward and the backward send to other ranks.
    pub(crate) exchanged: [Exchanged; 2],
    /// The cost of deferring the gradients of parameters, if the operation has any.
    pub(crate) deferred: Option<DeferredCosts>,
}

impl Costs {
    /// Returns the costs of an operation without parameters that saves nothing and needs no temporary memory.
    pub(crate) fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self {
            shape: shape.into(),
            dtype,
            saved: 0,
            hands_over: false,
            forward: 0,
            backward: 0,
            gradients: [true; 3],
            exchanged: [Exchanged::default(); 2],
            deferred: None,
        }
    }

    /// Adds the cuBLASLt workspace, which products with an epilogue take on a GPU.
    pub(crate) fn with_epilogue(self) -> Self {
        let workspace = meta::workspace();
        let deferred =
            self.deferred.map(|deferred| DeferredCosts { backward: deferred.backward.max(workspace), ..deferred });
        Self { forward: self.forward.max(workspace), backward: self.backward.max(workspace), deferred, ..self }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeferredCosts {
    /// Whether the first input is kept until the deferred gradients are computed.
    pub(crate) keeps_input: bool,
    /// Whether the gradient of the output is kept until the deferred gradients are computed.
    pub(crate) keeps_gradient: bool,
    /// Number of bytes of other operands that are kept until the deferred gradients are computed.
    pub(crate) operands: u64,
    /// Number of bytes of gradients that are not deferred but computed immediately and kept.
    pub(crate) made: u64,
    /// Peak of the backward, including `operands` and `made`, in addition to the gradients that it returns.
    pub(crate) backward: u64,
}

/// Returns the size of `elements` elements of `dtype` in bytes.
pub(crate) fn bytes(elements: usize, dtype: DType) -> u64 {
    (elements as u64).saturating_mul(dtype.size_in_bytes() as u64)
}

/// Returns the size of `count` f32 in bytes.
pub(crate) fn floats(count: usize) -> u64 {
    bytes(count, DType::F32)
}

/// Returns the peak bytes of [`indices`](crate::graph::operand::indices) while it collects the indices, and the bytes
/// of its result.
pub(crate) fn indices_room(ids: &Tensor) -> (u64, u64) {
    let indices = (ids.elem_count() * size_of::<usize>()) as u64;
    (indices + bytes(ids.elem_count(), ids.dtype()), indices)
}

/// Returns the temporary memory of [`build_as`](crate::graph::output::build_as) for work that reads `operands`
/// buffers of `dtype`, each as wide as the output. Dtypes narrower than f32 need f32 copies of a few rows on each
/// thread.
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

/// Returns [`rooms`] for operations that work element by element.
pub(crate) fn element_rooms(dtype: DType, elements: usize, operands: u64) -> u64 {
    rooms(dtype, elements, 1, operands)
}
