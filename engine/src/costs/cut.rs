//! Measures the time of each layer, with one layer in memory at a time. Used by `pipeline.partition_method: time`.

use std::time::Instant;

use candle_core::{CpuStorage, Tensor, Var};
use zero_comm::launcher_environment::LauncherEnvironment;
use zero_comm::{Buffer, Communicator};
use zero_model::ops::quantized_storage;
use zero_model::sink::{DeferredGradients, Gradients, promise};
use zero_model::{Activations, Model, Parameter, ParameterId, Pass, backward_from, init};
use zero_partition::{Layout, Widths, working};
use zero_pipeline::simulate::LayerCosts;
use zero_pipeline::split::LayerCost;
use zero_pipeline::{Placement, SegmentShape};

use crate::batch::Batch;
use crate::error::Error;
use crate::settings::Settings;

/// Runs per layer. The shortest run counts, because other load on the machine only adds time.
const REPEATS: usize = 3;

/// Measures seconds and bytes of each layer for a micro-batch, with initial parameters. Calls `found` after each layer
/// with the layer's index, its costs, and a lower bound of the bytes of its saved activations (inputs plus outputs).
///
/// # Errors
/// Returns errors of layers and of `found`.
pub(crate) fn measure(
    model: &Model,
    batch: &Batch,
    seed: u64,
    mut found: impl FnMut(usize, &LayerCosts, u64) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut flow = batch.inputs.clone();
    for layer in 0..model.layers().len() {
        let uses: Vec<ParameterId> = model.layers()[layer].uses().to_vec();
        for &parameter in &uses {
            let parameter = &model.parameters()[parameter];
            parameter.fill(initial(parameter, seed)?)?;
        }
        let measured = of_layer(model, layer, &flow, batch, seed);
        for &parameter in &uses {
            model.parameters()[parameter].release()?;
        }
        let (cost, outputs) = measured?;
        let is_last = layer + 1 == model.layers().len();
        found(layer, &cost, cost.inputs + if is_last { 0 } else { size(outputs.tensors()) })?;
        flow = outputs;
    }
    Ok(())
}

/// The costs that `partition_method: time` balances.
#[derive(Debug, Clone, PartialEq)]
pub struct CutCosts {
    pub(crate) layers: Vec<LayerCost>,
    /// Maximum number of bytes that a stage may occupy on a rank.
    pub(crate) limit: u64,
}

impl CutCosts {
    /// Measures the layers on rank 0 and broadcasts their costs to all ranks, so that every rank cuts the model at the
    /// same layers. Collective. Rank 0 broadcasts the cost of each layer as soon as it is measured, so that no rank
    /// waits for long. Activations are estimated as inputs plus outputs, which is a lower bound. The memory limit is
    /// one rank's share of the memory of rank 0's host.
    ///
    /// # Errors
    /// Returns errors of layers. Fails if a rank is lost.
    pub(crate) fn measured(
        model: &Model,
        settings: &Settings,
        seed: u64,
        comm: &dyn Communicator,
        micro_batch: impl FnOnce() -> Result<Batch, Error>,
    ) -> Result<Self, Error> {
        let broadcast = |words: Vec<u64>| -> Result<Vec<u64>, Error> {
            let words = Buffer::I64(words.into_iter().map(|word| word as i64).collect());
            Ok(comm.broadcast(words, 0).wait()?.into_i64()?.into_iter().map(|word| word as u64).collect())
        };
        let mut costs = Self::equal(model.layers().len());
        if comm.rank() == 0 {
            let layout = Layout::new(model, &settings.layout).on_disk(&settings.tiers);
            let widths = settings.zero.widths(settings.dtype.size_in_bytes());
            let micro_batch = micro_batch()?;
            micro_batch.fits(model.signature(), true)?;
            measure(model, &micro_batch, seed, |layer, measured, activations| {
                costs.layers[layer] = LayerCost {
                    forward: measured.forward,
                    backward: measured.backward,
                    state: state(layer, &layout, &widths),
                    activations,
                };
                let LayerCost { forward, backward, state, activations } = costs.layers[layer];
                broadcast(vec![forward.to_bits(), backward.to_bits(), state, activations]).map(drop)
            })?;
        } else {
            for cost in &mut costs.layers {
                let words = broadcast(vec![0; 4])?;
                *cost = LayerCost {
                    forward: f64::from_bits(words[0]),
                    backward: f64::from_bits(words[1]),
                    state: words[2],
                    activations: words[3],
                };
            }
        }
        costs.limit = broadcast(vec![memory_of_a_rank(comm.size()).unwrap_or(u64::MAX)])?[0];
        Ok(costs)
    }

