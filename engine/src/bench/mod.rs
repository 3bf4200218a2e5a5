//! `zero-train bench`: figures of this machine, the subject in turn with its floor.

mod comm;

use std::time::{Duration, Instant};

use zero_comm::place::Place;

use crate::cli::ConfigArgs;
use crate::{launch, surroundings};

pub(crate) use comm::comm;

/// Median and spread of times, in milliseconds.
fn summary(times: &[Duration]) -> String {
    let ms = |d: Option<&Duration>| d.map_or(0.0, |d| d.as_secs_f64() * 1e3);
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let median = zero_comm::bench::median(times).as_secs_f64() * 1e3;
    format!("{median:>9.3} ms  ({:.3} – {:.3})", ms(sorted.first()), ms(sorted.last()))
}

/// AdamW in turn with its floor.
///
/// # Errors
/// None; the signature is that of all benchmarks.
pub(crate) fn adam(millions: usize, repeats: usize) -> anyhow::Result<u8> {
    let (subject, floor) = zero_optim::bench::adamw(millions * 1_000_000, repeats);
    let mut ratios: Vec<f64> = floor.iter().zip(&subject).map(|(f, s)| f.as_secs_f64() / s.as_secs_f64()).collect();
    ratios.sort_by(f64::total_cmp);
    println!("AdamW on {millions} million f32 parameters, one thread, {repeats} runs each in turn");
    println!("  AdamW                       {}", summary(&subject));
    println!("  floor: reads 4, writes 3    {}", summary(&floor));
    let middle = ratios.get(ratios.len() / 2).copied().unwrap_or(0.0);
    let (low, high) = (ratios.first().copied().unwrap_or(0.0), ratios.last().copied().unwrap_or(0.0));
    println!("  of the floor's rate         {:>9.1} %   ({:.1} – {:.1})", middle * 100.0, low * 100.0, high * 100.0);
    Ok(0)
}

/// Training steps of a configuration, without writing a run.
///
/// # Errors
/// What training itself would say.
pub(crate) fn step(args: &ConfigArgs, steps: usize) -> anyhow::Result<u8> {
    let place = Place::from_environment(|name| std::env::var(name).ok())?;
    let is_rank = place != Place::alone();
    let (typed, text) = crate::load(args, &args.set)?;
    let ranks = if is_rank { Some(place.world_size) } else { args.num_processes.map(|n| n as usize) };
    let config = typed.resolve(ranks)?;
    if !is_rank {
        let threads = surroundings::threads(config.launcher.threads_per_rank, config.world_size);
        return launch::launch(config.world_size, threads, text.as_deref());
    }
    crate::rank::compute_threads(&config, place.local_world_size);
    let comm = zero_comm::connect(&place, &zero_train::comm_options(&config))?;
    let started = Instant::now();
    let mut subject = zero_train::train::Steps::open(&config, &comm)?;
    let opened = started.elapsed();
    let mut times = vec![];
    for index in 0..steps + 2 {
        let step = subject.step()?;
        if index >= 2 {
            times.push(step.duration);
        }
    }
    if comm.rank() == 0 {
        let per_step = zero_comm::bench::median(&times).as_secs_f64();
        println!(
            "{} ranks over {}, {} threads each, ZeRO stage {}, {} parameters",
            comm.size(),
            comm.transport(),
            zero_model::ops::threads(),
            u8::from(config.zero.stage),
            subject.parameters()
        );
        println!("  opened in     {:>9.3} ms", opened.as_secs_f64() * 1e3);
        println!("  step          {}", summary(&times));
        println!("  throughput    {:>9.0} tokens/s", subject.tokens_per_step() as f64 / per_step);
    }
    comm.barrier().wait()?;
    Ok(0)
}
