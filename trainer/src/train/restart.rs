//! The information that the launcher passes to the ranks when it restarts them after a failure.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use zero_comm::{Buffer, Communicator};

use super::folder;
use super::options::RunOptions;
use crate::process;
use zero_engine::Error;

/// One restart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// The rank that failed, and how it failed.
    pub reason: String,
    /// Number of ranks after the restart.
    pub ranks: usize,
    /// The step after which training resumed, or 0 if there was no checkpoint.
    pub step: u64,
}

/// The restarts of a run so far, and where the run resumes. Empty on the first attempt.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Restarts {
    /// The restarts in chronological order.
    pub restarts: Vec<Restart>,
    /// Checkpoints of earlier attempts, by step, with the newest last. The run resumes from the newest intact
    /// checkpoint. Without an intact checkpoint, it begins where the first attempt began.
    pub from: Vec<(u64, PathBuf)>,
    /// Whether the run's folder belongs to an earlier attempt, so that it must not be moved aside.
    pub keeps_folder: bool,
}

impl Restarts {
    /// Fills `options` with the information from our launcher about earlier attempts. Does nothing in a process that
    /// our launcher did not start.
    ///
    /// # Errors
    /// Fails if the environment variable does not have our launcher's format.
    pub fn of_launcher(options: &mut RunOptions) -> Result<(), Error> {
        if !process::launched_by_us() {
            return Ok(());
        }
        options.job = std::env::var(process::JOB).ok();
        if let Ok(told) = std::env::var(process::RESTARTED) {
            options.restarts = Self::from_json(&told).map_err(|error| {
                let message = format!("the variable was not set by zero-train's launcher: {error}");
                Error::setting(process::RESTARTED, message, "unset the variable")
            })?;
        }
        Ok(())
    }

    /// Formats the value for [`from_json`](Self::from_json).
    #[must_use]
    pub fn to_json(&self) -> String {
        // Plain data with text keys fails to serialize only if a path is not UTF-8.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Parses the output of [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// Fails on any other text.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }
}

/// Completes `told` for a launcher that does not know the run's folder. If the job file in `out` names this job, the
/// folder belongs to an earlier attempt, and the run resumes from its checkpoints. A collective.
pub(super) fn found(
    told: &Restarts,
    job: Option<&str>,
    out: &Path,
    comm: &dyn Communicator,
) -> Result<Restarts, Error> {
    let mut restarts = told.clone();
    if told.restarts.is_empty() || told.keeps_folder || !told.from.is_empty() {
        return Ok(restarts);
    }
    // Launchers on other hosts use different names for their part of the job, so only rank 0 compares the names.
    let marked = if comm.rank() == 0 { folder::job_of(out) } else { None };
    let marked = marked.filter(|(marked, _)| job == Some(marked));
    let is_own = Buffer::I64(vec![i64::from(marked.is_some())]);
    if comm.broadcast(is_own, 0).wait()?.into_i64()?[0] != 0 {
        (restarts.from, restarts.keeps_folder) = (zero_checkpoint::committed(&out.join("checkpoints"))?, true);
        let step = restarts.from.last().map_or(0, |(step, _)| *step);
        restarts.restarts.iter_mut().rev().take(1).for_each(|restart| restart.step = step);
        let before = marked.map(|(_, before)| before.restarts).unwrap_or_default();
        restarts.restarts.iter_mut().zip(before).for_each(|(restart, before)| restart.step = before.step);
    }
    Ok(restarts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_survive_serialization() {
        let restart = Restart { reason: "rank 1 was killed by signal 9".into(), ranks: 2, step: 10 };
        let again =
            Restarts { restarts: vec![restart], from: vec![(1, "run/checkpoints/step-1".into())], keeps_folder: true };
        assert_eq!(Restarts::from_json(&again.to_json()).ok(), Some(again));
        assert!(Restarts::from_json("").is_err());
    }
}
