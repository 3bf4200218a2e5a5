//! Starts the ranks of a program if its command line or configuration requests several ranks.

use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::{Source, Transport, Typed};
use zero_engine::Error;

use super::arguments::Arguments;
use crate::process;
use crate::process::launch::{Before, Job, Recovery, Team, launch, one_a_gpu, same_batch, unchanged};

/// Returns the number of ranks to start, if this process was started alone and several ranks are requested. Returns
/// `None` if this process should train itself. `asked` is the number on the command line, if it names one. Otherwise
/// the function `otherwise` returns the number.
///
/// # Errors
/// Fails if `-n` differs from the number of ranks that another launcher has started.
pub(super) fn to_start(
    asked: Option<usize>,
    otherwise: impl FnOnce() -> Option<usize>,
    place: &LauncherEnvironment,
) -> Result<Option<usize>, Error> {
    if *place == LauncherEnvironment::alone() {
        return Ok(asked.or_else(otherwise).filter(|&ranks| ranks != 1));
    }
    process::check_ranks(asked, place)?;
    Ok(None)
}

/// Returns the configured number of ranks: `launcher.num_processes`, or else one per GPU for a GPU run, or else the
/// minimum that the other keys allow. Returns `None` if the configuration is invalid for any number of ranks.
pub(super) fn configured(typed: &Typed) -> Option<usize> {
    typed.num_processes().or_else(|| one_a_gpu(typed)).or_else(|| Some(typed.resolve(None).ok()?.world_size))
}

/// Starts processes of this program as ranks, waits until all have ended, and returns the exit status.
///
/// # Errors
/// Fails if the configuration is invalid for this number of ranks, or a process cannot be started.
pub(super) fn run(arguments: &Arguments, sources: &[Source], typed: Typed, ranks: usize) -> Result<u8, Error> {
    let config = typed.on_hosts(ranks).resolve(Some(ranks))?;
    if config.launcher.transport == Transport::Threads {
        let message = "a program starts its ranks as processes, not as threads".to_string();
        let help = "remove the key, or pass the communicators of `ranks::threads` to `Trainer::communicator`";
        return Err(Error::setting("launcher.transport", message, help));
    }
    let team = |ranks: usize| Team::new(ranks, process::threads(Some(&config.launcher), ranks));
    let job = Job::here(None);
    if config.launcher.max_restarts == 0 || arguments.evaluate {
        return launch(team(ranks), &job, None);
    }
    let smaller = |ranks: usize| {
        let overrides = same_batch(&config);
        arguments.load(sources.to_vec(), &overrides)?.resolve(Some(ranks))?;
        Ok(Team { overrides, ..team(ranks) })
    };
    let recovery = Recovery {
        max_restarts: config.launcher.max_restarts,
        min_ranks: config.launcher.min_ranks,
        before: Some(Before::look(config.training.output_dir.as_ref())?),
        // The program's own configuration, the first source, cannot change.
        unchanged: &|| unchanged(arguments.files().rev().zip(sources.iter().rev())),
        smaller: &smaller,
    };
    launch(team(ranks), &job, Some(&recovery))
}
