//! The log-probabilities that a language model's head gives to labels, summed by group, without holding the logits of
//! all rows.
//!
//! Losses that compare whole answers, such as that of DPO, need these sums. The gradient of such a loss depends on all
//! sums of a sample, so the backward computes the logits a second time.

use crate::graph::apply::apply;
use crate::graph::gradient::try_deliver;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{NO_TARGET, View, indices_of, rows, targets_of};
use crate::graph::output::{stored, tensor};
use crate::linear::head::{Factors, Head, chunk_rows};
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, bytes, element_rooms, floats, indices_room};
use crate::product::Matrix;
use crate::tensor::OfRank;
use candle_core::{CpuStorage, D, DType, Result, Shape, Tensor, bail};
use std::sync::OnceLock;

/// Returns Σ ln softmax(x·Wᵀ)\[label] over the labels of each group: `[batch, groups]` in f32.
///
/// `x` is `[batch, time, inputs]` in f32, bf16 or f16, `weight` `[classes, inputs]`. `labels` is `[batch, time]` and
/// holds i64, u32 or u8 below `classes`; an i64 label of [`IGNORE_INDEX`](crate::IGNORE_INDEX) belongs to no group and
/// costs nothing. `of_group` is `[batch, time]` of u8 or u32 and holds the group of each label, below `groups`. Logits
/// are f32 whatever the dtype of `x`, and sums are added in f64, in order.
///
/// # Errors
/// Fails if shapes or dtypes do not match, or if a label or group is out of range. Also fails on a GPU, where this
/// operation is not implemented.
pub fn linear_log_probs(
    x: &Tensor,
    weight: &Tensor,
    labels: &Tensor,
    of_group: &Tensor,
    groups: usize,
) -> Result<Tensor> {
    linear_log_probs_of(x, weight, (labels, of_group, groups), None)
}

/// Computes [`linear_log_probs`]. With `own`, every rank computes the logits of its own classes only, and all ranks get
/// the same sums. The gradient of `x` is then this rank's part of a sum over the ranks.
pub(crate) fn linear_log_probs_of(
    x: &Tensor,
    weight: &Tensor,
    (labels, of_group, groups): (&Tensor, &Tensor, usize),
    own: Option<OfRank>,
) -> Result<Tensor> {
    let (batch, time, inputs) = x.dims3()?;
    let (classes, weight_inputs) = weight.dims2()?;
    if inputs != weight_inputs || classes == 0 || batch * time == 0 {
        bail!("{OP}: the input {:?} does not match the weight {:?}", x.shape(), weight.shape());
    }
    for (what, shape) in [("labels", labels.dims()), ("groups", of_group.dims())] {
        if shape != [batch, time] {
            bail!("{OP}: the input {:?} does not match the {what} {shape:?}", x.shape());
        }
    }
    let (labels, of_group) = (labels.clone(), of_group.clone());
    apply([x, weight], LogProbs { labels, of_group, groups, own, placed: OnceLock::new() })
}

const OP: &str = "linear-log-probs";

struct LogProbs {
    labels: Tensor,
    of_group: Tensor,
    groups: usize,
    /// The classes of this rank, if ranks split the classes.
    own: Option<OfRank>,
    /// Set by the forward.
    placed: OnceLock<Placed>,
}

/// The labels that belong to a group, in order.
struct Placed {
    targets: Vec<usize>,
    /// The row of x of each label.
    rows: Vec<usize>,
    /// The element of the output to which each label's log-probability is added.
    sums: Vec<usize>,
}

impl LogProbs {
    fn head<'a>(&'a self, placed: &'a Placed, x: &'a View<'_>, weight: &'a View<'_>, shape: [usize; 2]) -> Head<'a> {
        let [classes, inputs] = shape;
        let weight = Matrix::new(weight.elements(), classes, inputs);
        let (rows, targets) = (Some(&*placed.rows), &*placed.targets);
        Head { x: x.elements(), weight, inputs, classes, rows, targets, z_loss: 0.0, own: self.own.as_ref() }
    }

