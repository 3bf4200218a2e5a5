//! A language model's head whose classes are split among the ranks of a tensor group, and its loss.

use super::columns::gather_columns;
use super::{Along, OfRank, OwnEntries, exchanges};
use crate::Linear;
use crate::linear::cross_entropy::linear_cross_entropy_of;
use crate::linear::log_probs::linear_log_probs_of;
use crate::sequence::SequenceGroup;
use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};

/// The head of a language model, x·Wᵀ. If layers are built for a tensor group, the ranks split its classes: each rank
/// computes the logits of its own classes for whole sequences, and no rank holds all logits.
#[derive(Clone, Debug)]
pub struct VocabParallel {
    weight: Tensor,
    /// The classes of this rank, if ranks split the classes.
    cut: Option<OwnEntries>,
}

impl VocabParallel {
    /// Creates a head. The parameter `weight` has shape `[classes, inputs]` and is initialized from a normal
    /// distribution with standard deviation `std`.
    ///
    /// # Errors
    /// Returns errors of the builder.
    pub fn new(inputs: usize, classes: usize, std: f64, vb: &VarBuilder) -> Result<Self> {
        let normal = Init::Randn { mean: 0.0, stdev: std };
        let weight = super::get_cut(vb, &[classes, inputs], (0, &[classes]), "weight", normal)?;
        Ok(Self { weight, cut: OwnEntries::of(classes) })
    }

    /// Returns the weight of this rank's classes. It is padded if the classes do not divide evenly.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the same head with a weight that needs no gradient.
    #[must_use]
    pub fn detached(&self) -> Self {
        Self { weight: self.weight.detach(), cut: self.cut.clone() }
    }

    /// Returns the logits of all classes, `[batch, time, classes]`, on every rank. `x` is `[batch, time, inputs]`, or
    /// this rank's slice of it. If ranks split the classes, the logits have no backward.
    ///
    /// # Errors
    /// Fails if shapes or dtypes do not match, or if a rank is lost.
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let head = Linear::from_tensors(self.weight.clone(), None);
        match &self.cut {
            None => head.forward(x),
            Some(OwnEntries { all, .. }) => {
                let group = tensor_group()?;
                let own = head.forward(&exchanges::gather(x, &group, Along::Positions)?)?;
                gather_columns(&own, &group, *all)
            }
        }
    }

    /// Computes the [`linear_cross_entropy_with_z_loss`](crate::linear_cross_entropy_with_z_loss) of the logits of all
    /// classes. `x` is `[batch, time, inputs]`, or this rank's slice of it; `targets` is `[batch, time]`. All ranks get
    /// the same loss.
    ///
    /// # Errors
    /// Fails in the same cases as `linear_cross_entropy_with_z_loss`, and if a rank is lost.
    pub fn cross_entropy(
        &self,
        x: &Tensor,
        targets: &Tensor,
        (gradient, z_loss): (f32, f32),
    ) -> Result<(Tensor, Option<Tensor>)> {
        let weight = &self.weight;
        match &self.cut {
            None => linear_cross_entropy_of(x, weight, targets, (gradient, z_loss), None),
            Some(entries) => {
                let group = tensor_group()?;
                let x = exchanges::gather(x, &group, Along::Positions)?;
                let own = OfRank { group, entries: entries.clone() };
                linear_cross_entropy_of(&x, weight, targets, (gradient, z_loss), Some(&own))
            }
        }
    }

    /// Computes the [`linear_log_probs`](crate::linear_log_probs) of the logits of all classes. `x` is
    /// `[batch, time, inputs]`, or this rank's slice of it; `labels` and `of_group` are `[batch, time]`. All ranks get
    /// the same sums.
    ///
    /// # Errors
    /// Fails in the same cases as `linear_log_probs`, and if a rank is lost.
    pub fn log_probs(&self, x: &Tensor, labels: &Tensor, of_group: &Tensor, groups: usize) -> Result<Tensor> {
        let labels = (labels, of_group, groups);
        match &self.cut {
            None => linear_log_probs_of(x, &self.weight, labels, None),
            Some(entries) => {
                let group = tensor_group()?;
                let x = exchanges::gather(x, &group, Along::Positions)?;
                linear_log_probs_of(&x, &self.weight, labels, Some(OfRank { group, entries: entries.clone() }))
            }
        }
    }
}

fn tensor_group() -> Result<SequenceGroup> {
    match SequenceGroup::of_layers() {
        Some(group) => Ok(group),
        None => bail!("a head whose classes are split across ranks runs outside a tensor group"),
    }
}
