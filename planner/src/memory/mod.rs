//! Computes the memory of a run before the run starts: walks through a rank's program with the sizes that the program
//! will request from the allocator.
//!
//! The walk allocates, frees and reuses the same buffers as the executor and `ShardedState`, in the same order;
//! `zero_model::memory` computes what layers allocate. Planned bytes have the same definition as the bytes that the
//! allocator counts (`zero_comm::heap`), so tests can compare the two.

mod arrivals;
mod limit;
mod meter;
mod needs;
mod walk;

use std::collections::BTreeMap;

pub use limit::{Limit, MemoryKind};

pub(crate) use arrivals::{Arrivals, arrivals};
pub use meter::Peaks;
pub(crate) use needs::{Needs, needs};
use walk::Walk;
pub(crate) use walk::WalkInputs;
use zero_config::{Compute, Config, Transport};
use zero_partition::{Category, Layout, shared_elements};
use zero_pipeline::{Coordinates, Instruction, Mesh, Program, Stages};

use zero_engine::Engine;
use zero_engine::costs::forms::Table;
use zero_engine::timing;

/// Memory that the engine itself needs in addition to a program's requests: its lists and the metrics of a step.
const OWN: u64 = 64 << 10;

/// A rank's program, with the known arrivals of its messages.
#[derive(Clone, Copy)]
pub(crate) struct Script<'a> {
    pub(crate) program: &'a Program,
    pub(crate) arrivals: &'a Arrivals,
}

/// Returns the peak bytes of a rank. Walks through two steps, an outer step (`averaging`) if replicates take local
/// steps, an evaluation, and a third step, because later steps reuse the buffers of earlier steps.
pub(crate) fn peaks(
    work: WalkInputs<'_>,
    config: &Config,
    step: Script<'_>,
    averaging: Option<Script<'_>>,
    evaluation: Script<'_>,
) -> Peaks {
    let mut walk = Walk::new(work);
    walk.run(step);
    walk.run(step);
    averaging.into_iter().for_each(|averaging| walk.run(averaging));
    let evaluates = config.training.eval_every > 0 || config.training.sample.is_some();
    let weights = if evaluates { walk.keep_weights() } else { 0 };
    walk.run(evaluation);
    walk.drop_weights(weights);
    walk.run(step);
    let mut peaks = walk.peaks();
    let replicates = work.options.outer.map_or(1, |outer| outer.share.replicates);
    let transport = transport(config, work.mesh, replicates);
    let programs = [Some(step), averaging, Some(evaluation)].into_iter().flatten();
    let instructions = programs.map(|script| script.program.instructions.len()).sum();
    let lists = lists(config, step.program, instructions);
    let copy = copy(&work, config);
    let kept = kept_once(&work);
    peaks.total += OWN + transport + lists + copy + kept;
    peaks.by_category[Category::Staging as usize] += copy;
    peaks.by_category[Category::Activations as usize] += lists + kept;
    peaks.by_category[Category::Communication as usize] += transport;
    peaks
}

/// Returns the memory that the engine keeps for its programs (with `instructions` instructions in total), their
/// timeline and the monitors. This memory belongs to no category and is counted as activations.
fn lists(config: &Config, step: &Program, instructions: usize) -> u64 {
    let monitors = monitors(config);
    let on_gpu = config.training.device == Compute::Cuda;
    let timeline = if timing::is_traced(config) { timing::timeline_bytes(step.instructions.len(), on_gpu) } else { 0 };
    (instructions * size_of::<Instruction>()) as u64 + timeline + monitors
}

/// Returns the bytes of the values that the modules of a rank's layers compute once and then keep.
fn kept_once(work: &WalkInputs<'_>) -> u64 {
    let layers = work.table.map_or(&[][..], |table| &table.evaluation).iter().enumerate();
    let mine = layers.filter(|(layer, _)| work.stages.stage_of(*layer) == work.at.stage);
    let kept: BTreeMap<usize, u64> = mine.flat_map(|(_, memory)| memory.kept_once.clone()).collect();
    kept.values().sum()
}

