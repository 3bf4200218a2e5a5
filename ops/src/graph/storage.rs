//! Exchanges the storage behind a tensor, so that a leaf of candle's graph can be released and gathered again.

use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor};

/// Returns storage without elements.
pub fn nothing(dtype: DType, device: &Device) -> Result<Storage> {
    match device {
        Device::Cpu => Ok(Storage::Cpu(match dtype {
            DType::BF16 => CpuStorage::BF16(vec![]),
            DType::F16 => CpuStorage::F16(vec![]),
            DType::F4 => CpuStorage::F4(vec![]),
            _ => CpuStorage::F32(vec![]),
        })),
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => crate::device::nothing(dtype, device).map(Storage::Cuda),
        other => candle_core::bail!(
            "parameters cannot be on {other:?}: this program was built without support for that device"
        ),
    }
}

/// Takes the values of a tensor. Reading the tensor afterwards is an error.
pub fn take(tensor: &Tensor) -> Result<Storage> {
    // No operation accepts F4, so reading the tensor is an error.
    swap(tensor, nothing(DType::F4, tensor.device())?)
}

/// Replaces the storage behind a tensor by `values`, of any dtype and number, on the same device. Returns the previous
/// storage.
pub fn swap(tensor: &Tensor, values: Storage) -> Result<Storage> {
    let swap = Swap(std::sync::Mutex::new(values));
    tensor.inplace_op1(&swap)?;
    swap.0.into_inner().map_err(|_| candle_core::Error::Msg("storage swap was poisoned".into()))
}

/// Exchanges the storage behind a tensor with the one that it holds.
struct Swap(std::sync::Mutex<Storage>);

impl Swap {
    fn held(&self) -> Result<std::sync::MutexGuard<'_, Storage>> {
        self.0.lock().map_err(|_| candle_core::Error::Msg("storage swap was poisoned".into()))
    }
}

const TWO_DEVICES: &str = "cannot replace the values of a tensor with values on another device";

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let Storage::Cpu(held) = &mut *self.held()? else { candle_core::bail!("{TWO_DEVICES}") };
        std::mem::swap(storage, held);
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let Storage::Cuda(held) = &mut *self.held()? else { candle_core::bail!("{TWO_DEVICES}") };
        std::mem::swap(storage, held);
        Ok(())
    }
}