    /// Returns the costs of layers that all take the same time and no memory.
    #[must_use]
    pub fn equal(layers: usize) -> Self {
        Self {
            layers: vec![LayerCost { forward: 1.0, backward: 2.0, ..LayerCost::default() }; layers],
            limit: u64::MAX,
        }
    }
}

/// Returns the bytes of a layer's parameters, gradients and optimizer state on one rank.
fn state(layer: usize, layout: &Layout, widths: &Widths) -> u64 {
    let shape = layout.shape();
    let of_segment = |&segment: &usize| {
        let SegmentShape { elements, placements, is_trainable, .. } = shape.segments[segment];
        let held = |placement| match placement {
            Placement::Replicated => elements as u64,
            Placement::Sharded => elements.div_ceil(layout.ranks()) as u64,
        };
        let width = layout.segments()[segment].width(widths.parameter);
        let working = held(placements.parameters) * width as u64;
        if shape.first_user(segment) != Some(layer) || !is_trainable {
            return working;
        }
        let own = held(placements.optimizer);
        let states = layout.segments()[segment].state_bytes(own as usize, widths);
        working + held(placements.gradients) * widths.gradient as u64 + own * widths.master as u64 + states as u64
    };
    shape.layers[layer].segments.iter().map(of_segment).sum()
}

/// Returns this host's memory in bytes, divided by the number of its ranks; `None` if the system does not report it.
fn memory_of_a_rank(ranks: usize) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok()).ok();
    // Ranks that are threads share one environment, and all of them run on this host.
    let local =
        place.filter(|place| *place != LauncherEnvironment::alone()).map_or(ranks, |place| place.local_world_size);
    Some(kilobytes * 1024 / local.max(1) as u64)
}

fn initial(parameter: &Parameter, seed: u64) -> Result<CpuStorage, Error> {
    if let Some(bytes) = parameter.initial_bytes(seed, 0..parameter.stored_elements())? {
        return Ok(quantized_storage(bytes));
    }
    let mut values = vec![0.0; parameter.elements()];
    init::fill(&parameter.init(), parameter.shape(), parameter.name(), seed, 0, &mut values);
    Ok(working(values, parameter.dtype()))
}

/// Runs a layer several times. Returns the minimum of each cost, and the outputs for the next layer.
fn of_layer(
    model: &Model,
    layer: usize,
    inputs: &Activations,
    batch: &Batch,
    seed: u64,
) -> Result<(LayerCosts, Activations), Error> {
    let is_last = layer + 1 == model.layers().len();
    let mut best: Option<LayerCosts> = None;
    let mut outputs = inputs.clone();
    for _ in 0..REPEATS {
        let pass = Pass { training: true, seed, step: 1, sample: 0, layer: layer as u32 };
        let x = leaves(inputs, layer)?;
        let x = batch.added_to(x, &model.layers()[layer])?;
        let (cost, y) = match is_last {
            true => (last(model, layer, &x, batch, &pass)?, None),
            false => inner(model, layer, &x, &pass)?,
        };
        let shorter = |a: f64, b: f64| a.min(b);
        best = Some(best.map_or(cost, |best| LayerCosts {
            forward: shorter(best.forward, cost.forward),
            backward: shorter(best.backward, cost.backward),
            backward_input: shorter(best.backward_input, cost.backward_input),
            backward_weight: shorter(best.backward_weight, cost.backward_weight),
            ..cost
        }));
        outputs = y.unwrap_or(outputs);
    }
    model.buffers_of(layer).try_for_each(|(_, buffer)| buffer.restore())?;
    let mut cost = best.unwrap_or_default();
    cost.inputs = size(inputs.tensors());
    cost.input_gradients = size(&inputs.tensors().iter().filter(|x| x.dtype().is_float()).cloned().collect::<Vec<_>>());
    Ok((cost, outputs))
}

fn inner(
    model: &Model,
    layer: usize,
    x: &Activations,
    pass: &Pass,
) -> Result<(LayerCosts, Option<Activations>), Error> {
    let built = &model.layers()[layer];
    if layer < model.first_trained() {
        let (forward, y) = timed(|| built.run_forward_only(x, pass))?;
        let flow = built.pass_on(y, x)?;
        return Ok((LayerCosts { forward, ..LayerCosts::default() }, Some(flow)));
    }
    let (forward, y) = timed(|| promise(|| built.run(x, pass)))?;
    let seeds = seeds(&y)?;
    let (backward, _) = timed(|| captured(model, layer, || backward_from(&seeds)))?;
    let flow = built.pass_on(y, x)?;
    let detached = Activations::new(flow.tensors().iter().map(Tensor::detach).collect());
    let mut cost = LayerCosts { forward, backward, backward_input: backward, ..LayerCosts::default() };
    if built.splits() {
        let seeds = self::seeds(&promise(|| built.run(x, pass))?)?;
        let leaves = built.uses().iter().map(|&p| model.parameters()[p].leaf().id());
        let started = Instant::now();
        let (later, result) = DeferredGradients::new(leaves).capture(|| backward_from(&seeds));
        cost.backward_input = started.elapsed().as_secs_f64();
        result?;
        let mut gradients = places(model, layer);
        let (weight, ()) = timed(|| later.flush(&mut gradients))?;
        cost.backward_weight = weight;
    }
    Ok((cost, Some(detached)))
}

