//! A transformer's feed-forward network, computed one tile of rows at a time.
//!
//! Its hidden activations are the widest of a transformer, and each row's activations do not depend on other rows. The
//! forward therefore keeps only the input. The backward recomputes the hidden activations of one tile of rows, uses
//! them and frees them. This is the TiledMLP of Bekman et al., "Arctic Long Sequence Training", 2025. The products that
//! lead to the hidden activations run a second time: one product in addition to six for GPT-2, and two in addition to
//! nine for Llama.
//!
//! The results are bit-identical to those of the operations over all rows: a row's results depend on that row alone,
//! and the gradient of a weight accumulates from tile to tile (`sink/tiles.rs`).

use crate::activation::gated;
use crate::graph::apply::{apply, counted, in_graph};
use crate::graph::fused_block::{run_backward, unrecorded};
use crate::graph::many_inputs::{Carried, carry};
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{View, rows, with_last};
use crate::graph::output::{stored, tensor};
use crate::graph::storage::take;
use crate::linear::Projection;
use crate::linear::affine::BLOCK;
use crate::meta;
use crate::meta::footprint::{Costs, Footprint, Reads};
use crate::product::Elements;
use crate::sink;
use candle_core::{CpuStorage, DType, Result, Shape, Storage, Tensor, bail};
use candle_nn::Module;
use half::{bf16, f16};
use std::sync::{Mutex, PoisonError};
use zero_model_options::Activation;

/// The number of rows of a tile is a multiple of this number.
///
/// Sums over rows continue from one tile to the next. They stay bit-identical as long as no tile boundary cuts a group
/// of rows that are summed together. The gradient of a bias is summed in blocks of 64 rows. Products in bf16 sum rows
/// in pairs, or in groups of 32 on processors with AMX.
pub const TILE_UNIT: usize = 64;

const _: () = assert!(TILE_UNIT.is_multiple_of(BLOCK) && TILE_UNIT.is_multiple_of(32));

/// A feed-forward network that processes `tile_rows` rows at a time. The results are bit-identical to those of its
/// operations in sequence, and only the hidden activations of one tile are in memory.
///
/// The forward maps `x` of `[.., inputs]` in f32, bf16 or f16 to `[.., outputs]` and keeps only `x`. The backward
/// recomputes the hidden activations. A parameter's gradient goes to the [sink](crate::sink); without one, the backward
/// returns the gradient as a tensor of the parameter's shape and dtype.
///
/// ```
/// # use candle_core::{DType, Device, Result, Tensor};
/// use candle_nn::{Module, VarBuilder};
/// use zero_ops::{Activation, Linear, TiledMlp};
///
/// # fn main() -> Result<()> {
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let (up, down) = (Linear::new(16, 64, 0.02, vb.pp("up"))?, Linear::new(64, 16, 0.02, vb.pp("down"))?);
/// let mlp = TiledMlp::new(up, Activation::GeluNew, down, 128)?;
/// let x = Tensor::ones((2, 500, 16), DType::F32, &Device::Cpu)?;
/// assert_eq!(mlp.forward(&x)?.dims(), [2, 500, 16]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TiledMlp {
    hidden: Hidden,
    down: Projection,
    tile_rows: usize,
}

#[derive(Clone, Debug)]
enum Hidden {
    /// A projection followed by an activation.
    Activated(Projection, Activation),
    /// A gated activation of the projections gate and up.
    Gated([Projection; 2], Activation),
}

const OP: &str = "tiled-mlp";

impl TiledMlp {
    /// Creates down(activation(up(x))), the network of GPT-2.
    ///
    /// # Errors
    /// Fails if the weights' shapes do not match, or `tile_rows` is not a multiple of [`TILE_UNIT`].
    pub fn new(
        up: impl Into<Projection>,
        activation: Activation,
        down: impl Into<Projection>,
        tile_rows: usize,
    ) -> Result<Self> {
        let (up, down) = (up.into(), down.into());
        check(&[&up], &down, tile_rows)?;
        Ok(Self { hidden: Hidden::Activated(up, activation), down, tile_rows })
    }

