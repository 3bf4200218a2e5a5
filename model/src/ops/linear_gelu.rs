//! A linear map and GELU in one operation.
//!
//! The map's output is the widest activation of a transformer. As a node of candle's graph its gradient would be
//! zeroed, added to and copied once more; here it lives only inside of the backward.

use super::affine::{Affine, bias_gradient, check_bias};
use super::kernel::{Isa, activation as kernel};
use super::operand::{f32s, f32s_of, stored};
use super::parallel::build;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use std::sync::OnceLock;

/// GELU's tanh form of x·W + b. In f32 the bits are those of the two operations after each other.
pub(crate) fn linear_gelu(x: &Tensor, weight: &Tensor, bias: &Tensor, affine: Affine) -> Result<Tensor> {
    x.apply_op3(weight, bias, LinearGelu { affine, product: OnceLock::new() })
}

struct LinearGelu {
    affine: Affine,
    /// x·W, kept for the backward.
    product: OnceLock<Vec<f32>>,
}

const OP: &str = "linear-gelu";

impl CustomOp3 for LinearGelu {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        xs: &CpuStorage,
        xl: &Layout,
        ws: &CpuStorage,
        wl: &Layout,
        bs: &CpuStorage,
        bl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (product, outputs, shape) = self.affine.product(OP, (xs, xl), (ws, wl))?;
        check_bias(OP, bl, outputs)?;
        let bias = f32s(OP, bs, bl)?;
        let y = build(product.len() / outputs, outputs, |range, y| {
            kernel::bias_gelu(Isa::best(), &product[range.start * outputs..], &bias, y);
        });
        let _ = self.product.set(product);
        Ok((stored(OP, y, xs.dtype())?, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(product) = self.product.get() else { bail!("{OP}: backward before forward") };
        let outputs = bias.elem_count();
        let d_sum = {
            let held = (dy.storage_and_layout(), bias.storage_and_layout());
            let (dy, bias) = (f32s_of(OP, &held.0)?, f32s_of(OP, &held.1)?);
            build(product.len() / outputs, outputs, |range, d_sum| {
                let range = range.start * outputs..range.end * outputs;
                kernel::bias_gelu_backward(Isa::best(), &product[range.clone()], &bias, &dy[range], d_sum);
            })
        };
        let (dx, d_weight) = self.affine.backward(OP, x, w, &d_sum)?;
        Ok((dx, d_weight, bias_gradient(OP, bias, &d_sum)?))
    }
}
