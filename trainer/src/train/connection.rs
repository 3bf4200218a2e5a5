//! How a rank of a run meets the others.

use std::sync::Arc;

use zero_comm::Communicator;
use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::Config;

use super::options::{Resume, RunOptions};
use zero_engine::Error;

/// Meets the other ranks; all must have been started alike.
///
/// # Errors
/// Ranks that do not meet, or that differ in configuration or options.
pub fn connect(
    config: &Config,
    options: &RunOptions,
    place: &LauncherEnvironment,
) -> Result<Arc<dyn Communicator>, Error> {
    let mut comm_options = zero_engine::comm_options(config, place)?;
    comm_options.terms.extend(terms(options));
    Ok(zero_comm::connect(place, &comm_options)?)
}

/// What of the command line is not in the configuration, and must be the same on all ranks.
fn terms(options: &RunOptions) -> [(String, String); 2] {
    let resume = match &options.resume {
        None => "not given".to_string(),
        Some(Resume::Auto) => "auto".to_string(),
        Some(Resume::From(folder)) => folder.display().to_string(),
    };
    let verify = options.verify.map_or("not given".to_string(), |steps| steps.to_string());
    [("--resume".to_string(), resume), ("--verify".to_string(), verify)]
}
