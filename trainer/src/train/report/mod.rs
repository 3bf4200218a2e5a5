//! `report.json`: measurements of the run, and how the run was executed.

pub(super) mod breakdown;
pub(super) mod communication;
pub(super) mod profile;
pub(super) mod stragglers;
pub(super) mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use zero_comm::from_each_rank;
use zero_isa::Isa;
use zero_partition::{CATEGORIES, Payload, StateBytes, expected_payload, expected_state};
use zero_pipeline::Instruction;

use super::options::Finished;
use super::output::progress::seconds;
use super::restart::Restart;
use crate::process::resident;
use zero_engine::Error;
use zero_engine::format::{bytes, counted};
use zero_engine::timing::TimeCategory;
use zero_engine::timing::gpu_timeline;
use zero_engine::timing::points::Points;
use zero_engine::{Engine, Step};
use zero_planner::memory;

/// The values that a run accumulates for its report.
pub(super) struct Report {
    started: Instant,
    first_step: Option<Duration>,
    steps: u64,
    skipped: u64,
    outer_steps: u64,
    first_loss: f32,
    last_loss: f32,
    peak_bytes: u64,
    /// Peak resident memory of the process before the engine was created, in bytes.
    resident_before: Option<u64>,
    restarts: Vec<Restart>,
}

impl Report {
    pub(super) fn new(started: Instant, resident_before: Option<u64>, restarts: Vec<Restart>) -> Self {
        Self {
            started,
            first_step: None,
            steps: 0,
            skipped: 0,
            outer_steps: 0,
            first_loss: f32::NAN,
            last_loss: f32::NAN,
            peak_bytes: 0,
            resident_before,
            restarts,
        }
    }

    pub(super) fn step(&mut self, step: &Step, peak_bytes: u64) {
        if self.steps == 0 {
            self.first_loss = step.loss;
            self.first_step = Some(self.started.elapsed());
        }
        self.steps += 1;
        self.skipped += u64::from(step.skipped);
        self.outer_steps += u64::from(step.averaged);
        self.last_loss = step.loss;
        self.peak_bytes = peak_bytes;
    }

    pub(super) fn has_trained(&self) -> bool {
        self.steps > 0
    }

    /// Returns the first step of this process.
    pub(super) fn first_step(&self, engine: &Engine) -> u64 {
        engine.steps() + 1 - self.steps
    }

    /// Returns the complete report; a collective.
    pub(super) fn value(&self, engine: &Engine, finished: Finished) -> Result<Value, Error> {
        let comm = engine.communicator();
        let stats = engine.stats();
        let mut collectives = BTreeMap::new();
        // Exchanges one row with all operations, because ranks of different pipeline stages use different operations.
        let own =
            stats.iter().flat_map(|(_, counter)| [counter.sent_bytes, counter.network_bytes, counter.moved_bytes]);
        let all = from_each_rank(&**comm, own.map(|bytes| bytes as i64).collect())?;
        for (index, (operation, counter)) in stats.iter().enumerate() {
            let [sent, network, moved] =
                [0, 1, 2].map(|column| all.iter().map(|row| row[3 * index + column]).sum::<i64>());
            if counter.calls == 0 && sent == 0 {
                continue;
            }
            let entry = json!({
                "calls": counter.calls, "ran_ahead": counter.ahead, "sent_bytes": sent, "network_bytes": network,
                "bytes_within_hosts": (moved - network).max(0), "seconds": round(counter.seconds),
            });
            collectives.insert(operation.to_string(), entry);
        }
        let ledger = engine.zero().ledger();
        let mut row: Vec<i64> = CATEGORIES.iter().map(|&c| ledger.peak(c) as i64).collect();
        row.push(ledger.peak_total() as i64);
        // -1 marks an unknown value; see [`known`].
        let planned = memory::planned(engine);
        row.extend(planned.map_or([-1; CATEGORIES.len()], |peaks| peaks.by_category.map(|bytes| bytes as i64)));
        row.push(planned.map_or(-1, |peaks| peaks.total as i64));
        let expected = expected(engine);
        row.extend([expected.parameters, expected.gradients, expected.optimizer].map(|b| b as i64));
        let payload = expected_step_payload(engine);
        row.extend([payload.total(), payload.across].map(|bytes| bytes as i64));
        let [state, inputs] = [engine.zero().disk_use(), engine.offloaded_inputs()].map(Option::unwrap_or_default);
        let disk = [state.bytes + inputs.bytes, state.read + inputs.read, state.written + inputs.written];
        row.extend(disk.map(|bytes| bytes as i64));
        row.extend([engine.peak_gpu_bytes(), engine.reserved_gpu_bytes()].map(|b| b.map_or(-1, |bytes| bytes as i64)));
        row.push(planned.filter(|_| engine.settings().zero.on_gpu.layers).map_or(-1, |peaks| peaks.gpu as i64));
        row.extend(
            [self.resident_before, resident::proportional(), resident::peak()].map(|b| b.map_or(-1, |b| b as i64)),
        );
        let ranks: Vec<Value> =
            from_each_rank(&**comm, row)?.iter().enumerate().map(|(rank, row)| of_rank(rank, row)).collect();
        let lanes: BTreeMap<&str, f64> =
            TimeCategory::ALL.iter().map(|&lane| (lane.name(), round(engine.timing().seconds(lane)))).collect();
        let instructions: BTreeMap<&str, u64> = engine.timing().calls().collect();
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "finished": match finished { Finished::Done => "done".to_string(), Finished::Stopped(s) => format!("signal {s}") },
            "restarts": self.restarts,
            "world_size": comm.size(),
            "transport": comm.transport(),
            "instruction_set": Isa::current().name(),
            "zero_stage": engine.settings().layout.zero_stage.number(),
            "parameters": engine.model().elements(),
            "trainable_parameters": engine.model().trainable_elements(),
            "pipeline": pipeline(engine),
            "steps": self.steps,
            "optimizer_steps": self.steps - self.skipped,
            "skipped_steps": self.skipped,
            "outer_steps": engine.config().training.local_steps.map(|_| self.outer_steps),
            "loss_scale": engine.loss_scale(),
            "first_loss": super::run::finite(self.first_loss),
            "last_loss": super::run::finite(self.last_loss),
            "seconds": round(self.started.elapsed().as_secs_f64()),
            "seconds_to_first_step": self.first_step.map(|d| round(d.as_secs_f64())),
            "seconds_by_lane": lanes,
            "gpu_timeline": gpu_timeline(engine),
            "instructions": instructions,
            "layers_gathered": engine.timing().calls()
                .filter(|(kind, _)| ["gather", "gather_secondary"].contains(kind)).map(|(_, n)| n).sum::<u64>(),
            "collectives": collectives,
            "memory": { "measured_peak_bytes": self.peak_bytes, "ranks": ranks },
        }))
    }
}

