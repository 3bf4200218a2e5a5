//! Measures a cost table: layers and the optimizer in training steps, and the disk and transfers separately.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zero_comm::{Buffer, Communicator, ReduceOp};
use zero_config::{Config, OffloadDevice};
use zero_model::Model;
use zero_optim::BlockCodes;
use zero_pipeline::Instruction;
use zero_tier::measure::{Load, Size, Transfers};

use super::apply::{Kind, conditions, in_norm, key, owns, updated, work};
use super::table::{CodeTimes, CostTable, Disk, LayerTimes, Time, VERSION};
use super::transfers::transfers;
use crate::batch::Batch;
use crate::costs::cut;
use crate::costs::forms::Table;
use crate::costs::subject::Subject;
use crate::engine::{Engine, Step};
use crate::error::Error;
use crate::timing::trace::{Done, gathered, steps as by_step};

/// Number of warm-up steps, whose times do not count. Of fewer than four steps, only half (rounded down) are warm-up.
/// The first step touches all memory.
const WARM_UP: usize = 2;

/// A model and its data, for measuring training steps.
pub trait Trainee {
    /// Returns the engine.
    fn engine(&self) -> &Engine;

    /// Runs one optimizer step on the next samples. Collective.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::train_batch`].
    fn step(&mut self) -> Result<Step, Error>;

    /// Builds the model again, without allocating parameters.
    ///
    /// # Errors
    /// Fails only in cases in which opening the model would also have failed.
    fn model(&self) -> Result<Model, Error>;

    /// Loads the first micro-batch.
    ///
    /// # Errors
    /// Fails if the data cannot be read.
    fn micro_batch(&self) -> Result<Batch, Error>;
}

/// Number of measured steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Length {
    /// Maximum number of steps.
    pub steps: usize,
    /// Time after which no further step begins. At least two steps run; if no others do, the second one counts.
    pub at_most: Option<Duration>,
}

/// Measures the cost table of a configuration on the ranks of `comm`. `open` opens the data and builds the engine.
/// Collective. All ranks return the same values, except for the disk rates, which each rank measures itself.
///
/// # Errors
/// Returns the errors of training.
pub fn measure<T: Trainee>(
    config: &Config,
    comm: &Arc<dyn Communicator>,
    length: &Length,
    open: impl FnOnce(&Config, &Arc<dyn Communicator>) -> Result<T, Error>,
) -> Result<CostTable, Error> {
    let mut config = config.for_world_size(comm.size())?;
    crate::device::only_the_processor(&config, "a cost table")?;
    // Communication must not overlap with the measured work, and the timeline must be recorded.
    (config.zero.overlap_comm, config.wall_clock_breakdown) = (Some(false), true);
    let mut subject = open(&config, comm)?;
    let began = Instant::now();
    for taken in 0..WARM_UP + length.steps {
        if taken > 1 && is_over(began, length, &**comm)? {
            break;
        }
        subject.step()?;
    }
    let (programs, ranks) = (subject.engine().all_programs(), gathered(&**comm, subject.engine().timing().spans())?);
    let subject = &subject;
    let table = subject.engine().planned(&programs, |planned| {
        let forms = planned.table();
        let found = Found::of(planned, forms.as_ref(), &ranks);
        let time = |kind: &str| Time::of(found.times.get(kind).cloned().unwrap_or_default());
        let layers = found.layers.into_iter().map(|((name, parameters, inputs), [forward, backward])| LayerTimes {
            name,
            parameters,
            inputs,
            forward: Time::of(forward),
            backward: Time::of(backward),
            backward_input: None,
            backward_weight: None,
        });
        CostTable {
            version: VERSION,
            conditions: conditions(planned, comm.transport()),
            layers: layers.collect(),
            slowest_rank: Some(Time::of(found.slowest_rank)),
            load: time("load"),
            accumulate: if found.times.contains_key("accumulate") { time("accumulate") } else { measure_accumulate() },
            gradient_norm: time("gradient_norm"),
            update: time("update"),
            update_matrix: found.times.contains_key(MATRIX).then(|| time(MATRIX)),
            codes: Some(measure_codes()),
            transfers: None,
            disk: None,
        }
    });
    let mut table = CostTable { disk: disk(&config)?, transfers: transfers(&**comm)?, ..table };
    split_backwards(&mut table, subject)?;
    Ok(table)
}

/// Returns whether the time limit has passed on any rank.
fn is_over(began: Instant, length: &Length, comm: &dyn Communicator) -> Result<bool, Error> {
    let Some(at_most) = length.at_most else { return Ok(false) };
    let own = Buffer::I64(vec![i64::from(began.elapsed() >= at_most)]);
    Ok(comm.all_reduce(own, ReduceOp::Max).wait()?.into_i64()? != [0])
}

/// Name under which the seconds per multiply-add of whole-matrix updates are collected.
const MATRIX: &str = "update of a matrix";

