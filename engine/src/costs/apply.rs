//! Applies a cost table to a plan: looks up the costs of each layer and segment, or reports the entries that the table
//! lacks.

use std::ops::Range;

use candle_core::DType;
use zero_config::{Config, Model, OffloadDevice, Optimizer};
use zero_optim::BlockCodes;
use zero_partition::{Coded, CodedLevel, disk_buffers};
use zero_pipeline::simulate::{Collectives, Costs, LayerCosts, Link, SegmentCosts, Sharing};
use zero_pipeline::{Coordinates, Item, Mesh, Placement, Schedule, SegmentId, Tier};

use super::table::{Conditions, CostTable, Group, LayerTimes, Line, Transfers, pattern};
use crate::costs::forms::Table;
use crate::costs::subject::Subject;

/// Returns the conditions that a plan requires of a table.
pub(super) fn conditions(subject: &Subject<'_>, transport: &str) -> Conditions {
    Conditions {
        dtype: format!("{:?}", subject.settings.dtype).to_lowercase(),
        threads: zero_model::ops::threads(),
        ranks: subject.config.world_size,
        transport: transport.to_string(),
        optimizer: optimizer(subject),
        micro_batch: subject.settings.micro_batch_size,
        tiled_mlp_rows: subject.config.model.as_ref().and_then(Model::tiled_mlp_rows),
        sequences: parts(subject.config),
    }
}

