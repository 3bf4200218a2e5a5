//! Receives the gradients of parameters during a backward.
//!
//! candle starts every gradient as zeros and adds to it. That takes two passes over memory, and then one more to copy
//! the gradient into a flat buffer that can be reduced. The operations of this crate write a parameter's gradient
//! straight into the flat buffer of its segment instead. Gradients of other candle operations are moved there
//! afterwards ([`Gradients::absorb`]), so a plain candle module works too.
//!
//! A backward can also compute only the gradient of its input ([`DeferredGradients::capture`]). It then keeps the
//! operands of the parameter gradients, which [`DeferredGradients::flush`] computes later. A matrix product is deferred
//! as a whole. A gradient that an operation computes together with dx is not deferred but kept.
//!
//! A backward can also postpone gradients of weights and compute them during its next exchange with other ranks
//! (`deferred`).
//!
//! Operations find the sink in a thread-local variable of the thread that runs the backward, because candle passes
//! nothing else to an operation's `bwd`.

pub(crate) mod deferred;
#[cfg(feature = "cuda")]
pub(crate) mod device;
mod flat;
mod tiles;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

#[cfg(feature = "cuda")]
use crate::device::Array;
use crate::flag::{Flag, Replaced};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, TensorId};
pub use deferred::{defer, defers};
pub use flat::FlatBuffer;
pub(crate) use tiles::in_tiles;

