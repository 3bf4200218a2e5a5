//! Gradients of parameters on a GPU.

use candle_core::{Result, Tensor, TensorId};
use zero_kernels::Address;
use zero_kernels::rows::Onto;

use super::{CURRENT, Contribution, FlatBuffer, Gradients, Slot, keep, schedule_defers, tiles};
use crate::device::{Array, Gpu};

/// Does the same as [`write`](super::write), for a gradient on a GPU. `make` receives the address of the place, f32 and
/// row-major, and whether the place holds values to add to.
pub(crate) fn write(gpu: &Gpu, parameter: &Tensor, make: impl FnOnce(Address, Onto) -> Result<()>) -> Result<bool> {
    if tiles::running() {
        candle_core::bail!("gradients in tiles of rows are unsupported on a GPU");
    }
    if schedule_defers(parameter) {
        // Computed immediately: deferring the gradient would take GPU memory and save no time.
        let gradient = Array::room(gpu.device(), parameter.elem_count())?;
        make(gradient.address(&(0..gradient.len()))?, Onto::Nothing)?;
        keep(parameter, Contribution::MadeOnDevice(gradient));
        return Ok(true);
    }
    let place = CURRENT.with_borrow_mut(|current| {
        current.as_mut().and_then(|gradients| gradients.place_on_device(parameter.id())).transpose()
    })?;
    let Some((to, onto)) = place else { return Ok(false) };
    make(to, onto).map(|()| true)
}

impl Gradients {
    /// Returns the place of the next contribution to the gradient of `leaf`, and marks it as written.
    fn place_on_device(&mut self, leaf: TensorId) -> Option<Result<(Address, Onto)>> {
        let place = self.places.get_mut(&leaf)?;
        let FlatBuffer::Device(array) = &self.buffers[place.buffer] else { return None };
        let first = !std::mem::replace(&mut place.written, true);
        let onto = if first { Onto::Nothing } else { Onto::Sum };
        Some(array.address(&place.range).map(|address| (address, onto)))
    }

    /// Waits for the contributions to the gradients of `leaves` that `made` holds on a GPU, and adds them to the
    /// buffers on the host.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn bring(&mut self, made: &Gradients, leaves: &[TensorId]) -> Result<()> {
        for &leaf in leaves {
            let Some(place) = made.places.get(&leaf).filter(|place| place.written) else { continue };
            let FlatBuffer::Device(array) = &made.buffers[place.buffer] else { continue };
            match self.slot(leaf) {
                Some(Slot::First(to)) => array.to_host(place.range.clone(), to)?,
                Some(slot) => {
                    let mut values = vec![0.0; place.range.len()];
                    array.to_host(place.range.clone(), &mut values)?;
                    slot.put(&values);
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Sets the place to zero if no contribution arrived.
    pub(super) fn zero_on_device(&mut self, leaf: TensorId) -> Result<()> {
        let Some(place) = self.places.get_mut(&leaf).filter(|place| !place.written) else { return Ok(()) };
        let FlatBuffer::Device(array) = &mut self.buffers[place.buffer] else { return Ok(()) };
        place.written = true;
        array.zero(place.range.clone())
    }

    /// Writes values to the place of `leaf`, or adds them if the place already has a contribution. Returns false if the
    /// leaf has no place on a GPU.
    pub(super) fn take_on_device(&mut self, leaf: TensorId, values: &Tensor) -> Result<bool> {
        let Some(place) = self.places.get_mut(&leaf) else { return Ok(false) };
        let FlatBuffer::Device(array) = &mut self.buffers[place.buffer] else { return Ok(false) };
        let is_written = std::mem::replace(&mut place.written, true);
        array.take(place.range.clone(), values, is_written)?;
        Ok(true)
    }
}