    /// Creates down(activation(gate(x))·up(x)), the network of Llama and Gemma.
    ///
    /// # Errors
    /// Fails in the same cases as [`TiledMlp::new`].
    pub fn gated(
        activation: Activation,
        gate: impl Into<Projection>,
        up: impl Into<Projection>,
        down: impl Into<Projection>,
        tile_rows: usize,
    ) -> Result<Self> {
        let (gate, up, down) = (gate.into(), up.into(), down.into());
        check(&[&gate, &up], &down, tile_rows)?;
        Ok(Self { hidden: Hidden::Gated([gate, up], activation), down, tile_rows })
    }

    fn hidden(&self, x: &Tensor) -> Result<Tensor> {
        match &self.hidden {
            Hidden::Activated(up, activation) => up.forward_activated(x, *activation),
            Hidden::Gated([gate, up], activation) => gated(&gate.forward(x)?, *activation, &up.forward(x)?),
        }
    }

    /// Returns the parameters in the order in which the backward of the separate operations writes their gradients.
    fn parameters(&self) -> Vec<&Tensor> {
        let hidden = match &self.hidden {
            Hidden::Activated(up, _) => std::slice::from_ref(up),
            Hidden::Gated(both, _) => both,
        };
        std::iter::once(&self.down).chain(hidden.iter().rev()).flat_map(Projection::parameters).collect()
    }

    /// Returns dx, if `x` is tracked, and the gradients of the parameters that no sink takes.
    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Vec<Option<Tensor>>)> {
        let trained: Vec<&Tensor> = self.parameters().into_iter().filter(|parameter| parameter.track_op()).collect();
        let (xs, dys) = (Tiles::new(x, self.tile_rows)?, Tiles::new(dy, self.tile_rows)?);
        let run =
            || xs.each(|tile| run_backward(&xs.tile(tile)?, dys.tile(tile)?, |x| self.down.unmade(&self.hidden(x)?)));
        if meta::tracing() {
            return Ok((meta::in_tiles(&trained, run)?, vec![]));
        }
        let (dx, rest) = sink::in_tiles(&trained, run)?;
        let mut rest = trained.into_iter().zip(rest);
        let gradient = |parameter: &Tensor| {
            let Some((of, Some(gradient))) = parameter.track_op().then(|| rest.next()).flatten() else {
                return Ok(None);
            };
            Ok(Some(tensor(stored(OP, gradient, of.dtype())?, of.shape())))
        };
        Ok((dx, self.parameters().into_iter().map(gradient).collect::<Result<_>>()?))
    }
}

/// Checks that the weights match and that tiles do not change the results.
fn check(hidden: &[&Projection], down: &Projection, tile_rows: usize) -> Result<()> {
    if tile_rows == 0 || !tile_rows.is_multiple_of(TILE_UNIT) {
        bail!(
            "{OP}: tile_rows must be a multiple of {TILE_UNIT}, so that sums over rows stay bit-identical; got {tile_rows}"
        );
    }
    if hidden.iter().chain([&down]).any(|projection| projection.is_adapted()) {
        bail!(
            "{OP}: an adapter inside tiles is not implemented\n  help: compute all rows at once (remove `tiled_mlp_rows`), or target modules outside the feed-forward part (`adapter.target_modules`)"
        );
    }
    let (first, [inner, _]) = (hidden[0].sizes()?, down.sizes()?);
    for projection in hidden {
        let [inputs, outputs] = projection.sizes()?;
        if inputs != first[0] || outputs != inner {
            bail!(
                "{OP}: a projection from {inputs} inputs to {outputs} outputs does not match the first one, with {} inputs, and the last one, with {inner} inputs",
                first[0]
            );
        }
    }
    Ok(())
}

