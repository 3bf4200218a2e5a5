//! Starts and connects the ranks of benchmarks that run training steps.

use std::sync::Arc;

use zero_comm::Communicator;
use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::Config;

use crate::arguments::ConfigArgs;
use crate::input::load;
use zero_train::process;
use zero_train::process::launch::{self, Job, Team};

/// Steps before the measured steps. The first step faults in all memory.
pub(super) const WARM_UP: usize = 2;

/// The role of this process in a benchmark.
pub(super) enum Role {
    /// This process launched the ranks. They have ended, and this is their exit status.
    Launcher(u8),
    /// This process is a rank. `cores` is a line of output that describes the cores of the rank.
    Rank { config: Box<Config>, cores: String, comm: Arc<dyn Communicator> },
}

/// Launches the ranks and waits for them, or joins them if the environment says that this process is a rank.
pub(super) fn take_part(args: &ConfigArgs) -> anyhow::Result<Role> {
    let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok())?;
    let is_rank = place != LauncherEnvironment::alone();
    let (typed, text) = load(args, &args.set)?;
    let config = match is_rank {
        true => typed.on_hosts(place.local_world_size).resolve(Some(place.world_size))?,
        false => typed.resolve(args.ranks(&typed))?,
    };
    if !is_rank {
        let threads = process::threads(Some(&config.launcher), config.world_size);
        let team = Team::new(config.world_size, threads);
        return Ok(Role::Launcher(launch::launch(team, &Job::here(text.as_deref()), None)?));
    }
    let cores = process::settle(&config, &place)?;
    let comm = zero_comm::connect(&place, &zero_engine::comm_options(&config, &place)?)?;
    Ok(Role::Rank { config: Box::new(config), cores, comm })
}
