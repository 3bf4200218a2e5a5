//! Module buffers: tensors of a module that no optimizer updates, such as BatchNorm's running statistics.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::Init;

/// A tensor that a module reads but that has no gradient and no optimizer state: a *buffer* in PyTorch.
///
/// Every rank holds all of its elements. Ranks see different batches, so a module that changes the values, as
/// [`candle_nn::BatchNorm`] does in training mode, would make them differ. [`ModuleBuffer::is_changed`] detects this.
#[derive(Debug)]
pub struct ModuleBuffer {
    name: String,
    variable: Var,
    /// The values that were set last, in f32.
    values: Mutex<Vec<f32>>,
}

impl ModuleBuffer {
    /// Returns whether a parameter of this name is a buffer: candle's and PyTorch's names of running statistics.
    pub(crate) fn is_one(name: &str) -> bool {
        matches!(name.rsplit('.').next(), Some("running_mean" | "running_var"))
    }

    pub(crate) fn new(name: String, shape: Shape, dtype: DType, device: &Device, init: Init) -> Result<Self> {
        if !matches!(init, Init::Const(_)) {
            candle_core::bail!("`{name}` is a buffer, which must be initialized with a constant, not with {init:?}");
        }
        let variable = init.var(shape, dtype, device)?;
        let values = Mutex::new(floats(&variable)?);
        Ok(Self { name, variable, values })
    }

    /// Returns the full name: the layer's name, a dot, and the name inside the layer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the shape.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        self.variable.shape()
    }

    /// Returns the tensor that the module holds. It belongs to a candle variable, so a module that makes a `Var` of
    /// it shares its storage.
    pub(crate) fn tensor(&self) -> &Tensor {
        self.variable.as_tensor()
    }

    /// Returns the values that were set last, row-major; initially those of the module's constructor.
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets all values, row-major.
    ///
    /// # Errors
    /// Fails if their number differs from the number of elements.
    pub fn set(&self, values: &[f32]) -> Result<()> {
        let tensor = Tensor::from_slice(values, self.shape(), self.variable.device())?;
        self.variable.set(&tensor.to_dtype(self.variable.dtype())?)?;
        *self.values.lock().unwrap_or_else(PoisonError::into_inner) = floats(&self.variable)?;
        Ok(())
    }

    /// Returns whether the module has changed the values since they were set. Waits for the device.
    ///
    /// # Errors
    /// Fails if the values cannot be read.
    pub fn is_changed(&self) -> Result<bool> {
        let now = floats(&self.variable)?;
        let expected = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(now.iter().zip(&*expected).any(|(a, b)| a.to_bits() != b.to_bits()))
    }
}

fn floats(variable: &Var) -> Result<Vec<f32>> {
    variable.as_detached_tensor().to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}
