//! Tensor parallelism: a group of ranks splits the parameters of attentions, feed-forward networks, embeddings and
//! heads. Each rank computes the part that belongs to its parameters.
//!
//! The scheme is that of Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model
//! parallelism", 2019, with the sequence parallelism of Korthikanti et al., "Reducing activation recomputation in large
//! transformer models", 2022. Elsewhere, as in norms and residual sums, each rank has a slice of the positions of every
//! sequence ([`Sharing::Layers`](crate::Sharing)).
//!
//! [`whole_sequences`] gathers the slices before maps with split outputs ([`Linear::column_parallel`](crate::Linear)).
//! [`RowParallel`] maps have split inputs. Their outputs are summed over the ranks, and each rank keeps its slice of
//! the sum. The backward of each of these two exchanges is the other one.
//!
//! Parameters that are not split are applied to slices, or to results of split parameters. The gradient that a rank
//! computes for them is therefore only a part of a sum over the ranks, which the engine adds up once per step.

mod along;
mod classes;
mod columns;
mod cut;
mod exchanges;
mod row_parallel;
mod slices;
mod vocabulary;

use crate::sequence::SequenceGroup;
use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

pub(crate) use along::Along;
pub(crate) use classes::OfRank;
pub use cut::{Cut, Run, asks_cut, cutting, get_cut, with_cuts};
pub(crate) use cut::{OwnEntries, cut_of, get_part};
pub use row_parallel::RowParallel;
pub use vocabulary::VocabParallel;

/// How the parameters of a linear layer are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parallel<'a> {
    Whole,
    /// Along the outputs, which are the concatenation of these parts.
    Outputs(&'a [usize]),
    Inputs,
}

impl Parallel<'_> {
    /// Requests a parameter of shape `whole` for the map. `inputs` and `outputs` say which dimension of the parameter
    /// is the map's inputs and which is its outputs, if the parameter has them. The parameter is cut along the
    /// dimension that `self` names, if it has this dimension.
    pub(crate) fn get(
        self,
        vb: &VarBuilder,
        whole: &[usize],
        [inputs, outputs]: [Option<usize>; 2],
        name: &str,
        init: Init,
    ) -> Result<Tensor> {
        get_part(vb, whole, self.cut(vb, whole, [inputs, outputs])?, name, init)
    }

    /// Returns how the parameter of [`get`](Self::get) is cut.
    pub(crate) fn cut(
        self,
        vb: &VarBuilder,
        whole: &[usize],
        [inputs, outputs]: [Option<usize>; 2],
    ) -> Result<Option<Cut>> {
        match (self, inputs, outputs) {
            (Self::Inputs, Some(inputs), _) => cut_of(vb, whole, (inputs, &[whole[inputs]])),
            (Self::Outputs(parts), _, Some(outputs)) => cut_of(vb, whole, (outputs, parts)),
            _ => Ok(None),
        }
    }

    /// Requests the bias of the map. If the inputs are cut, the bias is whole.
    pub(crate) fn bias(self, outputs: usize, vb: &VarBuilder) -> Result<Option<Tensor>> {
        self.get(vb, &[outputs], [None, Some(0)], "bias", Init::Const(0.0)).map(Some)
    }
}

/// Runs layers on whole sequences. `x` is this rank's slice, `[batch, slice, …]`, and `run` gets `[batch, time, …]`.
/// Without a tensor group, `run` gets `x` itself.
///
/// `run` may only use parameters that are split, and must sum its result over the ranks with [`RowParallel`], because
/// the backward sums the gradients of `x` over the ranks.
///
/// # Errors
/// Returns the error of `run`. Fails if a rank is lost.
///
/// ```
/// # use candle_core::{Result, Tensor};
/// # use candle_nn::Module;
/// use zero_ops::{Linear, RowParallel, gelu, whole_rows};
///
/// /// A feed-forward network whose hidden units are cut among ranks.
/// struct Mlp {
///     up: Linear,
///     down: RowParallel<Linear>,
/// }
///
/// impl Module for Mlp {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         whole_rows(x, |x| self.down.forward(&gelu(&self.up.forward(x)?)?))
///     }
/// }
/// ```
pub fn whole_sequences(x: &Tensor, run: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    whole(x, Along::Positions, run)
}

/// Does the same as [`whole_sequences`], for layers that compute each position alone, such as feed-forward networks.
/// `run` gets the slices of all ranks stacked along the first dimension, `[ranks · batch, slice, …]`, which saves
/// copies.
///
/// # Errors
/// Fails in the same cases as [`whole_sequences`].
pub fn whole_rows(x: &Tensor, run: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    whole(x, Along::Batch, run)
}

fn whole(x: &Tensor, along: Along, run: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    match SequenceGroup::of_layers() {
        None => run(x),
        Some(group) => {
            let x = exchanges::gather(x, &group, along)?;
            group.gathered(along, || run(&x))
        }
    }
}

/// Returns how many of an attention's `heads` heads belong to this rank. Call it while layers are built; errors name
/// `model`.
///
/// # Errors
/// Fails if the heads cannot be divided evenly among the ranks of the tensor group.
pub fn own_heads(model: &str, heads: usize) -> Result<usize> {
    match cutting() {
        None => Ok(heads),
        Some((_, ranks)) if heads.is_multiple_of(ranks) => Ok(heads / ranks),
        Some((_, ranks)) => bail!("{model}: {heads} heads cannot be divided evenly among {ranks} ranks"),
    }
}

/// Sums `[batch, time, …]` over the ranks of the tensor group, and returns this rank's slice.
pub(crate) fn sum_to_slices(y: &Tensor) -> Result<Tensor> {
    match SequenceGroup::of_layers() {
        Some(group) => exchanges::sum(y, None, &group, Along::Positions),
        None => bail!("a table that is split across ranks is read outside a tensor group"),
    }
}