impl Module for TiledMlp {
    /// Maps `[.., inputs]` to `[.., outputs]`.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if !x.device().is_cpu() {
            bail!("{OP}: tiles of rows are unsupported on a GPU");
        }
        let (in_graph, parameters) = (in_graph(), self.parameters());
        let tracked = parameters.iter().any(|parameter| parameter.track_op()) || x.track_op();
        let xs = Tiles::new(&x.detach(), self.tile_rows)?;
        let y = unrecorded(|| xs.each(|tile| self.down.forward(&self.hidden(&xs.tile(tile)?)?).map(Some)))?;
        let Some(y) = y else { bail!("{OP}: no output") };
        if in_graph && !tracked {
            return Ok(y);
        }
        let (chain, carried) = carry(if in_graph { parameters } else { vec![] }.into_iter())?;
        let op = |values| Tiled { mlp: self.clone(), shape: y.shape().clone(), values: Mutex::new(values), carried };
        if meta::tracing() {
            return counted([x, &chain], op(None), y.clone());
        }
        let Storage::Cpu(values) = take(&y)? else { bail!("{OP}: the output on the CPU has lost its values") };
        apply([x, &chain], op(Some(values)))
    }
}

/// The node of candle's graph. Its forward only returns values that were computed before.
struct Tiled {
    mlp: TiledMlp,
    shape: Shape,
    /// Present until the node is created.
    values: Mutex<Option<CpuStorage>>,
    carried: Carried,
}

impl Footprint for Tiled {
    const READS: Reads = Reads::inputs([true, false, false]);

    fn footprint(&self, _: &[&Tensor]) -> Result<Costs> {
        bail!("{OP}: the operations inside are counted one by one")
    }
}

impl Op<2> for Tiled {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: Inputs<'_, CpuStorage, 2>) -> Result<(CpuStorage, Shape)> {
        match self.values.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(values) => Ok((values, self.shape.clone())),
            None => bail!("{OP}: the forward ran twice"),
        }
    }

    fn bwd(&self, [x, chain]: [&Tensor; 2], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (dx, gradients) = self.mlp.backward(x, dy)?;
        if !chain.track_op() && gradients.iter().any(Option::is_some) {
            bail!("{OP}: a parameter has no gradient buffer");
        }
        Ok([dx, self.carried.leave(gradients, chain)?])
    }
}

/// The rows of a tensor, cut into tiles; the last one may be shorter.
struct Tiles {
    /// `[rows, width]`, or the tensor's own shape if there is only one tile.
    tensor: Tensor,
    shape: Shape,
    count: usize,
    rows: usize,
}

impl Tiles {
    fn new(tensor: &Tensor, rows_of_a_tile: usize) -> Result<Self> {
        let (count, width) = rows(OP, tensor.shape())?;
        let shape = tensor.shape().clone();
        let tensor = if count <= rows_of_a_tile { tensor.clone() } else { tensor.reshape((count, width))? };
        Ok(Self { tensor, shape, count, rows: rows_of_a_tile })
    }

    /// Returns the tile that begins at this row.
    fn tile(&self, start: usize) -> Result<Tensor> {
        if self.count <= self.rows {
            return Ok(self.tensor.clone());
        }
        self.tensor.narrow(0, start, self.rows.min(self.count - start))
    }

    /// Calls `run` for every tile, with the index of the tile's first row, and joins the resulting rows. The result has
    /// the shape of this tensor except for the last dimension. Returns `None` if `run` returns nothing.
    fn each(&self, mut run: impl FnMut(usize) -> Result<Option<Tensor>>) -> Result<Option<Tensor>> {
        if self.count <= self.rows {
            return run(0);
        }
        let mut joined = None;
        // To count memory, two tiles suffice: the first tile, and a second one while the joined rows are in memory.
        let tiles = if meta::tracing() { 2 } else { usize::MAX };
        for start in (0..self.count).step_by(self.rows).take(tiles) {
            if let Some(rows) = run(start)? {
                let joined = match &mut joined {
                    Some(joined) => joined,
                    None => joined.insert(Joined::new(self, &rows)?),
                };
                joined.push(&rows)?;
            }
        }
        joined.map(Joined::finish).transpose()
    }
}

