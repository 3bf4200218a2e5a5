//! Ranks of a benchmark of training steps.

use std::sync::Arc;

use zero_comm::Communicator;
use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::Config;

use crate::arguments::ConfigArgs;
use crate::input::load;
use crate::launch::{self, Job, Team};
use zero_train::process;

/// Steps before those that are measured: the first one touches all memory.
pub(super) const WARM_UP: usize = 2;

/// What a process of a benchmark of training steps is.
pub(super) enum Role {
    /// Its ranks have come and gone, with this status.
    Launcher(u8),
    /// One of them, with the line that says on which cores.
    Rank { config: Box<Config>, cores: String, comm: Arc<dyn Communicator> },
}

/// Starts the ranks, or joins them as one.
pub(super) fn take_part(args: &ConfigArgs) -> anyhow::Result<Role> {
    let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok())?;
    let is_rank = place != LauncherEnvironment::alone();
    let (typed, text) = load(args, &args.set)?;
    let ranks = if is_rank { Some(place.world_size) } else { args.num_processes.map(|n| n as usize) };
    let config = typed.resolve(ranks)?;
    if !is_rank {
        let threads = process::threads(Some(&config.launcher), config.world_size);
        let team = Team::new(config.world_size, threads);
        return launch::launch(team, &Job::here(text.as_deref()), None).map(Role::Launcher);
    }
    let cores = process::settle(&config, &place)?;
    let comm = zero_comm::connect(&place, &zero_train::comm_options(&config, &place)?)?;
    Ok(Role::Rank { config: Box::new(config), cores, comm })
}
