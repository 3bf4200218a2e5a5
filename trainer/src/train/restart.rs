//! What a launcher tells a run that it has started again, after a rank died.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

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
