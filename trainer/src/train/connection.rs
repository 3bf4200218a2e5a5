//! Connects a rank to the other ranks of its run.

use std::sync::Arc;

use zero_comm::Communicator;
use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::Config;

use super::options::{Resume, RunOptions};
use zero_engine::Error;

/// Connects to the other ranks. All ranks must have been started with the same configuration and options.
///
/// # Errors
/// Fails if the ranks cannot connect, or if their configurations or options differ.
pub fn connect(
    config: &Config,
    options: &RunOptions,
    place: &LauncherEnvironment,
) -> Result<Arc<dyn Communicator>, Error> {
    let mut comm_options = zero_engine::comm_options(config, place)?;
    comm_options.terms.extend(terms(options));
    Ok(zero_comm::connect(place, &comm_options)?)
}

/// Returns the command-line options that are not part of the configuration and must be the same on all ranks.
fn terms(options: &RunOptions) -> [(String, String); 3] {
    let resume = match &options.resume {
        None => "not given".to_string(),
        Some(Resume::Auto) => "auto".to_string(),
        Some(Resume::From(folder)) => folder.display().to_string(),
    };
    let verify = options.verify.map_or("not given".to_string(), |steps| steps.to_string());
    let evaluate = if options.evaluate { "given" } else { "not given" };
    [("--resume", resume), ("--verify", verify), ("--evaluate", evaluate.into())]
        .map(|(key, value)| (key.into(), value))
}
