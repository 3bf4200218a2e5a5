//! Module buffers: tensors of a module that no optimizer updates, such as BatchNorm's running statistics.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::Init;

/// A tensor that a module reads but that has no gradient and no optimizer state: a *buffer* in PyTorch.
///
/// Every rank holds the whole buffer, with the same values. A module may write new values in the forward pass of
/// training, as [`zero_ops::BatchNorm`] and [`candle_nn::BatchNorm`] do. [`ModuleBuffer::take`] returns the new values
/// and restores the previous ones, so that every micro-batch of a step starts from the same values.
#[derive(Debug)]
pub struct ModuleBuffer {
    name: String,
    layer: usize,
    variable: Var,
    set: Mutex<Values>,
}

/// The values that were set last.
#[derive(Debug)]
struct Values {
    floats: Vec<f32>,
    /// The same values, in the dtype and on the device of the module's tensor.
    tensor: Tensor,
}

impl Values {
    fn of(variable: &Var) -> Result<Self> {
        Ok(Self { floats: floats(variable)?, tensor: variable.as_detached_tensor().copy()? })
    }
}

impl ModuleBuffer {
    /// Returns whether a parameter with this name is a buffer: candle and PyTorch use these names for running
    /// statistics.
    pub(crate) fn is_one(name: &str) -> bool {
        matches!(name.rsplit('.').next(), Some("running_mean" | "running_var"))
    }

    pub(crate) fn new(
        name: String,
        layer: usize,
        shape: Shape,
        dtype: DType,
        device: &Device,
        init: Init,
    ) -> Result<Self> {
        if !matches!(init, Init::Const(_)) {
            candle_core::bail!("`{name}` is a buffer, which must be initialized with a constant, not with {init:?}");
        }
        if shape.rank() != 1 {
            candle_core::bail!("`{name}` is a buffer, which must have one dimension, not the shape {shape:?}");
        }
        let variable = init.var(shape, dtype, device)?;
        let set = Mutex::new(Values::of(&variable)?);
        Ok(Self { name, layer, variable, set })
    }

    /// Returns the full name: the layer's name, a dot, and the name inside the layer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the index of the layer that has the buffer.
    #[must_use]
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Returns the shape, which has one dimension.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        self.variable.shape()
    }

    /// Returns the tensor that the module holds. The tensor belongs to a candle variable, so a `Var` that the module
    /// makes of it shares the storage.
    pub(crate) fn tensor(&self) -> &Tensor {
        self.variable.as_tensor()
    }

    /// Returns the values that were set last; initially the values from the module's constructor.
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        self.last().floats.clone()
    }

    /// Sets all values.
    ///
    /// # Errors
    /// Fails if the number of values differs from the number of elements.
    pub fn set(&self, values: &[f32]) -> Result<()> {
        let tensor = Tensor::from_slice(values, self.shape(), self.variable.device())?;
        self.variable.set(&tensor.to_dtype(self.variable.dtype())?)?;
        *self.last() = Values::of(&self.variable)?;
        Ok(())
    }

    /// Returns the values that the module has written, and restores the values that were set last. Does not wait for
    /// the device.
    ///
    /// # Errors
    /// Fails if the values cannot be copied.
    pub fn take(&self) -> Result<Tensor> {
        let written = self.variable.as_detached_tensor().copy()?;
        self.restore()?;
        Ok(written)
    }

    /// Restores the values that were set last.
    ///
    /// # Errors
    /// Fails if the values cannot be copied.
    pub fn restore(&self) -> Result<()> {
        self.variable.set(&self.last().tensor)
    }

    /// Returns whether the module has written values that differ from those set last. Waits for the device.
    ///
    /// # Errors
    /// Fails if the values cannot be read.
    pub fn is_changed(&self) -> Result<bool> {
        let now = floats(&self.variable)?;
        Ok(now.iter().zip(&self.last().floats).any(|(a, b)| a.to_bits() != b.to_bits()))
    }

    fn last(&self) -> MutexGuard<'_, Values> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn floats(variable: &Var) -> Result<Vec<f32>> {
    variable.as_detached_tensor().to_dtype(DType::F32)?.to_vec1()
}