/// Measured times of the instructions of all steps.
#[derive(Default)]
struct Found {
    /// By kind of layer, the mean seconds of a forward and of a backward in each step, on the rank where this mean is
    /// largest, because the other ranks wait for that rank. A median would be less than the mean, because some layers
    /// take much longer than most.
    layers: BTreeMap<Kind, [Vec<f64>; 2]>,
    /// In each step, the sum of these seconds, relative to the sum of the means over all ranks.
    slowest_rank: Vec<f64>,
    /// Seconds by kind of instruction: per instruction, per element or per multiply-add.
    times: BTreeMap<&'static str, Vec<f64>>,
}

impl Found {
    fn of(subject: &Subject<'_>, forms: Option<&Table>, ranks: &[Vec<Done>]) -> Self {
        let mut found = Self::default();
        let shape = subject.layout.shape();
        let keys: Vec<_> = (0..shape.layers.len()).map(|layer| key(subject, forms, layer)).collect();
        let steps = ranks.iter().map(|done| by_step(done).count()).min().unwrap_or(0);
        let warming_up = WARM_UP.min(steps / 2);
        let mut norms: Vec<(f64, f64)> = vec![(0.0, 0.0); steps];
        // For each kind of layer and direction, the mean seconds on each rank in each step.
        let mut means: BTreeMap<(&Kind, usize), Vec<Vec<f64>>> = BTreeMap::new();
        for (rank, done) in ranks.iter().enumerate() {
            let program = &subject.programs[subject.stage_plan.whole.coordinates(rank).stage];
            for (step, done) in by_step(done).enumerate().skip(warming_up) {
                // For each kind, seconds in this step, and the number of elements or multiply-adds.
                let mut sums: BTreeMap<&'static str, (f64, f64)> = BTreeMap::new();
                let mut of_layers: BTreeMap<(&Kind, usize), (f64, f64)> = BTreeMap::new();
                for one in done {
                    let Some(instruction) = program.instructions.get(one.index) else { continue };
                    let seconds = one.end - one.start;
                    let mut of_elements = |kind, elements: f64| {
                        let sum = sums.entry(kind).or_default();
                        *sum = (sum.0 + seconds, sum.1 + elements);
                    };
                    let mut of_layer = |layer: usize, direction| {
                        let (sum, count) = of_layers.entry((&keys[layer], direction)).or_default();
                        (*sum, *count) = (*sum + seconds, *count + 1.0);
                    };
                    match instruction {
                        Instruction::Forward { layer, .. } | Instruction::Recompute { layer, .. } => {
                            of_layer(*layer, 0)
                        }
                        Instruction::Backward { layer, .. } => of_layer(*layer, 1),
                        Instruction::Load { .. } => found.times.entry("load").or_default().push(seconds),
                        Instruction::Accumulate { segment, .. } => {
                            of_elements("accumulate", shape.segments[*segment].elements as f64);
                        }
                        Instruction::Update { segment } | Instruction::UpdateTile { segment, tile: 0 }
                            if let Some(work) = work(subject, *segment) =>
                        {
                            of_elements(MATRIX, if owns(subject, *segment, rank) { work } else { 0.0 });
                        }
                        Instruction::Update { segment } => of_elements("update", updated(subject, *segment) as f64),
                        Instruction::MeasureTile { .. } => of_elements("update", 0.0),
                        Instruction::UpdateTile { segment, tile } => {
                            // The tiles of a segment together make up this rank's shard.
                            let part = if *tile == 0 { updated(subject, *segment) } else { 0 };
                            of_elements("update", part as f64);
                        }
                        Instruction::GradientNorm => {
                            let (last, end) = &mut norms[step];
                            (*last, *end) = (one.start.max(*last), one.end.max(*end));
                        }
                        _ => {}
                    }
                }
                for (kind, (sum, count)) in of_layers {
                    let means = means.entry(kind).or_insert_with(|| vec![vec![]; steps - warming_up]);
                    means[step - warming_up].push(sum / count);
                }
                for (kind, (seconds, elements)) in sums.into_iter().filter(|(_, (_, elements))| *elements > 0.0) {
                    found.times.entry(kind).or_default().push(seconds / elements);
                }
            }
        }
        let mut sums = vec![(0.0, 0.0); steps - warming_up];
        for ((key, direction), means) in means {
            let layers = keys.iter().filter(|of| *of == key).count() as f64;
            for ((slowest, mean), ranks) in sums.iter_mut().zip(means) {
                let of_slowest = ranks.iter().copied().fold(0.0, f64::max);
                *slowest += layers * of_slowest;
                *mean += layers * ranks.iter().sum::<f64>() / ranks.len().max(1) as f64;
                found.layers.entry(key.clone()).or_default()[direction].push(of_slowest);
            }
        }
        found.slowest_rank =
            sums.into_iter().map(|(slowest, mean)| slowest / mean).filter(|of| of.is_finite()).collect();
        let elements = in_norm(subject).max(1) as f64;
        let norms = norms.into_iter().skip(warming_up);
        found.times.insert("gradient_norm", norms.map(|(last, end)| (end - last).max(0.0) / elements).collect());
        found
    }
}

