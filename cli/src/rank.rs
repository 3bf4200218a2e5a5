//! Runs one rank, or all ranks as threads.

use std::sync::Arc;

use zero_comm::launcher_environment::LauncherEnvironment;
use zero_comm::{Communicator, Options};
use zero_config::Config;
use zero_train::Error;
use zero_train::train::{Output, RunOptions, connect, train};

use crate::printed::show_line;
use zero_train::process;

/// Trains as the rank of this process and returns the exit status.
///
/// # Errors
/// Returns the error that ended the run.
pub(crate) fn run(config: &Config, options: &RunOptions, place: &LauncherEnvironment) -> anyhow::Result<u8> {
    let cores = process::settle(config, place)?;
    if place.rank == 0 && prints_environment(config, options) {
        if !process::launched_by_us() {
            show_line(&format!("launcher: rank 0 of {} (environment: {})", place.world_size, place.source));
        }
        show_line(&cores);
    }
    let comm = connect(config, options, place)?;
    train_on(config, options, &comm)
}

/// Trains with all ranks as threads of this process.
///
/// # Errors
/// Returns the error of the first rank, in rank order, that did not fail because of another rank.
pub(crate) fn run_as_threads(config: &Config, options: &RunOptions) -> anyhow::Result<u8> {
    let ranks = config.world_size;
    process::prepare(process::threads(Some(&config.launcher), ranks), ranks)?;
    let cores = process::settle_threads(config);
    if prints_environment(config, options) {
        show_line(&cores);
    }
    let comm_options = Options { timeout: zero_engine::timeout(config), ..Options::default() };
    let results: Vec<anyhow::Result<u8>> = std::thread::scope(|scope| {
        let ranks = zero_comm::threads(config.world_size, &comm_options);
        let started: Vec<_> =
            ranks.into_iter().map(|comm| scope.spawn(move || train_on(config, options, &comm))).collect();
        let panicked = |_| Err(anyhow::anyhow!("internal error: a rank panicked"));
        started.into_iter().map(|handle| handle.join().unwrap_or_else(panicked)).collect()
    });
    let mut statuses = vec![];
    let mut errors = vec![];
    for result in results {
        match result {
            Ok(status) => statuses.push(status),
            Err(error) => errors.push(error),
        }
    }
    let cause = errors.iter().position(|e| exit_status(e) != 4).unwrap_or(0);
    if errors.is_empty() { Ok(statuses.into_iter().max().unwrap_or(0)) } else { Err(errors.swap_remove(cause)) }
}

fn train_on(config: &Config, options: &RunOptions, comm: &Arc<dyn Communicator>) -> anyhow::Result<u8> {
    match train(config, options, comm) {
        Ok(finished) => Ok(finished.exit_status()),
        Err(error) => {
            // Ends the other ranks now. Otherwise they would wait for this rank until their deadline passes.
            comm.abort(&error.to_string());
            Err(error.into())
        }
    }
}

/// Returns whether messages about the environment are printed in addition to the messages of training.
fn prints_environment(config: &Config, options: &RunOptions) -> bool {
    options.output.at(config.log_level) != Output::Quiet
}

/// Returns the exit status for an error.
#[must_use]
pub(crate) fn exit_status(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<Error>() {
        return error.exit_status();
    }
    let is_input = error.is::<zero_config::Errors>() || error.is::<zero_comm::LauncherEnvironmentError>();
    if is_input { 2 } else { 1 }
}

/// Formats an error for the user.
#[must_use]
pub(crate) fn message(error: &anyhow::Error) -> String {
    // The project's own errors already include their causes.
    let is_ours = error.is::<Error>() || error.is::<zero_config::Errors>();
    let text = if is_ours { error.to_string() } else { format!("{error:#}") };
    // Each configuration error already begins with `error:`.
    if text.starts_with("error:") { text } else { format!("error: {text}") }
}
