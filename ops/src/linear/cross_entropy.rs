//! The head of a language model and its loss, without holding the logits of all rows.
//!
//! Logits are a model's largest activation: rows × vocabulary. Their gradient is as large, and candle, which adds it to
//! a tensor of zeros, needs two more tensors of that size. This operation computes the logits of one chunk of rows at a
//! time. It computes the chunk's losses, turns the logits in place into their gradients, and adds these to dx and dW at
//! once (`head.rs`). The gradients are thus computed together with the loss. The backward only returns them and no
//! longer needs x or the weight.

use crate::cross_entropy::{Total, mean_over};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::{apply, traced};
use crate::graph::gradient::{deliver, try_deliver};
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{NO_TARGET, View, rows, targets_of};
use crate::graph::output::{stored, tensor};
use crate::linear::head::{Factors, Head, chunk_rows};
use crate::meta;
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, bytes, element_rooms, floats, indices_room};
use crate::product::Matrix;
use crate::sink;
use crate::tensor::OfRank;
use candle_core::{CpuStorage, D, DType, Result, Shape, Tensor, bail};

/// Computes the [`cross_entropy`](crate::cross_entropy) of x·Wᵀ: an f32 scalar, the mean over rows.
///
/// `x` is `[.., inputs]` and `weight` is `[classes, inputs]`. `targets` has the leading dimensions of `x` and holds
/// u32, i64 or u8 below `classes`. Logits are f32 even if `x` and `weight` are bf16 or f16.
///
/// Rows whose i64 target is [`IGNORE_INDEX`](crate::IGNORE_INDEX) are not part of the mean, and their gradient is zero,
/// as for `cross_entropy`. On the CPU, ignored rows cost nothing, because they are left out of the products.
///
/// `gradient` is the gradient that this loss will receive in the backward: 1 for `loss.backward()`, c for `(loss *
/// c)?.backward()`. Inside [`sink::Gradients::capture`], the forward writes the gradient of the weight to the sink,
/// multiplied by `gradient`. A different gradient in the backward is then an error. Outside of `capture`, the gradients
/// are kept until the backward, which rescales them if necessary. Pass detached tensors to compute no gradients.
///
/// # Errors
/// Fails if shapes or dtypes do not match, if there are no rows, or if a target is neither below `classes` nor an i64
/// `IGNORE_INDEX`. On a GPU such a target produces NaN, and `device::check` reports it later. `device::check` also
/// reports a gradient in the backward that differs from `gradient`.
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, targets: &Tensor, gradient: f32) -> Result<Tensor> {
    Ok(linear_cross_entropy_with_z_loss(x, weight, targets, gradient, 0.0)?.0)
}

/// Computes the [`cross_entropy_with_z_loss`](crate::cross_entropy_with_z_loss) of x·Wᵀ as [`linear_cross_entropy`]
/// does. Returns the loss, and the part of it that `z_loss` adds. The second value is `None` if `z_loss` is 0, and no
/// gradient flows through it.
///
/// # Errors
/// Fails in the same cases as [`linear_cross_entropy`].
pub fn linear_cross_entropy_with_z_loss(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    gradient: f32,
    z_loss: f32,
) -> Result<(Tensor, Option<Tensor>)> {
    linear_cross_entropy_of(x, weight, targets, (gradient, z_loss), None)
}

/// Computes [`linear_cross_entropy_with_z_loss`]. With `own`, every rank computes the logits of its own classes only.
pub(crate) fn linear_cross_entropy_of(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    (gradient, z_loss): (f32, f32),
    own: Option<&OfRank>,
) -> Result<(Tensor, Option<Tensor>)> {
    let (count, inputs) = rows(OP, x.shape())?;
    let (classes, weight_inputs) = weight.dims2()?;
    if inputs != weight_inputs || classes == 0 {
        bail!("{OP}: the input {:?} does not match the weight {:?}", x.shape(), weight.shape());
    }
    if count == 0 || targets.dims() != &x.dims()[..x.rank() - 1] {
        bail!("{OP}: the input {:?} does not match the targets {:?}", x.shape(), targets.shape());
    }
    if meta::tracing() {
        return Ok((traced([x, weight], &ToCompute { targets, ranks: own.map_or(1, OfRank::ranks) })?, None));
    }
    #[cfg(feature = "cuda")]
    if gpu::holds(x) {
        return gpu::linear_cross_entropy::linear_cross_entropy(x, weight, targets, (gradient, z_loss), own);
    }
    let mut targets = targets_of(OP, targets, own.map_or(classes, OfRank::classes))?;
    let counted = mean_over(&targets);
    let rows = some_rows(&mut targets);
    let ([loss, z], dx, d_weight) = {
        let held = (x.storage_and_layout(), weight.storage_and_layout());
        let (xs, w) = (View::of(OP, &held.0)?, View::of(OP, &held.1)?);
        let weight_matrix = Matrix::new(w.elements(), classes, inputs);
        let head = Head {
            x: xs.elements(),
            weight: weight_matrix,
            inputs,
            classes,
            rows: rows.as_deref(),
            targets: &targets,
            z_loss,
            own,
        };
        let mut dx = x.track_op().then(|| vec![0.0; x.elem_count()]);
        let factors = Factors::Same(gradient / counted as f32);
        let (mut total, mut d_weight) = (Total::default(), None);
        if !weight.track_op() {
            head.run(factors, dx.as_deref_mut(), None, |_, row| total.add(row))?;
        } else if sink::has(weight) {
            try_deliver(OP, weight, |out| head.run(factors, dx.as_deref_mut(), Some(out), |_, row| total.add(row)))?;
        } else {
            let out = d_weight.insert(vec![0.0; classes * inputs]);
            head.run(factors, dx.as_deref_mut(), Some(out), |_, row| total.add(row))?;
        }
        let dx = dx.map(|dx| stored(OP, dx, x.dtype())).transpose()?.map(|dx| tensor(dx, x.shape()));
        (total.mean(counted, z_loss), dx, d_weight)
    };
    let z = (z_loss != 0.0).then(|| Tensor::new(z, x.device())).transpose()?;
    Ok((apply([x, weight], Computed { loss, gradient, dx, d_weight })?, z))
}