/// Returns the spans of rank 0's GPU in the traced steps, in seconds. Returns null without a trace.
fn gpu_timeline(engine: &Engine) -> Value {
    let spans = engine.timing().gpu_spans();
    if spans.is_empty() {
        return Value::Null;
    }
    let busy = gpu_timeline::busy(spans, engine.program());
    json!({
        "compute": round(busy.compute),
        "copies": round(busy.copies),
        "transfers": round(busy.transfers),
        "beside_compute": round(busy.hidden),
    })
}

/// Formats the summary that a run prints at its end.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped = match self.skipped {
            0 => String::new(),
            skipped => format!(" ({skipped} skipped)"),
        };
        if self.steps == 0 {
            return f.write_str("trained no step: the run was already complete");
        }
        write!(
            f,
            "trained {}{skipped} in {}: loss {:.4} -> {:.4}, peak {} per rank",
            counted(self.steps as usize, "step", "steps"),
            seconds(self.started.elapsed()),
            self.first_loss,
            self.last_loss,
            bytes(self.peak_bytes)
        )
    }
}

/// Returns the layers of each pipeline stage, and the layers with deferred gradients. Returns null if the model has
/// only one stage.
fn pipeline(engine: &Engine) -> Value {
    let (stage_plan, shape) = (engine.stage_plan(), engine.zero().layout().shape());
    if stage_plan.mesh.pipe() == 1 {
        return Value::Null;
    }
    let name = |layer: usize| shape.layers[layer].name.clone();
    let layers = |stage: usize| stage_plan.stages.layers_of(stage).map(name).collect::<Vec<_>>();
    let programs = stage_plan.training(shape);
    let instructions = || programs.iter().flat_map(|program| &program.instructions);
    let split: BTreeSet<usize> = instructions()
        .filter_map(|instruction| match instruction {
            Instruction::BackwardWeight { layer, .. } => Some(*layer),
            _ => None,
        })
        .collect();
    let (put_off, whole): (Vec<usize>, Vec<usize>) = (0..shape.layers.len()).partition(|layer| split.contains(layer));
    json!({
        "schedule": stage_plan.schedule.to_string(),
        "stages": (0..stage_plan.mesh.pipe()).map(layers).collect::<Vec<_>>(),
        "replicas": stage_plan.mesh.data_parallel(),
        "keeps_gathered": stage_plan.gathering(shape)
            .map(|_| (0..stage_plan.mesh.pipe()).map(|stage| stage_plan.keeps_gathered(stage)).collect::<Vec<_>>()),
        "deferred_weight_gradients": put_off.into_iter().map(name).collect::<Vec<_>>(),
        "backward_in_one": whole.into_iter().map(name).collect::<Vec<_>>(),
    })
}