/// Returns the peak memory of the monitors on rank 0: each monitor buffers the waiting steps, and needs the same amount
/// again while it writes them.
fn monitors(config: &Config) -> u64 {
    let is_on = [
        config.csv_monitor.enabled,
        config.tensorboard.enabled,
        config.mlflow.enabled,
        config.wandb.enabled,
        config.prometheus.enabled,
    ];
    is_on.into_iter().filter(|&on| on).count() as u64 * (1 << 20)
}

/// Returns the bytes of the copy that a background save makes of a rank's state. The copy is written while training
/// continues.
fn copy(work: &WalkInputs<'_>, config: &Config) -> u64 {
    if !config.training.save_async {
        return 0;
    }
    let widths = work.options.widths(work.width as usize);
    zero_checkpoint::Snapshot::planned_bytes(work.layout.saved_elements(work.stages, work.at, &widths))
}

/// Returns the memory of a rank's sockets if the configuration selects TCP: one chunk for each peer in each group that
/// reduces. Near groups need no chunk: they gather directly into the destination. The shared-memory transport uses no
/// heap. With local steps, `alone` is the number of replicates, and `mesh` is the mesh of one replicate.
fn transport(config: &Config, mesh: Mesh, alone: usize) -> u64 {
    if config.launcher.transport != Transport::Tcp {
        return 0;
    }
    let of_stage = match mesh.pipe() {
        1 => 0,
        pipe => alone * mesh.data() - 1 + 3 * (pipe - 1),
    };
    let of_shards = match (alone * mesh.replicates(), mesh.shards()) {
        (1, _) | (_, 1) => 0,
        (replicates, shards) => shards - 1 + replicates - 1,
    };
    let all = match alone {
        1 => mesh.world_size() - 1,
        // With local steps, all ranks reduce together only in evaluations and saves, unless each rank is a replicate.
        _ => {
            let of_one = if mesh.pipe() > 1 { mesh.world_size() - 1 } else { 0 };
            let training = &config.training;
            let are_replicates = mesh.world_size() == 1;
            let meets = are_replicates || training.eval_every > 0 || training.save_every > 0 || training.save_last;
            of_one + if meets { alone * mesh.world_size() - 1 } else { 0 }
        }
    };
    // Context-parallel ranks reduce only the gradients of gathered keys and values.
    let of_context = config.mesh.context_parallel_degree.max(1) - 1;
    let of_tensor = config.tensor_size() - 1;
    let peers = all + of_stage + of_shards + of_context + of_tensor;
    (peers * zero_comm::TCP_CHUNK) as u64
}

/// Returns the number of gradient elements that a rank sums over its tensor group.
fn tensor_sum(of: (&Layout, &Stages), at: Coordinates, config: &Config) -> u64 {
    if config.tensor_size() == 1 { 0 } else { shared_elements(of, at) as u64 }
}

/// Returns the planned peaks of an engine's rank; `None` if the memory of its layers is unknown.
pub fn planned(engine: &Engine) -> Option<Peaks> {
    let (zero, stage_plan) = (engine.zero(), engine.stage_plan());
    let table = Table::of(engine.config(), engine.model())?;
    let shape = zero.layout().shape();
    let (steps, evaluations) = (stage_plan.training(shape), stage_plan.evaluation(shape, 1));
    let averaging = zero.outer().map(|_| stage_plan.averaging(shape));
    let (in_steps, in_evaluations) = (arrivals(&steps), arrivals(&evaluations));
    let in_averaging = averaging.as_deref().map(arrivals);
    let at = zero.groups().at();
    let work = WalkInputs {
        layout: zero.layout(),
        stages: &stage_plan.stages,
        mesh: stage_plan.mesh,
        at,
        options: &engine.settings().zero,
        width: engine.settings().dtype.size_in_bytes() as u64,
        table: Some(&table),
        tensor_sum: tensor_sum((zero.layout(), &stage_plan.stages), at, engine.config()),
    };
    let step = Script { program: &steps[at.stage], arrivals: &in_steps[at.stage] };
    let evaluation = Script { program: &evaluations[at.stage], arrivals: &in_evaluations[at.stage] };
    let averaging = averaging.iter().zip(&in_averaging).next();
    let averaging = averaging.map(|(of, found)| Script { program: &of[at.stage], arrivals: &found[at.stage] });
    Some(peaks(work, engine.config(), step, averaging, evaluation))
}