/// The joined rows of all tiles.
enum Joined {
    F32(Vec<f32>, Shape),
    Bf16(Vec<bf16>, Shape),
    F16(Vec<f16>, Shape),
    Hollow(Tensor),
}

impl Joined {
    /// Allocates all rows, with the width and dtype of `first`.
    fn new(tiles: &Tiles, first: &Tensor) -> Result<Self> {
        let (_, width) = rows(OP, first.shape())?;
        let (shape, len) = (with_last(&tiles.shape, width), tiles.count * width);
        if meta::tracing() {
            return Ok(Self::Hollow(meta::tensor(&shape, first.dtype())?));
        }
        Ok(match first.dtype() {
            DType::BF16 => Self::Bf16(Vec::with_capacity(len), shape),
            DType::F16 => Self::F16(Vec::with_capacity(len), shape),
            _ => Self::F32(Vec::with_capacity(len), shape),
        })
    }

    fn push(&mut self, rows: &Tensor) -> Result<()> {
        if let Self::Hollow(_) = self {
            return Ok(());
        }
        let held = rows.storage_and_layout();
        match (self, View::of(OP, &held)?.elements()) {
            (Self::F32(all, _), Elements::F32(rows)) => all.extend_from_slice(rows),
            (Self::Bf16(all, _), Elements::Bf16(rows)) => all.extend_from_slice(rows),
            (Self::F16(all, _), Elements::F16(rows)) => all.extend_from_slice(rows),
            _ => bail!("{OP}: the tiles have different dtypes"),
        }
        Ok(())
    }

    fn finish(self) -> Result<Tensor> {
        Ok(match self {
            Self::F32(all, shape) => tensor(CpuStorage::F32(all), shape),
            Self::Bf16(all, shape) => tensor(CpuStorage::BF16(all), shape),
            Self::F16(all, shape) => tensor(CpuStorage::F16(all), shape),
            Self::Hollow(tensor) => tensor,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Linear;
    use crate::graph::fused_block;
    use std::collections::HashSet;

    /// Returns the peak and the remaining bytes of a tiled backward, for gradients that already have a contribution
    /// or are deferred.
    fn traced(written: bool, deferred: bool) -> Result<[u64; 2]> {
        let [up, down] = [(512, 8), (8, 512)].map(|shape| meta::leaf(&shape.into(), DType::F32, true));
        let (up, down) = (up?, down?);
        let with_contribution: HashSet<_> = if written { [up.id(), down.id()].into() } else { HashSet::new() };
        meta::trace(with_contribution, || {
            let [up, down] = [up, down].map(|weight| Linear::from_tensors(weight, None));
            let mlp = TiledMlp::new(up, Activation::Relu, down, 64)?;
            let x = meta::leaf(&(640, 8).into(), DType::F32, true)?;
            let y = sink::promise(|| fused_block(&x, |x| mlp.forward(x)))?;
            assert_eq!(meta::now(), 640 * 8 * 4, "only the output is kept");
            if deferred {
                meta::defer();
            }
            let dy = meta::tensor(y.shape(), y.dtype())?;
            let before = meta::now();
            meta::reset_peak();
            let gradients = crate::backward_from(&[(y, dy)])?;
            let peak = meta::peak() - before;
            drop(gradients);
            Ok([peak, meta::now()])
        })
    }

    #[test]
    fn written_or_deferred_gradients_take_buffers_of_their_own() -> Result<()> {
        let weights = 2 * 8 * 512 * 4;
        let [peak, after] = traced(false, false)?;
        assert_eq!(traced(true, false)?, [peak + weights, after], "the buffers are freed after the backward");
        for written in [false, true] {
            assert_eq!(
                traced(written, true)?,
                [peak + weights, after + weights],
                "deferred gradients keep their buffers"
            );
        }
        Ok(())
    }
}
