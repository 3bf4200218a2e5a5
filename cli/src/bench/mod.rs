//! `zero-train bench`: figures of this machine, the subject in turn with its floor.

mod comm;
mod costs;
mod io;
mod offload;
mod ops;
mod pipeline;
mod profile;
mod save;
mod step;

use std::sync::Arc;
use std::time::Duration;

use zero_comm::Communicator;
use zero_comm::place::Place;
use zero_config::Config;

use crate::cli::ConfigArgs;
use crate::launch::{self, Job, Team};
use crate::surroundings;

pub(crate) use comm::comm;
pub(crate) use costs::costs;
pub(crate) use io::io;
pub(crate) use offload::offload;
pub(crate) use ops::{Selection, ops};
pub(crate) use pipeline::pipeline;
pub(crate) use profile::profile;
pub(crate) use save::save;
pub(crate) use step::{Length, step};

/// Steps before those that are measured: the first one touches all memory.
const WARM_UP: usize = 2;

/// What a process of a benchmark of training steps is.
enum Role {
    /// Its ranks have come and gone, with this status.
    Launcher(u8),
    /// One of them, with the line that says on which cores.
    Rank { config: Box<Config>, cores: String, comm: Arc<dyn Communicator> },
}

/// Starts the ranks, or joins them as one.
fn take_part(args: &ConfigArgs) -> anyhow::Result<Role> {
    let place = Place::from_environment(|name| std::env::var(name).ok())?;
    let is_rank = place != Place::alone();
    let (typed, text) = crate::load(args, &args.set)?;
    let ranks = if is_rank { Some(place.world_size) } else { args.num_processes.map(|n| n as usize) };
    let config = typed.resolve(ranks)?;
    if !is_rank {
        let threads = surroundings::threads(Some(&config.launcher), config.world_size);
        let team = Team::new(config.world_size, threads);
        return launch::launch(team, &Job::here(text.as_deref()), None).map(Role::Launcher);
    }
    let cores = surroundings::settle(&config, &place)?;
    let comm = zero_comm::connect(&place, &zero_train::comm_options(&config, &place)?)?;
    Ok(Role::Rank { config: Box::new(config), cores, comm })
}

/// Median and spread of times, in milliseconds.
fn summary(times: &[Duration]) -> String {
    let ms = |d: Option<&Duration>| d.map_or(0.0, |d| d.as_secs_f64() * 1e3);
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let median = zero_comm::bench::median(times).as_secs_f64() * 1e3;
    format!("{median:>9.3} ms  ({:.3} – {:.3})", ms(sorted.first()), ms(sorted.last()))
}

/// Median and spread of anything else, in `unit`.
fn spread(mut values: Vec<f64>, digits: usize, unit: &str) -> String {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    let (middle, last) = (at(values.len() / 2), at(values.len().saturating_sub(1)));
    format!("{middle:>9.digits$} {unit}  ({:.digits$} – {last:.digits$})", at(0))
}

/// AdamW in turn with its floor.
///
/// # Errors
/// None; the signature is that of all benchmarks.
pub(crate) fn adam(millions: usize, repeats: usize) -> anyhow::Result<u8> {
    let (subject, floor) = zero_optim::bench::adamw(millions * 1_000_000, repeats);
    let of_rate = floor.iter().zip(&subject).map(|(f, s)| f.as_secs_f64() / s.as_secs_f64() * 100.0).collect();
    println!("AdamW on {millions} million f32 parameters, one thread, {repeats} runs each in turn");
    println!("  AdamW                       {}", summary(&subject));
    println!("  floor: reads 4, writes 3    {}", summary(&floor));
    println!("  of the floor's rate         {}", spread(of_rate, 1, "%"));
    Ok(0)
}
