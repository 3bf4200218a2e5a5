//! What a launcher tells a run that it has started again, after a rank died.

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
    /// Who died how.
    pub reason: String,
    /// Ranks that went on.
    pub ranks: usize,
    /// The step after which they went on; 0 where the run had saved no checkpoint yet.
    pub step: u64,
}

/// The restarts of a run so far, and where it goes on. That of a first attempt is empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Restarts {
    /// In order.
    pub restarts: Vec<Restart>,
    /// The checkpoints that earlier attempts have saved, by step, the newest last; the newest that is as it was written is taken. If there
    /// is none, this attempt begins where the first one did.
    pub from: Vec<(u64, PathBuf)>,
    /// The run's folder is an earlier attempt's, so it is not moved aside.
    pub keeps_folder: bool,
}

impl Restarts {
    /// Puts into the options what our launcher has told this rank of earlier attempts, if it started this process.
    ///
    /// # Errors
    /// A variable that our launcher does not set so.
    pub fn of_launcher(options: &mut RunOptions) -> Result<(), Error> {
        if !process::launched_by_us() {
            return Ok(());
        }
        options.job = std::env::var(process::JOB).ok();
        if let Ok(told) = std::env::var(process::RESTARTED) {
            options.restarts = Self::from_json(&told).map_err(|error| {
                let message = format!("it is not what our launcher sets: {error}");
                Error::setting(process::RESTARTED, message, "unset the variable")
            })?;
        }
        Ok(())
    }

    /// For [`from_json`](Self::from_json).
    #[must_use]
    pub fn to_json(&self) -> String {
        // Plain data with text keys: there is nothing in it that could fail to serialise but a path that is no text.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads what [`to_json`](Self::to_json) has written.
    ///
    /// # Errors
    /// If it is something else.
    pub fn from_json(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }
}

/// What a launcher that knows nothing of a run's folder leaves to the run: whether the folder `out` is an earlier attempt's, which its
/// marker says, and then from which checkpoints the run goes on. A collective.
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
    // Launchers of other hosts have other names for their part of the job, so rank 0 alone decides.
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
    fn reads_back() {
        let restart = Restart { reason: "rank 1 was killed by signal 9".into(), ranks: 2, step: 10 };
        let again =
            Restarts { restarts: vec![restart], from: vec![(1, "run/checkpoints/step-1".into())], keeps_folder: true };
        assert_eq!(Restarts::from_json(&again.to_json()).ok(), Some(again));
        assert!(Restarts::from_json("").is_err());
    }
}
