//! `zero-train bench step`: times the training steps of a configuration, without logging or checkpoints.

use std::time::{Duration, Instant};

use serde::Serialize;
use zero_comm::{Buffer, ReduceOp};
use zero_engine::counted;

use super::figures::{median, summary};
use super::ranks::{Role, take_part};
use crate::arguments::ConfigArgs;

/// The result, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Measured {
    ranks: usize,
    transport: String,
    threads: usize,
    instruction_set: &'static str,
    zero_stage: u8,
    parameters: usize,
    opened_ms: f64,
    step_ms: Vec<f64>,
    tokens_per_step: usize,
    /// Losses of all steps, including the warm-up.
    losses: Vec<f32>,
    /// Peak bytes over all ranks, as counted by the engine.
    peak_bytes: i64,
    /// Peak resident set of each rank's process, in bytes. A page of shared memory counts for each rank that touched
    /// it, so the sum over the ranks exceeds the memory in use.
    peak_resident_bytes: Vec<i64>,
    /// Peak GPU memory of each rank, in bytes; `None` for training on the CPU.
    peak_gpu_bytes: Option<Vec<i64>>,
}

/// The number of steps to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Length {
    /// Steps before the measured steps.
    pub(crate) warm_up: usize,
    /// Minimum number of measured steps.
    pub(crate) steps: usize,
    /// Minimum time of all measured steps together.
    pub(crate) at_least: Duration,
}

/// Maximum number of additional steps to reach [`Length::at_least`].
const MOST_MORE: usize = 1 << 16;

/// Times training steps without writing a run folder. Returns the exit status.
///
/// # Errors
/// Fails if training would fail.
pub(crate) fn step(args: &ConfigArgs, length: &Length, json: bool) -> anyhow::Result<u8> {
    let (config, cores, comm) = match take_part(args)? {
        Role::Launcher(status) => return Ok(status),
        Role::Rank { config, cores, comm } => (config, cores, comm),
    };
    // Allocated before the engine, because the engine counts all later allocations as its own.
    let most = length.warm_up + length.steps + MOST_MORE;
    let (mut times, mut losses) = (Vec::with_capacity(most), Vec::with_capacity(most));
    let started = Instant::now();
    let mut subject = zero_train::train::Steps::open(&config, &comm)?;
    let opened = started.elapsed();
    let mut take = |count: usize, times: &mut Vec<Duration>| -> anyhow::Result<()> {
        for _ in 0..count {
            let step = subject.step()?;
            losses.push(step.loss);
            times.push(step.duration);
        }
        Ok(())
    };
    take(length.warm_up, &mut times)?;
    times.clear();
    take(length.steps, &mut times)?;
    let left = length.at_least.saturating_sub(times.iter().sum());
    let more = left.as_secs_f64() / median(&times).as_secs_f64().max(1e-6);
    // Ranks measure slightly different times, but all must run the same number of steps.
    let more = comm.all_reduce(Buffer::I64(vec![more.ceil() as i64]), ReduceOp::Max).wait()?.into_i64()?;
    take(more.first().map_or(0, |&more| (more as usize).min(MOST_MORE)), &mut times)?;
    let peak =
        zero_train::process::resident::peak().ok_or_else(|| anyhow::anyhow!("/proc/self/status has no VmHWM"))?;
    let tracked = subject.engine().zero().ledger().peak_total();
    let on_gpu = subject.engine().peak_gpu_bytes();
    let own = Buffer::I64(vec![peak as i64, tracked as i64, on_gpu.unwrap_or(0) as i64]);
    let all = comm.all_gather(own, Buffer::I64(vec![0; 3 * comm.size()]), &vec![3; comm.size()]).wait()?;
    let all = all.output.into_i64()?;
    let of_ranks = |index: usize| all.iter().skip(index).step_by(3).copied();
    let measured = Measured {
        ranks: comm.size(),
        transport: comm.transport().to_string(),
        threads: zero_model::ops::threads(),
        instruction_set: zero_isa::Isa::current().name(),
        zero_stage: config.zero.stage.number(),
        parameters: subject.parameters(),
        opened_ms: opened.as_secs_f64() * 1e3,
        step_ms: times.iter().map(|time| time.as_secs_f64() * 1e3).collect(),
        tokens_per_step: subject.tokens_per_step(),
        losses,
        peak_bytes: of_ranks(1).max().unwrap_or(0),
        peak_resident_bytes: of_ranks(0).collect(),
        peak_gpu_bytes: on_gpu.map(|_| of_ranks(2).collect()),
    };
    match (comm.rank(), json) {
        (0, true) => println!("{}", serde_json::to_string(&measured)?),
        (0, false) => {
            println!("{cores}");
            print(&measured, &summary(&times), median(&times).as_secs_f64());
        }
        _ => {}
    }
    comm.barrier().wait()?;
    Ok(0)
}

fn print(measured: &Measured, times: &str, seconds: f64) {
    let Measured { ranks, transport, threads, zero_stage, parameters, tokens_per_step, losses, .. } = measured;
    let isa = measured.instruction_set;
    let (ranks, threads) = (counted(*ranks, "rank", "ranks"), counted(*threads, "thread", "threads"));
    println!("{ranks} over {transport}, {threads} each, {isa}, ZeRO stage {zero_stage}, {parameters} parameters");
    println!("  opened in     {:>9.3} ms", measured.opened_ms);
    println!("  step          {times}");
    println!("  throughput    {:>9.0} tokens/s", *tokens_per_step as f64 / seconds);
    if let (Some(first), Some(last)) = (losses.first(), losses.last()) {
        println!("  loss          {first:>9.4} -> {last:.4} after {}", counted(losses.len(), "step", "steps"));
    }
    let resident: Vec<String> =
        measured.peak_resident_bytes.iter().map(|&bytes| format!("{:.0}", bytes as f64 / 1e6)).collect();
    println!("  peak resident {:>9} MB on each rank, shared pages included", resident.join(" "));
    if let Some(of_ranks) = &measured.peak_gpu_bytes {
        let of_ranks: Vec<String> = of_ranks.iter().map(|&bytes| format!("{:.0}", bytes as f64 / 1e6)).collect();
        println!("  peak of GPUs  {:>9} MB on each rank", of_ranks.join(" "));
    }
}
