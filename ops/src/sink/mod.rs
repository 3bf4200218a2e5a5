//! Where a backward pass puts parameter gradients.
//!
//! candle starts every gradient as zeros and adds to it: two passes over memory and a copy more until
//! the gradient lies in a flat buffer that can be reduced. Our own operations write a parameter's
//! gradient straight into the flat buffer of its segment instead. Gradients of other candle
//! operations are moved there afterwards ([`Gradients::absorb`]), so a plain candle module works too.
//!
//! A backward can also be run for the gradient of its input alone ([`DeferredGradients::capture`]): what it takes to make the gradients of
//! the parameters is kept, and done later ([`DeferredGradients::flush`]). A matrix product is deferred as such; what an operation has
//! made on the way is kept as it is.
//!
//! The sink is found through the thread that runs the backward: candle gives an operation's `bwd`
//! no other door.

#[cfg(feature = "cuda")]
pub(crate) mod device;
mod flat;
mod tiles;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

#[cfg(feature = "cuda")]
use crate::device::Array;
use crate::flag::Flag;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Result, Storage, Tensor, TensorId};
pub use flat::FlatBuffer;
pub(crate) use tiles::in_tiles;

/// The place of one parameter's gradient, f32 and row-major, whatever the parameter's own dtype.
#[derive(Debug)]
pub enum Slot<'a> {
    /// The first contribution of this backward: overwrite everything, the content is undefined.
    First(&'a mut [f32]),
    /// A contribution is there already: compute the whole new one, then add it.
    Another(&'a mut [f32]),
    /// A further tile of the rows that a contribution is a sum over: go on from what the tiles before it left there.
    Further(&'a mut [f32]),
}

impl Slot<'_> {
    fn len(&self) -> usize {
        match self {
            Self::First(to) | Self::Another(to) | Self::Further(to) => to.len(),
        }
    }

    /// Puts a finished gradient into the slot.
    ///
    /// # Panics
    /// If `gradient` has another length than the parameter: a defect of the operation that made it.
    pub fn put(self, gradient: &[f32]) {
        match self {
            Self::First(to) => to.copy_from_slice(gradient),
            Self::Another(to) | Self::Further(to) => {
                assert_eq!(to.len(), gradient.len(), "gradient of another length than its parameter");
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

/// Runs a forward whose backward will run inside of [`Gradients::capture`], with a place for every parameter that is
/// trained: operations may then rely on it and leave out what only a plain candle backward needs.
pub fn promise<T>(forward: impl FnOnce() -> T) -> T {
    let _promise = Flag::raise(&PROMISED);
    forward()
}

/// Whether the gradients of what runs now go to a sink.
pub(crate) fn promised() -> bool {
    PROMISED.get() || CURRENT.with_borrow(Option::is_some) || LATER.with_borrow(Option::is_some)
}

/// Hands `write` the place of `parameter`'s gradient if the running backward has one, and tells whether it had.
///
/// After `true` an operation returns no gradient for that argument; after `false` (a plain candle
/// backward) it returns an ordinary tensor.
pub fn write(parameter: &Tensor, write: impl FnOnce(Slot<'_>)) -> bool {
    if tiles::running() {
        return tiles::write_tile(parameter, write);
    }
    if defers(parameter) {
        let mut gradient = vec![0.0; parameter.elem_count()];
        write(Slot::First(&mut gradient));
        keep(parameter, Part::Made(gradient));
        return true;
    }
    CURRENT.with_borrow_mut(|current| {
        let Some(slot) = current.as_mut().and_then(|gradients| gradients.slot(parameter.id())) else { return false };
        write(slot);
        true
    })
}

/// Whether the running backward has a place for this parameter's gradient.
#[must_use]
pub fn has(parameter: &Tensor) -> bool {
    defers(parameter)
        || CURRENT.with_borrow(|current| current.as_ref().is_some_and(|g| g.places.contains_key(&parameter.id())))
}

/// Whether the running backward wants this parameter's gradient later: then it is given to [`defer`], not made.
#[must_use]
pub fn defers(parameter: &Tensor) -> bool {
    // Tiles are gone by then: their sum is made at once, and kept.
    !tiles::running()
        && LATER.with_borrow(|later| later.as_ref().is_some_and(|later| later.wanted.contains(&parameter.id())))
}

/// Keeps what will make a contribution to `parameter`'s gradient. `make` overwrites a buffer of the parameter's size.
pub fn defer(parameter: &Tensor, make: impl FnOnce(&mut [f32]) -> Result<()> + Send + 'static) {
    keep(parameter, Part::Unmade(Box::new(make)));
}

fn keep(parameter: &Tensor, part: Part) {
    LATER.with_borrow_mut(|later| {
        if let Some(later) = later {
            later.parts.push((parameter.id(), part));
        }
    });
}

type Make = Box<dyn FnOnce(&mut [f32]) -> Result<()> + Send>;

/// A contribution to a parameter's gradient.
enum Part {
    Made(Vec<f32>),
    #[cfg(feature = "cuda")]
    MadeOnDevice(Array),
    Unmade(Make),
}

/// Contributions to the gradients of one layer's parameters that are made later.
#[derive(Default)]
pub struct DeferredGradients {
    wanted: HashSet<TensorId>,
    /// In the order in which the backward came to them.
    parts: Vec<(TensorId, Part)>,
}

impl DeferredGradients {
    /// For the parameters with these leaves.
    pub fn new(leaves: impl IntoIterator<Item = TensorId>) -> Self {
        Self { wanted: leaves.into_iter().collect(), parts: vec![] }
    }

    /// Runs a backward whose parameter gradients are deferred.
    pub fn capture<T>(self, backward: impl FnOnce() -> T) -> (Self, T) {
        let outer = LATER.replace(Some(self));
        let result = backward();
        let this = LATER.replace(outer).unwrap_or_default();
        (this, result)
    }

    /// Keeps the gradient that candle itself computed for `leaf`, if any.
    ///
    /// # Errors
    /// If the gradient is not a float tensor.
    pub fn absorb(&mut self, store: &mut GradStore, leaf: &Tensor) -> Result<()> {
        if let Some(gradient) = store.remove(leaf) {
            #[cfg(feature = "cuda")]
            if let candle_core::Device::Cuda(device) = gradient.device() {
                self.parts.push((leaf.id(), Part::MadeOnDevice(Array::of(device, &gradient)?)));
                return Ok(());
            }
            let mut values = vec![0.0; leaf.elem_count()];
            copied(&gradient, |gradient| values.copy_from_slice(gradient))?;
            self.parts.push((leaf.id(), Part::Made(values)));
        }
        Ok(())
    }

    /// Whether there is a contribution for `leaf`.
    #[must_use]
    pub fn has(&self, leaf: TensorId) -> bool {
        self.parts.iter().any(|(id, _)| *id == leaf)
    }

    /// Makes all contributions, in their order, into their places.
    ///
    /// # Errors
    /// What an operation says.
    pub fn flush(self, gradients: &mut Gradients) -> Result<()> {
        for (leaf, part) in self.parts {
            #[cfg(feature = "cuda")]
            if let Part::MadeOnDevice(array) = part {
                gradients.take_on_device(leaf, &array.into_tensor())?;
                continue;
            }
            let Some(slot) = gradients.slot(leaf) else { continue };
            match (part, slot) {
                (Part::Made(values), slot) => slot.put(&values),
                #[cfg(feature = "cuda")]
                (Part::MadeOnDevice(_), _) => {}
                (Part::Unmade(make), Slot::First(to)) => make(to)?,
                (Part::Unmade(make), slot @ (Slot::Another(_) | Slot::Further(_))) => {
                    let mut gradient = vec![0.0; slot.len()];
                    make(&mut gradient)?;
                    slot.put(&gradient);
                }
            }
        }
        Ok(())
    }
}

/// A gradient's values in f32 and row-major order.
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

/// FlatBuffer gradient buffers and the places of parameters in them, for one backward of one layer.
#[derive(Debug, Default)]
pub struct Gradients {
    buffers: Vec<FlatBuffer>,
    places: HashMap<TensorId, BufferRange>,
}

impl Gradients {
    /// Adds a flat buffer. Each entry is a leaf, its range in the buffer, and whether another layer's
    /// backward has put a contribution there already (tied parameters).
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

    /// Runs a backward whose parameter gradients land here. Buffers come back even if it failed.
    pub fn capture<T>(self, backward: impl FnOnce() -> T) -> (Self, T) {
        let outer = CURRENT.replace(Some(self));
        let result = backward();
        let this = CURRENT.replace(outer).unwrap_or_default();
        (this, result)
    }

    /// Moves the gradient that candle itself computed for `leaf`, if any, into its place.
    ///
    /// # Errors
    /// If the gradient is not a float tensor.
    pub fn absorb(&mut self, store: &mut GradStore, leaf: &Tensor) -> Result<()> {
        let Some(gradient) = store.remove(leaf) else { return Ok(()) };
        #[cfg(feature = "cuda")]
        if self.take_on_device(leaf.id(), &gradient)? {
            return Ok(());
        }
        let Some(slot) = self.slot(leaf.id()) else { return Ok(()) };
        copied(&gradient, |values| slot.put(values))
    }

    /// Whether a contribution for `leaf` has arrived.
    #[must_use]
    pub fn is_written(&self, leaf: TensorId) -> bool {
        self.places.get(&leaf).is_some_and(|place| place.written)
    }

    /// Puts zeros where no contribution arrived.
    ///
    /// # Errors
    /// What the driver of a GPU says.
    pub fn zero(&mut self, leaf: TensorId) -> Result<()> {
        #[cfg(feature = "cuda")]
        self.zero_on_device(leaf)?;
        if let Some(Slot::First(to)) = self.slot(leaf) {
            to.fill(0.0);
        }
        Ok(())
    }

    /// The buffers, in the order in which they were added.
    #[must_use]
    pub fn into_flat(self) -> Vec<FlatBuffer> {
        self.buffers
    }

    /// Those on the host, in the order in which they were added.
    #[must_use]
    pub fn into_buffers(self) -> Vec<Vec<f32>> {
        let host = |buffer| match buffer {
            FlatBuffer::Host(values) => Some(values),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(_) => None,
        };
        self.buffers.into_iter().filter_map(host).collect()
    }

    /// The place itself, on the host, whether or not something is there.
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