/// Describes how sequences and layers are split across ranks; `None` if both are whole.
fn parts(config: &Config) -> Option<String> {
    let degrees = [
        ("sequence_parallel_size", config.sequence_parallel_size),
        ("mesh.context_parallel_degree", config.mesh.context_parallel_degree),
        ("tensor_parallel.autotp_size", config.tensor_size()),
    ];
    let texts = degrees.into_iter().filter(|(_, size)| *size > 1).map(|(key, size)| format!("{key} {size}"));
    let overlaps = config.tensor_size() > 1 && config.tensor_parallel.tp_overlap_comm;
    let options = [(overlaps, "tp_overlap_comm"), (config.uses_ring_attention(), "ring attention")];
    let options = options.into_iter().filter(|(is_on, _)| *is_on).map(|(_, option)| option.into());
    let texts: Vec<String> = texts.chain(options).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

/// Describes the optimizers, their number of states and narrow dtypes, which determine the cost of an update.
fn optimizer(subject: &Subject<'_>) -> String {
    let name = |(_, optimizer): (Option<usize>, &Optimizer)| match optimizer {
        Optimizer::AdamW(_) | Optimizer::MuAdam(_) | Optimizer::MuAdamW(_) => "AdamW",
        Optimizer::Sgd(_) | Optimizer::MuSgd(_) => "SGD",
        Optimizer::Lamb(_) => "LAMB",
        Optimizer::Custom(_) => "custom",
        other => other.name(),
    };
    let name = subject.config.optimizers().into_iter().map(name).collect::<Vec<_>>().join(" and ");
    let zero = &subject.settings.zero;
    let states = match zero.states().len() {
        0 => format!("{name} without state"),
        1 => format!("{name} with 1 state"),
        states => format!("{name} with {states} states"),
    };
    let narrow = [
        (zero.average.is_some(), ", one of them the average"),
        (zero.state_dtype == DType::BF16, ", states in bf16"),
        (subject.layout.segments().iter().any(|segment| segment.is_eight_bit), ", states in 8 bits"),
        (!zero.has_master, ", parameters in bf16"),
        (zero.gradient_dtype == DType::BF16, ", gradients in bf16"),
        (zero.stochastic_rounding.is_some(), ", rounded at random"),
    ];
    narrow.into_iter().filter(|(is_on, _)| *is_on).fold(states, |name, (_, more)| name + more)
}

/// A kind of layer, which has one entry in the table: its name pattern, the number of its parameters, and the bytes of
/// its inputs.
pub(super) type Kind = (String, usize, u64);

/// Returns the kind of a layer.
pub(super) fn key(subject: &Subject<'_>, table: Option<&Table>, layer: usize) -> Kind {
    let shape = subject.layout.shape();
    let parameters = shape.layers[layer].segments.iter().map(|&segment| shape.segments[segment].elements).sum();
    (pattern(&shape.layers[layer].name), parameters, table.map_or(0, |table| table.inputs[layer]))
}

/// Returns whether world rank `rank` updates a part of a segment (flat parameter).
pub(super) fn owns(subject: &Subject<'_>, segment: SegmentId, rank: usize) -> bool {
    let at = subject.stage_plan.whole.coordinates(rank);
    let segment = &subject.layout.segments()[segment];
    segment.placements.optimizer == Placement::Replicated || !segment.shard(at.shard).is_empty()
}

/// Returns the work of a segment's update in multiply-adds, if the segment is a matrix that is updated in one pass.
pub(super) fn work(subject: &Subject<'_>, segment: SegmentId) -> Option<f64> {
    let segment = &subject.layout.segments()[segment];
    segment.matrix.as_ref().filter(|_| !segment.two_passes).map(|matrix| matrix.states.multiply_adds as f64)
}

/// Returns, for each stage, the rank with the most work on matrices.
fn busiest(subject: &Subject<'_>) -> Vec<usize> {
    let (mesh, stages) = (subject.stage_plan.whole, &subject.stage_plan.stages);
    let matrices = (0..subject.layout.segments().len()).filter_map(|id| Some((id, work(subject, id)?)));
    let matrices: Vec<(SegmentId, f64)> = matrices.collect();
    let of_stage = |stage| {
        let of_rank = |rank: &usize| -> f64 {
            let own = matrices.iter().filter(|(id, _)| stages.owner(*id) == stage && owns(subject, *id, *rank));
            own.map(|(_, work)| work).sum()
        };
        let ranks = mesh.ranks(stage).map(|rank| (of_rank(&rank), rank));
        ranks.max_by(|(a, _), (b, _)| a.total_cmp(b)).map_or(0, |(_, rank)| rank)
    };
    (0..stages.count()).map(of_stage).collect()
}

/// Returns the number of a segment's elements that one rank's optimizer updates.
pub(super) fn updated(subject: &Subject<'_>, segment: SegmentId) -> usize {
    let of = &subject.layout.shape().segments[segment];
    match of.placements.optimizer {
        Placement::Replicated => of.elements,
        Placement::Sharded => of.elements.div_ceil(subject.layout.ranks()),
    }
}

/// Returns the number of elements in one rank's part of the gradient norm, on the stage where this number is largest.
pub(super) fn in_norm(subject: &Subject<'_>) -> usize {
    let stages = &subject.stage_plan.stages;
    let all = || 0..subject.layout.shape().segments.len();
    let of_stage = |stage| all().filter(|&s| stages.owner(s) == stage).map(|s| updated(subject, s)).sum();
    (0..stages.count()).map(of_stage).max().unwrap_or(0)
}

/// Returns the simulator's costs for a plan.
///
/// # Errors
/// Describes the entries that the table lacks, or the conditions that differ.
pub fn costs(table: &CostTable, subject: &Subject<'_>) -> Result<Costs, String> {
    let (config, settings) = (subject.config, subject.settings);
    let (has, wants) = (&table.conditions, conditions(subject, &table.conditions.transport));
    let mut differences = vec![];
    let mut same = |what: &str, has: String, wants: String| {
        if has != wants {
            differences.push(format!("{what} {has}, but the plan has {wants}"));
        }
    };
    same("dtype", has.dtype.clone(), wants.dtype);
    same("threads per rank:", has.threads.to_string(), wants.threads.to_string());
    same("optimizer", has.optimizer.clone(), wants.optimizer);
    same("micro-batch", has.micro_batch.to_string(), wants.micro_batch.to_string());
    let tiles = |rows: Option<usize>| rows.map_or("off".to_string(), |rows| rows.to_string());
    same("MLP tile rows:", tiles(has.tiled_mlp_rows), tiles(wants.tiled_mlp_rows));
    let sequences = |of: &Option<String>| of.clone().unwrap_or_else(|| "whole sequences".to_string());
    same("sequences:", sequences(&has.sequences), sequences(&wants.sequences));
    // Unlike a world of the same size, a group in a larger world shares cores and links with other groups.
    let replicas = config.ranks_of_stage();
    if replicas > 1 && has.ranks != config.world_size {
        same("ranks per group:", has.ranks.to_string(), replicas.to_string());
    }
    if !differences.is_empty() {
        return Err(format!("the table was measured with {}", differences.join("; with ")));
    }
    if settings.zero.coded != Coded::default() && table.codes.is_none() {
        return Err(
            "the table lacks the times of 8-bit and 4-bit codes, because an older version of the program measured it"
                .into(),
        );
    }
    let (forms, busiest) = (subject.table(), busiest(subject));
    let layers = (0..subject.layout.shape().layers.len()).map(|layer| of_layer(table, subject, forms.as_ref(), layer));
    let segments =
        (0..subject.layout.shape().segments.len()).map(|segment| of_segment(table, subject, &busiest, segment));
    let mut costs = Costs::of_compute(layers.collect::<Result<_, _>>()?, segments.collect());
    costs.load = table.load.median;
    let micro_batches = subject.programs.first().map_or(0, |program| program.micro_batches);
    let sums_first = subject.layout.sums_before_replicates(&settings.zero, micro_batches);
    costs.replicates_after = sums_first.then(|| micro_batches - 1);
    costs.gradient_norm = table.gradient_norm.median * in_norm(subject) as f64;
    if config.world_size > 1 {
        let transfers =
            table.transfers.as_ref().ok_or("the table was measured with one rank, so it has no transfer times")?;
        let of_planes = (subject.stage_plan.mesh, subject.stage_plan.whole.tensor());
        between(transfers, &mut costs, of_planes, settings.zero.reduce_scatter)?;
        if let Some(outer) = settings.zero.outer {
            let group = Group {
                ranks: outer.share.replicates,
                apart: subject.stage_plan.mesh.shards() * subject.stage_plan.whole.tensor(),
            };
            costs.data.outer = link(&transfers.of(group)?.all_gather);
        }
    }
    let keeps = config.activation_checkpointing.as_ref().is_some_and(|kept| kept.device == OffloadDevice::Nvme);
    if subject.layout.uses_disk() || keeps {
        let disk = table.disk.as_ref().ok_or("the table has no disk transfer rates")?;
        let link = |seconds: f64| Link { latency: 0.0, bandwidth: 1.0 / seconds.max(f64::MIN_POSITIVE) };
        (costs.read, costs.write) = (link(disk.read.median), link(disk.write.median));
    }
    Ok(costs)
}

fn of_layer(
    table: &CostTable,
    subject: &Subject<'_>,
    forms: Option<&Table>,
    layer: usize,
) -> Result<LayerCosts, String> {
    let (name, parameters, inputs) = key(subject, forms, layer);
    let is_it = |of: &&LayerTimes| of.name == name && of.parameters == parameters && of.inputs == inputs;
    let of = table.layers.iter().find(is_it).ok_or_else(|| {
        format!("the table has no layer like `{name}`, with {parameters} parameters and {inputs} bytes of inputs")
    })?;
    // With pipeline stages, a rank waits for its neighbours only, not for the slowest of all ranks.
    let is_staged = subject.stage_plan.stages.count() > 1;
    let slowest = table.slowest_rank.filter(|_| is_staged).map_or(1.0, |slowest| slowest.median.max(1.0));
    let shape = subject.layout.shape();
    let is_cut = subject.stage_plan.schedule == Schedule::ZeroBubble && shape.layers[layer].splits;
    let (first, second) = match (of.backward_input, of.backward_weight) {
        (Some(first), Some(second)) => (first.median, second.median),
        _ if is_cut => {
            return Err(format!(
                "the table has no separate times for the input and weight backward passes of `{name}`"
            ));
        }
        _ => (of.backward.median, 0.0),
    };
    let gradients = forms.map_or(0, |forms| match forms.layers.get(layer) {
        Some(memory) => memory.input_gradients,
        None => forms.loss.input_gradients,
    });
    Ok(LayerCosts {
        forward: of.forward.median / slowest,
        backward: of.backward.median / slowest,
        backward_input: first / slowest,
        backward_weight: second / slowest,
        inputs,
        input_gradients: gradients,
    })
}

fn of_segment(table: &CostTable, subject: &Subject<'_>, busiest: &[usize], segment: SegmentId) -> SegmentCosts {
    let of = &subject.layout.shape().segments[segment];
    let (layout, settings, stages) = (subject.layout, subject.settings, &subject.stage_plan.stages);
    let width = settings.dtype.size_in_bytes();
    let (whole, coded) = (&layout.segments()[segment], settings.zero.coded);
    let stored = whole.width(width);
    let accumulate = match of.placements.gradients {
        Placement::Sharded => 0.0,
        Placement::Replicated => table.accumulate.median * of.elements as f64,
    };
    let at = Coordinates::first(stages.owner(segment));
    let widths = settings.zero.widths(width);
    let moved = |item: Item| disk_buffers(layout, stages, at, &widths, item);
    let shard = whole.shard(0).len() as u64;
    let codes = whole.reduced_as(coded, subject.stage_plan.mesh, at);
    let tile: Vec<u64> = if of.tiers.tiles > 0 { moved(Item::Tile { segment, index: 0 }) } else { vec![] };
    let read: u64 = tile.iter().sum();
    // A tile includes its gradients, which are read but not written back.
    let gradients = match of.tiers.gradients {
        Tier::Nvme if of.tiers.tiles > 0 => shard * 4 / of.tiers.tiles as u64,
        _ => 0,
    };
    let update = match (table.update_matrix, work(subject, segment)) {
        (Some(time), Some(work)) if owns(subject, segment, busiest[stages.owner(segment)]) => time.median * work,
        (Some(_), Some(_)) => 0.0,
        _ => table.update.median * updated(subject, segment) as f64,
    };
    // Seconds to quantize `written` elements and to dequantize `read` elements.
    let coding = |codes: BlockCodes, written: usize, read: usize| -> f64 {
        let times = table.codes.map(|times| times[codes as usize]);
        times.map_or(0.0, |of| of.quantize.median * written as f64 + of.dequantize.median * read as f64)
    };
    let of_level = |level: &CodedLevel| {
        let all: usize = level.ranges.iter().flatten().map(Range::len).sum();
        let others = level.ranges.len() - 1;
        coding(level.codes, all - level.elements(), others * level.elements())
    };
    SegmentCosts {
        parameters: (of.elements * stored) as u64,
        gradients: (of.elements * settings.zero.communication.size_in_bytes()) as u64,
        gathered_codes: whole.gathered_as(coded).map(|codes| whole.code_bytes(codes, &(0..of.elements)) as u64),
        gather_coding: whole.gathered_as(coded).map_or(0.0, |codes| coding(codes, whole.shard(0).len(), of.elements)),
        reduce_coding: codes.iter().map(of_level).sum(),
        reduced_codes: (!codes.is_empty()).then(|| {
            let of = |is_near: bool| {
                codes.iter().filter(|level| level.is_near == is_near).map(|level| level.leaving(whole) as u64).sum()
            };
            [of(true), of(false)]
        }),
        accumulate,
        update,
        outer: settings.zero.outer.map_or(0, |outer| outer.share.sent_bytes(updated(subject, segment)) as u64),
        stored_parameters: shard * stored as u64,
        stored_gradients: shard * 4,
        tile_read: read,
        tile_written: read.saturating_sub(gradients),
    }
}

fn link(line: &Line) -> Link {
    let bandwidth = if line.seconds_per_byte > 0.0 { 1.0 / line.seconds_per_byte } else { f64::INFINITY };
    Link { latency: line.latency, bandwidth }
}

/// Sets the times of transfers between the ranks of a mesh. The mesh contains one rank of each tensor group, so ranks
/// that are neighbours in the mesh are `tensor` ranks apart in the job.
fn between(
    transfers: &Transfers,
    costs: &mut Costs,
    (mesh, tensor): (Mesh, usize),
    scatters: bool,
) -> Result<(), String> {
    let all_reduce = match mesh.data() {
        1 => Link::FREE,
        ranks => link(&transfers.of(Group { ranks, apart: tensor })?.all_reduce),
    };
    // Without reduce-scatter, the data-parallel group all-reduces gradients, which sends twice the bytes.
    let instead = Link { bandwidth: all_reduce.bandwidth / 2.0, ..all_reduce };
    let (all_gather, reduce_scatter) = match mesh.shards() {
        1 => (Link::FREE, Link::FREE),
        ranks => {
            let times = transfers.of(Group { ranks, apart: tensor })?;
            (link(&times.all_gather), if scatters { link(&times.reduce_scatter) } else { instead })
        }
    };
    let replicates = match mesh.replicates() {
        ranks if ranks > 1 && scatters => {
            link(&transfers.of(Group { ranks, apart: mesh.shards() * tensor })?.all_reduce)
        }
        _ => Link::FREE,
    };
    let near = match mesh.near() {
        ranks if ranks < mesh.shards() => link(&transfers.of(Group { ranks, apart: tensor })?.all_gather),
        _ => all_gather,
    };
    let exchanging = |ranks: usize, apart: usize| match ranks {
        1 => Ok(Link::FREE),
        ranks => Ok::<_, String>(link(&transfers.of(Group { ranks, apart: apart * tensor })?.all_to_all)),
    };
    let codes = [exchanging(mesh.near(), 1)?, exchanging(mesh.shards() / mesh.near(), mesh.near())?];
    costs.data = Collectives { all_gather, near, reduce_scatter, replicates, all_reduce, outer: Link::FREE, codes };
    // Each rank of a stage sends to the rank at the same position in the next stage, and all of them send at the same
    // time.
    let neighbours = transfers.of(Group { ranks: 2, apart: mesh.data() * tensor }).ok();
    costs.pipe = link(neighbours.and_then(|times| times.send.as_ref()).unwrap_or(&transfers.send));
    costs.sharing = Sharing {
        computing: transfers.computing_beside.median,
        transferring: transfers.transferring_beside.median,
        sending: transfers.sending_beside.unwrap_or(transfers.transferring_beside).median,
    };
    Ok(())
}