    fn place(&self, classes: usize) -> Result<Placed> {
        let classes = self.own.as_ref().map_or(classes, OfRank::classes);
        let labels = targets_of(OP, &self.labels, classes)?;
        let of_group = indices_of(OP, &self.of_group, self.groups)?;
        let time = self.labels.dim(D::Minus1)?;
        let mut placed = Placed { targets: vec![], rows: vec![], sums: vec![] };
        for (row, (label, group)) in labels.into_iter().zip(of_group).enumerate() {
            if label != NO_TARGET {
                placed.targets.push(label);
                placed.rows.push(row);
                placed.sums.push(row / time * self.groups + group);
            }
        }
        Ok(placed)
    }
}

impl Footprint for LogProbs {
    const READS: Reads = Reads::inputs([true, true, false]);

    /// Counts every label, whether ignored or not.
    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (x, classes, dtype) = (inputs[0], inputs[1].dim(0)?, inputs[0].dtype());
        let (count, width) = rows(OP, x.shape())?;
        let (copied, kept) = indices_room(&self.labels);
        let placed = 3 * kept;
        let at_once = chunk_rows(classes).min(count);
        let ranks = self.own.as_ref().map_or(1, OfRank::ranks);
        let joined = if ranks == 1 { 0 } else { floats(3 * at_once * (2 + ranks)) };
        let chunk = floats(at_once * classes) + floats(3 * at_once) + joined + bytes(at_once * width, dtype);
        // The gradient of x in f32 before it is rounded, and the gradient of a chunk's rows.
        let dx = match x.track_op() {
            true => floats(at_once * width) + if dtype == DType::F32 { 0 } else { floats(x.elem_count()) },
            false => 0,
        };
        Ok(Costs {
            saved: placed,
            forward: (copied + kept).max(chunk),
            backward: floats(count) + (chunk + dx).max(element_rooms(dtype, x.elem_count(), 0)),
            gradients: [true, false, false],
            exchanged: [floats(3 * count * (ranks - 1)); 2].map(Exchanged::to_tensor),
            ..Costs::new((x.dim(0)?, self.groups), DType::F32)
        })
    }
}

impl Op<2> for LogProbs {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl), (ws, wl)]: Inputs<'_, CpuStorage, 2>) -> Result<(CpuStorage, Shape)> {
        let (classes, inputs) = wl.shape().dims2()?;
        let (x, weight) = (View::new(OP, xs, xl)?, View::new(OP, ws, wl)?);
        let placed = self.place(classes)?;
        let shape = Shape::from((xl.dims()[0], self.groups));
        let mut sums = vec![0.0; shape.elem_count()];
        let head = self.head(&placed, &x, &weight, [classes, inputs]);
        head.run(Factors::Same(0.0), None, None, |target, row| sums[placed.sums[target]] -= row.loss)?;
        // The forward runs once, because each call of `linear_log_probs` creates its own operation.
        let _ = self.placed.set(placed);
        Ok((CpuStorage::F32(sums.into_iter().map(|sum: f64| sum as f32).collect()), shape))
    }

    fn bwd(&self, [x, weight]: [&Tensor; 2], _: &Tensor, d_sums: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let Some(placed) = self.placed.get() else { bail!("{OP}: the backward ran before the forward") };
        let (classes, inputs) = weight.dims2()?;
        let d_sums = d_sums.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        // A group's sum is minus the sum of its labels' losses.
        let factors: Vec<f32> = placed.sums.iter().map(|&sum| -d_sums[sum]).collect();
        let held = (x.storage_and_layout(), weight.storage_and_layout());
        let (xs, w) = (View::of(OP, &held.0)?, View::of(OP, &held.1)?);
        let head = self.head(placed, &xs, &w, [classes, inputs]);
        let mut dx = x.track_op().then(|| vec![0.0; x.elem_count()]);
        let factors = Factors::Each(&factors);
        let d_weight = match weight.track_op() {
            true => try_deliver(OP, weight, |out| head.run(factors, dx.as_deref_mut(), Some(out), |_, _| {}))?,
            false => head.run(factors, dx.as_deref_mut(), None, |_, _| {}).map(|()| None)?,
        };
        let dx = dx.map(|dx| stored(OP, dx, x.dtype())).transpose()?.map(|dx| tensor(dx, x.shape()));
        Ok([dx, d_weight])
    }
}