/// The place of one parameter's gradient: f32 and row-major, whatever the parameter's own dtype.
#[derive(Debug)]
pub enum Slot<'a> {
    /// This is the first contribution of this backward. Overwrite the whole buffer; its content is arbitrary.
    First(&'a mut [f32]),
    /// The buffer already holds a contribution. Compute the whole new contribution, then add it.
    Another(&'a mut [f32]),
    /// This is a further tile of rows of one contribution. Continue from the sum of the previous tiles, which is in the
    /// buffer.
    Further(&'a mut [f32]),
}

impl Slot<'_> {
    fn len(&self) -> usize {
        match self {
            Self::First(to) | Self::Another(to) | Self::Further(to) => to.len(),
        }
    }

    /// Writes or adds a finished gradient.
    ///
    /// # Panics
    /// Panics if the length of `gradient` differs from the parameter's, which is a bug in the operation.
    pub fn put(self, gradient: &[f32]) {
        match self {
            Self::First(to) => to.copy_from_slice(gradient),
            Self::Another(to) | Self::Further(to) => {
                assert_eq!(to.len(), gradient.len(), "the gradient and its parameter have different lengths");
                for (to, &from) in to.iter_mut().zip(gradient) {
                    *to += from;
                }
            }
        }
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Gradients>> = const { RefCell::new(None) };
    static LATER: RefCell<Option<DeferredGradients>> = const { RefCell::new(None) };
    static PROMISED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a forward whose backward will run inside [`Gradients::capture`], with a place for every trained parameter.
/// Operations may rely on this and omit what only a plain candle backward needs.
pub fn promise<T>(forward: impl FnOnce() -> T) -> T {
    let _promise = Flag::raise(&PROMISED);
    forward()
}

/// Returns whether the gradients of the running code go to a sink.
pub(crate) fn promised() -> bool {
    PROMISED.get() || CURRENT.with_borrow(Option::is_some) || LATER.with_borrow(Option::is_some)
}

/// Passes the place of `parameter`'s gradient to `write` if the running backward has one. Returns whether it has one.
///
/// If the result is `true`, the operation's `bwd` must return no gradient for this argument. If it is `false` (a plain
/// candle backward), `bwd` must return the gradient as a tensor.
pub fn write(parameter: &Tensor, write: impl FnOnce(Slot<'_>)) -> bool {
    if tiles::running() {
        return tiles::write_tile(parameter, write);
    }
    if schedule_defers(parameter) {
        let mut gradient = vec![0.0; parameter.elem_count()];
        write(Slot::First(&mut gradient));
        keep(parameter, Contribution::Made(gradient));
        return true;
    }
    CURRENT.with_borrow_mut(|current| {
        let Some(slot) = current.as_mut().and_then(|gradients| gradients.slot(parameter.id())) else { return false };
        write(slot);
        true
    })
}

/// Returns whether the running backward has a place for this parameter's gradient.
#[must_use]
pub fn has(parameter: &Tensor) -> bool {
    schedule_defers(parameter)
        || CURRENT.with_borrow(|current| current.as_ref().is_some_and(|g| g.places.contains_key(&parameter.id())))
}

/// Returns whether the schedule defers this parameter's gradient.
fn schedule_defers(parameter: &Tensor) -> bool {
    // A tile's operands do not outlive the tile, so the sum over tiles is computed immediately and kept.
    !tiles::running()
        && LATER.with_borrow(|later| later.as_ref().is_some_and(|later| later.wanted.contains(&parameter.id())))
}

/// Returns whether the running backward defers the gradients of parameters.
pub(crate) fn is_deferring() -> bool {
    LATER.with_borrow(Option::is_some)
}

fn keep(parameter: &Tensor, part: Contribution) {
    LATER.with_borrow_mut(|later| {
        if let Some(later) = later {
            later.parts.push((parameter.id(), part));
        }
    });
}

/// Computes a contribution to a parameter's gradient, and overwrites a buffer of the parameter's size with it.
type Make = Box<dyn FnOnce(&mut [f32]) -> Result<()> + Send>;

/// Computes a contribution and writes it to its place.
fn make(make: Make, slot: Slot<'_>) -> Result<()> {
    match slot {
        Slot::First(to) => make(to),
        slot @ (Slot::Another(_) | Slot::Further(_)) => {
            let mut gradient = vec![0.0; slot.len()];
            make(&mut gradient)?;
            slot.put(&gradient);
            Ok(())
        }
    }
}

/// A deferred contribution to a parameter's gradient.
enum Contribution {
    Made(Vec<f32>),
    #[cfg(feature = "cuda")]
    MadeOnDevice(Array),
    Unmade(Make),
}

/// Deferred contributions to the gradients of one layer's parameters.
#[derive(Default)]
pub struct DeferredGradients {
    wanted: HashSet<TensorId>,
    /// The contributions, in the order of the backward.
    parts: Vec<(TensorId, Contribution)>,
}

impl DeferredGradients {
    /// Creates an empty collection for the parameters with these leaves.
    pub fn new(leaves: impl IntoIterator<Item = TensorId>) -> Self {
        Self { wanted: leaves.into_iter().collect(), parts: vec![] }
    }

    /// Runs a backward whose parameter gradients are deferred.
    pub fn capture<T>(self, backward: impl FnOnce() -> T) -> (Self, T) {
        let (this, result) = Replaced::during(&LATER, Some(self), backward);
        (this.unwrap_or_default(), result)
    }

    /// Keeps the gradient that candle computed for `leaf`, if any.
    ///
    /// # Errors
    /// Fails if the gradient is not a float tensor.
    pub fn absorb(&mut self, store: &mut GradStore, leaf: &Tensor) -> Result<()> {
        if let Some(gradient) = store.remove(leaf) {
            #[cfg(feature = "cuda")]
            if let candle_core::Device::Cuda(device) = gradient.device() {
                self.parts.push((leaf.id(), Contribution::MadeOnDevice(Array::of(device, &gradient)?)));
                return Ok(());
            }
            let mut values = vec![0.0; leaf.elem_count()];
            copied(&gradient, |gradient| values.copy_from_slice(gradient))?;
            self.parts.push((leaf.id(), Contribution::Made(values)));
        }
        Ok(())
    }

    /// Returns whether there is a contribution for `leaf`.
    #[must_use]
    pub fn has(&self, leaf: TensorId) -> bool {
        self.parts.iter().any(|(id, _)| *id == leaf)
    }

    /// Computes all contributions in order and writes them to their places.
    ///
    /// # Errors
    /// Returns the first error of a computation.
    pub fn flush(self, gradients: &mut Gradients) -> Result<()> {
        for (leaf, part) in self.parts {
            #[cfg(feature = "cuda")]
            if let Contribution::MadeOnDevice(array) = part {
                gradients.take_on_device(leaf, &array.into_tensor())?;
                continue;
            }
            let Some(slot) = gradients.slot(leaf) else { continue };
            match (part, slot) {
                (Contribution::Made(values), slot) => slot.put(&values),
                #[cfg(feature = "cuda")]
                (Contribution::MadeOnDevice(_), _) => {}
                (Contribution::Unmade(unmade), slot) => make(unmade, slot)?,
            }
        }
        Ok(())
    }
}

/// Passes a gradient's values to `take`, in f32 and row-major order.
fn copied(gradient: &Tensor, take: impl FnOnce(&[f32])) -> Result<()> {
    let gradient = gradient.to_dtype(DType::F32)?.contiguous()?;
    let (storage, layout) = gradient.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
        candle_core::bail!("the gradient of a parameter is not on the CPU")
    };
    let start = layout.start_offset();
    take(&values[start..start + gradient.elem_count()]);
    Ok(())
}

#[derive(Debug)]
struct BufferRange {
    buffer: usize,
    range: Range<usize>,
    written: bool,
}

/// The flat gradient buffers of one backward of one layer, and the place of each parameter in them.
#[derive(Debug, Default)]
pub struct Gradients {
    buffers: Vec<FlatBuffer>,
    places: HashMap<TensorId, BufferRange>,
}

impl Gradients {
    /// Adds a flat buffer. Each entry is a leaf, its range in the buffer, and whether another layer's backward has
    /// already written a contribution to this range (tied parameters).
    pub fn add_buffer(
        &mut self,
        buffer: impl Into<FlatBuffer>,
        leaves: impl IntoIterator<Item = (TensorId, Range<usize>, bool)>,
    ) {
        let index = self.buffers.len();
        self.buffers.push(buffer.into());
        for (id, range, written) in leaves {
            self.places.insert(id, BufferRange { buffer: index, range, written });
        }
    }

    /// Runs a backward whose parameter gradients are written to these buffers. Returns the buffers even if the backward
    /// failed.
    pub fn capture<T>(self, backward: impl FnOnce() -> T) -> (Self, T) {
        let (this, result) = Replaced::during(&CURRENT, Some(self), backward);
        (this.unwrap_or_default(), result)
    }

    /// Moves the gradient that candle computed for `leaf`, if any, to its place.
    ///
    /// # Errors
    /// Fails if the gradient is not a float tensor.
    pub fn absorb(&mut self, store: &mut GradStore, leaf: &Tensor) -> Result<()> {
        let Some(gradient) = store.remove(leaf) else { return Ok(()) };
        #[cfg(feature = "cuda")]
        if self.take_on_device(leaf.id(), &gradient)? {
            return Ok(());
        }
        let Some(slot) = self.slot(leaf.id()) else { return Ok(()) };
        copied(&gradient, |values| slot.put(values))
    }

    /// Returns whether a contribution for `leaf` has arrived.
    #[must_use]
    pub fn is_written(&self, leaf: TensorId) -> bool {
        self.places.get(&leaf).is_some_and(|place| place.written)
    }

    /// Sets the gradient of `leaf` to zero if no contribution arrived.
    ///
    /// # Errors
    /// Returns the GPU driver's error.
    pub fn zero(&mut self, leaf: TensorId) -> Result<()> {
        #[cfg(feature = "cuda")]
        self.zero_on_device(leaf)?;
        if let Some(Slot::First(to)) = self.slot(leaf) {
            to.fill(0.0);
        }
        Ok(())
    }

    /// Returns the buffers, in the order in which they were added.
    #[must_use]
    pub fn into_flat(self) -> Vec<FlatBuffer> {
        self.buffers
    }

    /// Returns the buffers on the host, in the order in which they were added.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Vec<f32>> {
        self.buffers.into_iter().filter_map(FlatBuffer::if_on_host).collect()
    }

    /// Returns the place of `leaf` on the host, whether or not it is written.
    fn place(&mut self, leaf: TensorId) -> Option<&mut [f32]> {
        let place = self.places.get(&leaf)?;
        Some(&mut self.buffers[place.buffer].host_mut()?[place.range.clone()])
    }

    fn slot(&mut self, leaf: TensorId) -> Option<Slot<'_>> {
        let place = self.places.get_mut(&leaf)?;
        let slice = &mut self.buffers[place.buffer].host_mut()?[place.range.clone()];
        let first = !std::mem::replace(&mut place.written, true);
        Some(if first { Slot::First(slice) } else { Slot::Another(slice) })
    }
}