/// Measures the seconds per element of adding gradients, for steps that do not accumulate because gradients are
/// sharded.
fn measure_accumulate() -> Time {
    let (mut sum, summand) = (vec![0f32; SAMPLE], vec![1f32; SAMPLE]);
    per_element(|| {
        sum.iter_mut().zip(&summand).for_each(|(sum, summand)| *sum += summand);
        std::hint::black_box(&mut sum);
    })
}

/// Measures the seconds per element of quantizing to codes and dequantizing them on one thread, and divides them by the
/// number of threads that share this work.
fn measure_codes() -> [CodeTimes; 2] {
    let values: Vec<f32> = (0..SAMPLE).map(|i| (i % 251) as f32 - 125.0).collect();
    let mut sum = vec![0f32; SAMPLE];
    BlockCodes::ALL.map(|codes| {
        let mut bytes = vec![0; codes.bytes(SAMPLE)];
        // The lengths match, so neither can fail.
        let quantize = per_element(|| drop(codes.quantize(&values, &mut bytes)));
        let dequantize = per_element(|| drop(codes.add(&bytes, &mut sum)));
        let of_all = 1.0 / zero_model::ops::threads() as f64;
        CodeTimes { quantize: quantize.scaled(of_all), dequantize: dequantize.scaled(of_all) }
    })
}

/// Number of elements of a measured vector.
const SAMPLE: usize = 1 << 22;

/// Measures the seconds per element of work on [`SAMPLE`] elements.
fn per_element(mut work: impl FnMut()) -> Time {
    // Ranks that share a core run in time slices. A run that fits into one slice would not show that.
    const SHORTEST_RUN: Duration = Duration::from_millis(30);
    // The first call touches the memory and is not measured.
    work();
    let mut run = || {
        let (started, mut calls) = (Instant::now(), 0);
        while started.elapsed() < SHORTEST_RUN {
            work();
            calls += 1;
        }
        started.elapsed().as_secs_f64() / f64::from(calls) / SAMPLE as f64
    };
    Time::of((0..7).map(|_| run()).collect())
}

/// Splits the backward time of layers whose weight gradients can be deferred. The ratio of the two halves is measured
/// outside of a step, on whole layers, and applied to the time measured in steps.
fn split_backwards(table: &mut CostTable, subject: &impl Trainee) -> Result<(), Error> {
    let engine = subject.engine();
    if !engine.model().layers().iter().any(|layer| layer.splits()) {
        return Ok(());
    }
    let model = subject.model()?;
    let mut costs = vec![];
    cut::measure(&model, &subject.micro_batch()?, engine.config().training.seed, |_, cost, _| {
        costs.push(*cost);
        Ok(())
    })?;
    let programs = engine.all_programs();
    let keys = engine.planned(&programs, |planned| {
        let forms = planned.table();
        (0..costs.len()).map(|layer| key(planned, forms.as_ref(), layer)).collect::<Vec<_>>()
    });
    for of in &mut table.layers {
        let is_it = |(name, parameters, inputs): &&Kind| {
            *name == of.name && *parameters == of.parameters && *inputs == of.inputs
        };
        let cost = keys.iter().position(|key| is_it(&key)).map(|layer| costs[layer]);
        if let Some(cost) = cost.filter(|cost| cost.backward_weight > 0.0) {
            let share = cost.backward_input / (cost.backward_input + cost.backward_weight);
            of.backward_input = Some(of.backward.scaled(share));
            of.backward_weight = Some(of.backward.scaled(1.0 - share));
        }
    }
    Ok(())
}

/// Measures reads and writes of a file in the configured offload folder; `None` if nothing is offloaded to disk.
fn disk(config: &Config) -> Result<Option<Disk>, Error> {
    let optimizer = &config.zero.offload_optimizer;
    let parameters = &config.zero.offload_param;
    let kept = config.activation_checkpointing.as_ref();
    let folders = [
        (optimizer.device, optimizer.nvme_path.clone()),
        (parameters.device, parameters.nvme_path.clone()),
        (kept.map_or(OffloadDevice::None, |kept| kept.device), kept.and_then(|kept| kept.nvme_path.clone())),
    ];
    let Some(folder) = folders.into_iter().find_map(|(device, path)| path.filter(|_| device == OffloadDevice::Nvme))
    else {
        return Ok(None);
    };
    const RUNS: usize = 5;
    let size = Size { file: 128 << 20, request: 16 << 20, requests: 4 };
    let transfers = Transfers::new(&folder, &size, &zero_tier::Options::default()).map_err(Error::Disk)?;
    let of = |load| -> Result<Time, Error> {
        // The first run does not count.
        let runs = (0..=RUNS).map(|_| transfers.run(load)).collect::<Result<Vec<_>, _>>().map_err(Error::Disk)?;
        Ok(Time::of(runs[1..].iter().map(|time| time.as_secs_f64() / size.file as f64).collect()))
    };
    Ok(Some(Disk { read: of(Load::Read)?, write: of(Load::Write)? }))
}