const OP: &str = "linear-cross-entropy";

/// Drops the targets of ignored rows and returns the indices of the other rows, or `None` if no row is ignored.
fn some_rows(targets: &mut Vec<usize>) -> Option<Vec<usize>> {
    if !targets.contains(&NO_TARGET) {
        return None;
    }
    let rows = targets.iter().enumerate().filter(|(_, target)| **target != NO_TARGET).map(|(row, _)| row).collect();
    targets.retain(|&target| target != NO_TARGET);
    Some(rows)
}

/// The node of candle's graph. Its forward only returns values that were computed before.
struct Computed {
    loss: f32,
    /// The gradient that the forward assumed for the loss. `dx` and `d_weight` are already multiplied by it.
    gradient: f32,
    dx: Option<Tensor>,
    /// `None` if the weight needs no gradient, or if the forward already wrote it to the sink.
    d_weight: Option<Vec<f32>>,
}

impl Footprint for Computed {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, _: &[&Tensor]) -> Result<Costs> {
        bail!("{OP}: the operation has already run")
    }
}

/// The operation in a trace, which computes nothing.
struct ToCompute<'a> {
    targets: &'a Tensor,
    /// Number of ranks that split the classes.
    ranks: usize,
}

impl Footprint for ToCompute<'_> {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (x, weight) = (inputs[0], inputs[1]);
        let (count, classes) = (self.targets.elem_count(), weight.dim(0)?);
        let (copied, kept) = indices_room(self.targets);
        let at_once = chunk_rows(classes).min(count);
        let another = meta::another(weight);
        let (elements, dtype) = (if x.track_op() { x.elem_count() } else { 0 }, x.dtype());
        // Only i64 targets can be ignored. With them, the chunk's rows of x and its part of dx may be copies.
        let of_some = match self.targets.dtype() {
            DType::I64 => {
                let copied = at_once * x.dim(D::Minus1)?;
                floats(2 * count) + bytes(copied, dtype) + if x.track_op() { floats(copied) } else { 0 }
            }
            _ => 0,
        };
        let others = self.ranks - 1;
        let exchanged = if others == 0 { 0 } else { floats(3 * at_once * (2 + self.ranks)) };
        let chunk = floats(at_once * classes) + floats(3 * at_once) + exchanged + of_some;
        let saved = bytes(elements, dtype);
        // The gradient of x in f32, before it is rounded.
        let wide = floats(elements) - saved;
        let rounding = if wide == 0 { 0 } else { floats(elements) + element_rooms(dtype, elements, 0) };
        Ok(Costs {
            saved,
            hands_over: true,
            forward: copied.saturating_sub(saved).max(kept + (another + chunk + wide).max(rounding)),
            gradients: [true, false, false],
            exchanged: [floats(3 * count * others), 0].map(Exchanged::to_tensor),
            ..Costs::new((), DType::F32)
        })
    }
}

impl Op<2> for Computed {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: Inputs<'_, CpuStorage, 2>) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![self.loss]), Shape::from(())))
    }

    fn bwd(&self, [x, weight]: [&Tensor; 2], _: &Tensor, d_loss: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let d_loss = d_loss.to_dtype(DType::F32)?.to_scalar::<f32>()?;
        let scale = if d_loss == self.gradient { 1.0 } else { d_loss / self.gradient };
        let d_weight = match &self.d_weight {
            Some(d_weight) => deliver(OP, weight, |out| {
                for (out, d) in out.iter_mut().zip(d_weight) {
                    *out = d * scale;
                }
            })?,
            None if scale != 1.0 && weight.track_op() => {
                bail!("{OP}: the gradient of the loss is {d_loss}, but the forward assumed {}", self.gradient)
            }
            None => None,
        };
        let dx = match &self.dx {
            Some(dx) if scale == 1.0 => Some(dx.to_dtype(x.dtype())?),
            Some(dx) => Some((dx * f64::from(scale))?.to_dtype(x.dtype())?),
            None => None,
        };
        Ok([dx, d_weight])
    }
}
