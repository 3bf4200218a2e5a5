//! Nodes of candle's graph for operations with more inputs than its custom operations accept.
//!
//! The parameters pass through a chain of nodes that compute nothing and end in a scalar, which becomes an additional
//! input of the operation. The operation's backward stores the gradients of the parameters in the chain. candle then
//! runs the chain's backward, which returns these gradients.

use candle_core::{CpuStorage, CustomOp2, DType, Device, Layout, Result, Shape, Tensor, bail};
use std::sync::{Arc, Mutex, PoisonError};

/// The gradients passed from the operation to its parameters, in their order.
#[derive(Clone, Default)]
pub(crate) struct Carried(Arc<Mutex<Vec<Option<Tensor>>>>);

/// Returns the scalar that represents these parameters, and the place that carries their gradients. The scalar is
/// tracked if any parameter is.
pub(crate) fn carry<'a>(parameters: impl Iterator<Item = &'a Tensor>) -> Result<(Tensor, Carried)> {
    let carried = Carried::default();
    let mut chain = Tensor::zeros((), DType::F32, &Device::Cpu)?;
    for (index, parameter) in parameters.enumerate() {
        chain = chain.apply_op2(parameter, Carry { index, carried: carried.clone() })?;
    }
    Ok((chain, carried))
}

impl Carried {
    /// Stores the gradients. Returns the gradient of the scalar, if it is tracked.
    pub(crate) fn leave(&self, gradients: Vec<Option<Tensor>>, chain: &Tensor) -> Result<Option<Tensor>> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = gradients;
        chain.track_op().then(|| chain.zeros_like()).transpose()
    }
}

struct Carry {
    index: usize,
    carried: Carried,
}

const OP: &str = "carry";

impl CustomOp2 for Carry {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(
        &self,
        chain: &Tensor,
        _: &Tensor,
        _: &Tensor,
        d_chain: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let mut carried = self.carried.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(gradient) = carried.get_mut(self.index) else {
            bail!("{OP}: this backward ran before the backward of the operation")
        };
        Ok((chain.track_op().then(|| d_chain.clone()), gradient.take()))
    }
}
