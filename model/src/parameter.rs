//! A parameter: a candle autograd leaf whose storage comes and goes.
//!
//! While *released* a leaf keeps its shape but holds an empty storage of a dummy dtype, which every candle
//! operation refuses with an error; an empty `f32` vector would be read out of bounds by `matmul`.
//! While *gathered* it holds the full values. The swap happens behind the leaf's `Arc`, so a module
//! is built once, and a graph saved before a release backpropagates after the next gather.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, op::BackpropOp};
use candle_nn::Init;
use zero_ops::graph::storage::{nothing, swap, take};

/// Index of a parameter in its model: the order of construction, the same on every rank.
pub type ParameterId = usize;

/// One parameter of a model.
#[derive(Debug)]
pub struct Parameter {
    name: String,
    shape: Shape,
    dtype: DType,
    init: Init,
    layer: usize,
    leaf: Tensor,
}

impl Parameter {
    pub(crate) fn new(
        name: String,
        shape: Shape,
        dtype: DType,
        device: &Device,
        init: Init,
        layer: usize,
    ) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            candle_core::bail!("parameter `{name}` is {dtype:?}; parameters are f32, bf16 or f16");
        }
        let leaf = Tensor::from_storage(nothing(dtype, device)?, shape.clone(), BackpropOp::none(), true);
        let parameter = Self { name, shape, dtype, init, layer, leaf };
        parameter.release()?;
        Ok(parameter)
    }

    /// Full name: the layer's name, a dot, the name inside the layer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape; never changes, also while released.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.elem_count()
    }

    /// The working dtype: f32, bf16 or f16.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How the module that asked for it wants it initialised.
    #[must_use]
    pub fn init(&self) -> Init {
        self.init
    }

    /// Index of the layer that owns it.
    #[must_use]
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The autograd leaf that the layer's module holds.
    #[must_use]
    pub fn leaf(&self) -> &Tensor {
        &self.leaf
    }

    /// Gives the leaf its full values; what it held before is returned. On a GPU it gets a copy of them, and they are returned themselves.
    ///
    /// # Errors
    /// If the values have another dtype or length than the parameter, or the memory of a GPU does not suffice.
    pub fn fill(&self, values: CpuStorage) -> Result<CpuStorage> {
        let (dtype, len) = match &values {
            CpuStorage::F32(v) => (DType::F32, v.len()),
            CpuStorage::BF16(v) => (DType::BF16, v.len()),
            CpuStorage::F16(v) => (DType::F16, v.len()),
            _ => candle_core::bail!("parameter `{}` cannot hold these values", self.name),
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

    /// Gives the leaf its full values, which are on its device; what it held before is returned.
    ///
    /// # Errors
    /// If they are on another device, or of another dtype than the parameter.
    pub fn put(&self, values: Storage) -> Result<Storage> {
        match values {
            Storage::Cpu(values) => self.fill(values).map(Storage::Cpu),
            values if values.dtype() == self.dtype => swap(&self.leaf, values),
            values => candle_core::bail!("parameter `{}` holds {:?}, not {:?}", self.name, self.dtype, values.dtype()),
        }
    }

    /// Takes the values out of the leaf, wherever they are; until the next [`Parameter::put`] every use of it is an error.
    ///
    /// # Errors
    /// If candle cannot reach the storage.
    pub fn take(&self) -> Result<Storage> {
        take(&self.leaf)
    }

    /// Takes the values out of the leaf; until the next [`Parameter::fill`] every use of it is an error. Those on a GPU are gone.
    ///
    /// # Errors
    /// If candle cannot reach the storage.
    pub fn release(&self) -> Result<CpuStorage> {
        on_host(take(&self.leaf)?)
    }

    /// Changes the values: in place, or those on a GPU in a copy on the host, which then takes their place.
    ///
    /// # Errors
    /// What `change` returns, or the driver of a GPU.
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

    /// Reads the values; of those on a GPU a copy, when all is done that came before.
    ///
    /// # Errors
    /// What `read` returns, or the driver of a GPU.
    pub fn read<T>(&self, read: impl FnOnce(&CpuStorage) -> Result<T>) -> Result<T> {
        let (storage, _) = self.leaf.storage_and_layout();
        match &*storage {
            Storage::Cpu(values) => read(values),
            Storage::Cuda(values) => read(&values.to_cpu_storage()?),
            Storage::Metal(_) => candle_core::bail!("parameter `{}` is on a device that is not known here", self.name),
        }
    }

    /// Whether the values are in the memory of a GPU.
    #[must_use]
    pub fn is_on_gpu(&self) -> bool {
        self.leaf.device().is_cuda()
    }
}

/// What was taken out of a leaf, as far as the host has it.
fn on_host(storage: Storage) -> Result<CpuStorage> {
    match storage {
        Storage::Cpu(values) => Ok(values),
        _ => Ok(CpuStorage::F4(vec![])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(values: Vec<f32>) -> Parameter {
        let p = Parameter::new("w".into(), Shape::from((2, 2)), DType::F32, &Device::Cpu, candle_nn::init::ZERO, 0)
            .unwrap();
        p.fill(CpuStorage::F32(values)).unwrap();
        p
    }

    #[test]
    fn a_released_parameter_is_refused_by_every_operation() {
        let p = parameter(vec![1.0; 4]);
        p.release().unwrap();
        let x = Tensor::ones((2, 2), DType::F32, &candle_core::Device::Cpu).unwrap();
        assert!(x.matmul(p.leaf()).is_err());
        assert!(x.add(p.leaf()).is_err());
        assert!(p.leaf().exp().is_err());
        assert!(p.leaf().t().unwrap().contiguous().is_err());
        assert!(p.leaf().to_vec2::<f32>().is_err());
    }

    #[test]
    fn a_graph_saved_before_a_release_backpropagates_after_the_next_gather() {
        let p = parameter(vec![1.0, 2.0, 3.0, 4.0]);
        let x = candle_core::Var::new(&[[1f32, 2.0], [3.0, 4.0]], &candle_core::Device::Cpu).unwrap();
        let y = x.matmul(&p.leaf().t().unwrap()).unwrap().sum_all().unwrap();
        let values = p.release().unwrap();
        assert!(y.backward().is_err());
        p.fill(values).unwrap();
        let grads = y.backward().unwrap();
        assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>().unwrap(), [[4.0, 6.0], [4.0, 6.0]]);
        assert_eq!(grads.get(p.leaf()).unwrap().to_vec2::<f32>().unwrap(), [[4.0, 6.0], [4.0, 6.0]]);
    }

    #[test]
    fn wrong_values_are_refused() {
        let p = parameter(vec![0.0; 4]);
        assert!(p.fill(CpuStorage::F32(vec![0.0; 3])).is_err());
        assert!(p.fill(CpuStorage::F64(vec![0.0; 4])).is_err());
    }
}