/// Returns the outputs that have a gradient, each with a gradient of ones.
fn seeds(y: &Activations) -> candle_core::Result<Vec<(Tensor, Tensor)>> {
    let with_gradient = y.tensors().iter().filter(|y| y.dtype().is_float() && y.track_op());
    with_gradient.map(|y| Ok((y.clone(), y.ones_like()?))).collect()
}

/// Times the last layer. As in a step, its forward runs as part of its backward.
fn last(model: &Model, layer: usize, x: &Activations, batch: &Batch, pass: &Pass) -> Result<LayerCosts, Error> {
    let targets = batch.loss_targets(model.signature())?;
    let (backward, _) = timed(|| {
        captured(model, layer, || {
            let loss = model.loss(x, &targets, pass, 1.0)?;
            let seed = Tensor::new(1f32, loss.device())?.to_dtype(loss.dtype())?;
            backward_from(&[(loss, seed)])
        })
    })?;
    Ok(LayerCosts { backward, backward_input: backward, ..LayerCosts::default() })
}

/// Runs a backward that writes to gradient buffers for the layer's parameters.
fn captured<T>(
    model: &Model,
    layer: usize,
    backward: impl FnOnce() -> candle_core::Result<T>,
) -> candle_core::Result<T> {
    places(model, layer).capture(backward).1
}

fn places(model: &Model, layer: usize) -> Gradients {
    let mut gradients = Gradients::default();
    let parameters = model.layers()[layer].uses().iter().map(|&parameter| &model.parameters()[parameter]);
    for parameter in parameters.filter(|parameter| parameter.is_trainable()) {
        let elements = parameter.elements();
        gradients.add_buffer(vec![0.0; elements], [(parameter.leaf().id(), 0..elements, false)]);
    }
    gradients
}

/// Detaches a layer's inputs from their graph and makes them leaves. The model's inputs stay unchanged.
fn leaves(inputs: &Activations, layer: usize) -> candle_core::Result<Activations> {
    let leaf = |x: &Tensor| match layer > 0 && x.dtype().is_float() {
        true => Ok(Var::from_tensor(x)?.into_inner()),
        false => Ok(x.clone()),
    };
    Ok(Activations::new(inputs.tensors().iter().map(leaf).collect::<candle_core::Result<_>>()?))
}

fn timed<T>(run: impl FnOnce() -> candle_core::Result<T>) -> candle_core::Result<(f64, T)> {
    let started = Instant::now();
    let result = run()?;
    Ok((started.elapsed().as_secs_f64(), result))
}

fn size(tensors: &[Tensor]) -> u64 {
    tensors.iter().map(|x| (x.elem_count() * x.dtype().size_in_bytes()) as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use zero_model::zoo;

    #[test]
    fn every_layer_is_measured_and_nothing_stays_in_memory() {
        let config =
            zoo::Gpt2Config { vocab_size: 50, n_positions: 8, n_embd: 16, n_layer: 2, n_head: 2, ..Default::default() };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let model = zoo::gpt2(&config).build(dtype).expect("a model");
            let ids = Tensor::zeros((2, 8), DType::U32, &Device::Cpu).expect("ids");
            let mut costs = vec![];
            let keep = |_: usize, cost: &LayerCosts, _: u64| {
                costs.push(*cost);
                Ok(())
            };
            measure(&model, &Batch::new(ids.clone(), ids), 1, keep).expect("costs");
            assert_eq!(costs.len(), model.layers().len());
            assert!(costs.iter().all(|c| c.backward > 0.0 && c.inputs > 0));
            // The first layer's inputs are token ids, which have no gradient.
            assert_eq!((costs[0].inputs, costs[0].input_gradients), (2 * 8 * 4, 0));
            let width = dtype.size_in_bytes() as u64;
            assert_eq!((costs[1].inputs, costs[1].input_gradients), (2 * 8 * 16 * width, 2 * 8 * 16 * width));
            assert!(
                costs[1].backward_weight > 0.0 && costs[0].backward_weight == 0.0,
                "blocks split, embeddings do not"
            );
            use CpuStorage::{BF16, F16, F32};
            let released = |p: &Parameter| p.read(|values| Ok(!matches!(values, F32(_) | BF16(_) | F16(_))));
            assert!(model.parameters().iter().all(|p| released(p).expect("readable")));
        }
    }
}