/// Converts a number to JSON. Negative numbers mean unknown and become null.
fn known(number: i64) -> Value {
    if number < 0 { Value::Null } else { json!(number) }
}

fn of_rank(rank: usize, row: &[i64]) -> Value {
    let by_category = |values: &[i64]| -> Value {
        if values.iter().any(|&bytes| bytes < 0) {
            return Value::Null;
        }
        CATEGORIES
            .iter()
            .map(ToString::to_string)
            .zip(values.iter().copied())
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect()
    };
    let n = CATEGORIES.len();
    let (measured, rest) = row.split_at(n + 1);
    let (planned, rest) = rest.split_at(n + 1);
    json!({
        "rank": rank,
        "measured_peak_bytes": by_category(&measured[..n]),
        "measured_peak_total_bytes": measured[n],
        "planned_peak_bytes": by_category(&planned[..n]),
        "planned_peak_total_bytes": known(planned[n]),
        "expected_state_bytes": { "parameters": rest[0], "gradients": rest[1], "optimizer_state": rest[2] },
        "expected_sent_bytes_per_step": rest[3],
        "expected_sent_bytes_across_near_groups": rest[4],
        "disk": { "bytes": rest[5], "read_bytes": rest[6], "written_bytes": rest[7] },
        "gpu_bytes": {
            "measured_peak": known(rest[8]), "reserved_peak": known(rest[9]), "planned_peak": known(rest[10]),
        },
        "resident_bytes": {
            "before": known(rest[11]), "at_the_end": known(rest[12]), "peak_with_shared": known(rest[13]),
        },
    })
}

/// Returns the expected size of this rank's state in bytes, computed from the layout.
pub(super) fn expected(engine: &Engine) -> StateBytes {
    let zero = engine.zero();
    let widths = engine.settings().zero.widths(engine.settings().dtype.size_in_bytes());
    expected_state(zero.layout(), zero.stages(), zero.groups().at(), &widths)
}

fn expected_step_payload(engine: &Engine) -> Payload {
    let zero = engine.zero();
    let place = (zero.groups().mesh(), zero.groups().at());
    let width = engine.settings().dtype.size_in_bytes();
    let options = &engine.settings().zero;
    let sharded = expected_payload(engine.program(), zero.layout(), place, width, options, |content| {
        engine.message_bytes(content)
    });
    let (mesh, at) = place;
    let (rank, near) = (mesh.rank(at), mesh.near_shards(at));
    // A rank sends the same number of bytes to each other rank of a group.
    let nearby = |bytes: u64, group: &[usize]| {
        let others = group.iter().filter(|&&other| other != rank);
        let near = others.clone().filter(|&&other| near.contains(&mesh.coordinates(other).shard)).count() as u64;
        (bytes * near).checked_div(others.count() as u64).unwrap_or(0)
    };
    let (heads, mut queries) = (mesh.head_ranks(rank), mesh.query_ranks(rank));
    if engine.config().uses_ring_attention() {
        // In ring attention, a rank sends all bytes to the next rank.
        queries = vec![mesh.next_in_ring(rank)];
    }
    let exchanged = engine.exchanged_bytes().unwrap_or_default();
    let within = nearby(exchanged.heads, &heads) + nearby(exchanged.queries, &queries);
    // Tensor groups are the innermost groups, so all their bytes count as `within`.
    Payload {
        within: sharded.within + within + exchanged.tensor,
        across: sharded.across + exchanged.context() - within,
    }
}

/// For `memory_breakdown`: returns a table with the peak memory of each rank in each part of the last step; a
/// collective.
pub(super) fn memory_table(engine: &Engine) -> Result<Option<String>, Error> {
    let Some(points) = engine.timing().points() else { return Ok(None) };
    let columns = CATEGORIES.len() + 1;
    let own = points.bytes().iter().flatten().map(|&bytes| bytes as i64).collect();
    let ranks = from_each_rank(&**engine.communicator(), own)?;
    let names = CATEGORIES.iter().map(ToString::to_string).chain(["total".to_string()]);
    let mut lines = vec![format!("peak memory in each part of step {}, by rank", engine.steps())];
    lines.push(names.fold(format!("{:>4}  {:<9}", "rank", "part"), |line, name| line + &format!("{name:>16}")));
    for (rank, row) in ranks.iter().enumerate() {
        for (part, held) in Points::NAMES.iter().zip(row.chunks(columns)) {
            let cells = held.iter().map(|&held| format!("{:>16}", bytes(held as u64)));
            lines.push(format!("{rank:>4}  {part:<9}{}", cells.collect::<String>()));
        }
    }
    Ok(Some(lines.join("\n")))
}

fn round(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}
