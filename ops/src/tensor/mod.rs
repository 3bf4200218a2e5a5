//! Tensor parallelism: a group of ranks cuts the parameters of attentions, feed-forward networks, embeddings and heads among
//! them, and each computes the part that belongs to its parameters.
//!
//! Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism", 2019, with the
//! sequence parallelism of Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022: elsewhere,
//! as in norms and residual sums, each rank has a slice of the positions of every sequence
//! ([`Sharing::Layers`](crate::Sharing)).
//!
//! [`whole_sequences`] gathers the slices before maps whose outputs are cut ([`Linear::column_parallel`](crate::Linear)).
//! [`RowParallel`] maps have cut inputs. Their outputs are summed over the ranks, and each rank keeps the sum's slice. The
//! backward of either exchange is the other one.
//!
//! Parameters that are not cut see slices, or what is computed from cut parameters. Their gradients are therefore parts of sums
//! over the ranks, which the engine adds up once a step.

mod columns;
mod cut;
mod exchanges;
mod slices;
mod vocabulary;

use crate::linear::Projection;
use crate::sequence::SequenceGroup;
use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};

pub use cut::{Cut, Run, asks_cut, cutting, get_cut, with_cuts};
pub(crate) use cut::{OwnEntries, cut_of, get_part};
pub(crate) use vocabulary::OfRank;
pub use vocabulary::VocabParallel;

/// How the parameters of a linear map are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parallel<'a> {
    Whole,
    /// Along the outputs, the concatenation of these parts.
    Outputs(&'a [usize]),
    Inputs,
}

impl Parallel<'_> {
    /// Requests a parameter of the map of shape `whole`. `inputs` and `outputs` are the dimensions of the map's inputs and outputs,
    /// if the parameter has them. The parameter is cut along the one that is cut.
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

    /// Returns how such a parameter is cut.
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

    /// Requests the bias of the map. That of a map with cut inputs is not cut.
    pub(crate) fn bias(self, outputs: usize, vb: &VarBuilder) -> Result<Option<Tensor>> {
        self.get(vb, &[outputs], [None, Some(0)], "bias", Init::Const(0.0)).map(Some)
    }
}

/// Runs layers on whole sequences. `x` is this rank's slice, `[batch, slice, …]`, and `run` gets `[batch, time, …]`. Without a
/// tensor group, `run` gets `x` itself.
///
/// Everything in `run` must be computed from parameters that are cut, and the result summed over the ranks by [`RowParallel`],
/// since the backward sums the gradients of `x` over the ranks.
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

/// Does the same as [`whole_sequences`] for layers that compute each position alone, such as feed-forward networks. `run` gets the
/// slices of all ranks behind each other, `[ranks · batch, slice, …]`, which saves copies.
///
/// # Errors
/// As [`whole_sequences`].
pub fn whole_rows(x: &Tensor, run: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    whole(x, Along::Batch, run)
}

/// The dimension along which the slices of all ranks are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Along {
    Batch,
    Positions,
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

/// Returns the number of this rank's heads of an attention with `heads` heads, while layers of `model` are built.
///
/// # Errors
/// Fails if they cannot be divided evenly among the ranks of the tensor group.
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
        None => bail!("a table that is cut among ranks is read outside of a tensor group"),
    }
}

/// A linear map whose inputs are cut among the ranks of a tensor group: each rank computes the sum over its inputs, and these are
/// summed over the ranks. Made by [`Linear::row_parallel`](crate::Linear) and [`Conv1D::row_parallel`](crate::Conv1D).
#[derive(Clone, Debug)]
pub struct RowParallel<L> {
    map: L,
    /// The bias of a map that is cut, which is added after the sum.
    bias: Option<Tensor>,
    is_cut: bool,
}

impl<L> RowParallel<L> {
    pub(crate) fn new(map: Projection, wrap: fn(Projection) -> L) -> Self {
        match cutting() {
            None => Self { map: wrap(map), bias: None, is_cut: false },
            Some(_) => {
                let (map, bias) = map.without_bias();
                Self { map: wrap(map), bias, is_cut: true }
            }
        }
    }

    /// Returns the map of this rank, whose outputs are to be passed to [`RowParallel::sum`].
    pub fn map(&self) -> &L {
        &self.map
    }

    /// Sums `[batch, time, outputs]` over the ranks and returns this rank's slice with the bias. Returns `y` itself if the map is
    /// not cut.
    ///
    /// # Errors
    /// Fails outside of [`whole_sequences`] and [`whole_rows`], and if a rank is lost.
    pub fn sum(&self, y: &Tensor) -> Result<Tensor> {
        if !self.is_cut {
            return Ok(y.clone());
        }
        let Some((group, along)) = SequenceGroup::of_gathered() else {
            bail!("a map with cut inputs runs inside of `whole_sequences` or `whole_rows`");
        };
        exchanges::sum(y, self.bias.as_ref(), &group, along)
    }
}

impl<L: Module> Module for RowParallel<L> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.sum(&self.map.forward(x)?)
    }
}
