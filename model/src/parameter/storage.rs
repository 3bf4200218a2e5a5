//! Access to a parameter's values: puts them into its leaf, takes them out, changes and reads them.

use super::Parameter;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, DType, Device, Result, Storage};
use half::{bf16, f16};
use zero_ops::graph::storage::{swap, take};
use zero_ops::{quantized_bytes, quantized_storage};

impl Parameter {
    /// Fills the leaf with the parameter's full values and returns its previous storage. If the parameter is on a GPU,
    /// uploads the values and returns `values` itself instead.
    ///
    /// # Errors
    /// Fails if the dtype or length of the values differs from the parameter's, or if GPU memory is exhausted.
    pub fn fill(&self, values: CpuStorage) -> Result<CpuStorage> {
        if let Some(quantization) = self.quantization {
            if quantized_bytes(&values).map(<[u8]>::len) != Some(quantization.bytes()) {
                candle_core::bail!("parameter `{}` expects {} quantized bytes", self.name, quantization.bytes());
            }
            return on_host(swap(&self.leaf, Storage::Cpu(values))?);
        }
        let (dtype, len) = match &values {
            CpuStorage::F32(v) => (DType::F32, v.len()),
            CpuStorage::BF16(v) => (DType::BF16, v.len()),
            CpuStorage::F16(v) => (DType::F16, v.len()),
            _ => candle_core::bail!("parameter `{}` cannot hold values of this dtype", self.name),
        };
        if dtype != self.dtype || len != self.elements() {
            candle_core::bail!(
                "parameter `{}` holds {} {:?}, not {len} {dtype:?}",
                self.name,
                self.elements(),
                self.dtype
            );
        }
        if let Device::Cuda(device) = self.leaf.device() {
            swap(&self.leaf, Storage::Cuda(device.storage_from_cpu_storage(&values)?))?;
            return Ok(values);
        }
        on_host(swap(&self.leaf, Storage::Cpu(values))?)
    }

    /// Fills the leaf with f32 values, rounded to the parameter's dtype or quantized.
    ///
    /// # Errors
    /// See [`Parameter::fill`]. Also fails if a value to quantize is not finite.
    pub fn fill_from_floats(&self, values: Vec<f32>) -> Result<()> {
        if let Some(quantization) = self.quantization {
            if values.len() != self.elements() {
                candle_core::bail!("parameter `{}` has {} values, not {}", self.name, self.elements(), values.len());
            }
            let bytes = quantization.quantize(0..quantization.bytes(), |start, out| {
                out.copy_from_slice(&values[start..start + out.len()]);
                Ok::<_, candle_core::Error>(())
            })?;
            return self.fill(quantized_storage(bytes)).map(drop);
        }
        let values = match self.dtype {
            DType::BF16 => CpuStorage::BF16(values.into_iter().map(bf16::from_f32).collect()),
            DType::F16 => CpuStorage::F16(values.into_iter().map(f16::from_f32).collect()),
            _ => CpuStorage::F32(values),
        };
        self.fill(values).map(drop)
    }

    /// Fills the leaf with the parameter's full values, which are already on its device, and returns its previous
    /// storage.
    ///
    /// # Errors
    /// Fails if the device or dtype of the values differs from the parameter's.
    pub fn put(&self, values: Storage) -> Result<Storage> {
        match values {
            Storage::Cpu(values) => self.fill(values).map(Storage::Cpu),
            values if values.dtype() == self.dtype => swap(&self.leaf, values),
            values => candle_core::bail!("parameter `{}` holds {:?}, not {:?}", self.name, self.dtype, values.dtype()),
        }
    }

    /// Removes the values from the leaf and returns them, on whichever device they are. Until the next
    /// [`Parameter::put`], operations on the leaf fail.
    ///
    /// # Errors
    /// Fails if candle cannot access the storage.
    pub fn take(&self) -> Result<Storage> {
        take(&self.leaf)
    }

    /// Removes the values from the leaf and returns them. Until the next [`Parameter::fill`], operations on the leaf
    /// fail. Values on a GPU are dropped, and an empty storage is returned.
    ///
    /// # Errors
    /// Fails if candle cannot access the storage.
    pub fn release(&self) -> Result<CpuStorage> {
        on_host(take(&self.leaf)?)
    }

    /// Changes the values: on the CPU in place, on a GPU in a host copy that is then uploaded.
    ///
    /// # Errors
    /// Returns errors of `change` and of the GPU's driver.
    pub fn update(&self, change: impl FnOnce(&mut CpuStorage) -> Result<()>) -> Result<()> {
        if self.is_on_gpu() {
            let mut values = self.read(|values| Ok(values.clone()))?;
            change(&mut values)?;
            return self.fill(values).map(drop);
        }
        let mut values = self.release()?;
        let result = change(&mut values);
        swap(&self.leaf, Storage::Cpu(values))?;
        result
    }

    /// Reads the values. On a GPU, waits for preceding operations and reads a host copy.
    ///
    /// # Errors
    /// Returns errors of `read` and of the GPU's driver.
    pub fn read<T>(&self, read: impl FnOnce(&CpuStorage) -> Result<T>) -> Result<T> {
        let (storage, _) = self.leaf.storage_and_layout();
        match &*storage {
            Storage::Cpu(values) => read(values),
            Storage::Cuda(values) => read(&values.to_cpu_storage()?),
            Storage::Metal(_) => candle_core::bail!("parameter `{}` is on an unsupported device", self.name),
        }
    }

    /// Returns whether the values are in GPU memory.
    #[must_use]
    pub fn is_on_gpu(&self) -> bool {
        self.leaf.device().is_cuda()
    }
}

/// Returns the storage if it is on the host, otherwise an empty storage.
fn on_host(storage: Storage) -> Result<CpuStorage> {
    match storage {
        Storage::Cpu(values) => Ok(values),
        _ => Ok(CpuStorage::F4(vec![])),
    }
}
