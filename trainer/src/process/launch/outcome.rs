//! The outcome of an attempt, on one host or on all hosts.

use std::path::Path;
use std::process::ExitStatus;

use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGINT, SIGTERM};

use std::os::unix::process::ExitStatusExt;

/// The exit status of a rank that lost a peer.
const LOST_PEER: Option<i32> = Some(4);

/// The failure of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    /// Global rank.
    pub(super) rank: usize,
    /// The rank's exit status, if no signal killed it.
    pub(super) code: Option<i32>,
    /// The signal that killed the rank.
    pub(super) signal: Option<i32>,
}

impl Failure {
    /// Describes the end of a rank. If the rank exited with status 1, its status is read from `status_file`, because a
    /// program that returns an error from `main` exits with status 1, whatever the error is.
    pub(super) fn new(rank: usize, status: ExitStatus, status_file: Option<&Path>) -> Self {
        let of_error = || std::fs::read_to_string(status_file?).ok()?.parse().ok();
        let code = match status.code() {
            Some(1) => of_error().or(Some(1)),
            code => code,
        };
        Self { rank, code, signal: status.signal() }
    }

    /// Returns whether the rank ended because it lost a peer.
    pub(super) fn follows(&self) -> bool {
        self.code == LOST_PEER
    }

    /// Returns whether a restart may help.
    ///
    /// A restart cannot help against a wrong configuration (2), unreadable data (3) or a loss that is not finite (5).
    /// SIGINT and SIGTERM are requests to stop, so they are not failures. The exit statuses 2, 3 and 5 of another
    /// program have no known meaning. For other programs, a restart is therefore ruled out only after a request to
    /// stop.
    pub(super) fn is_death(&self, is_ours: bool) -> bool {
        match (self.code, self.signal) {
            (Some(130 | 143), _) | (None, Some(SIGINT | SIGTERM)) => false,
            (Some(2 | 3 | 5), _) => !is_ours,
            _ => true,
        }
    }

    /// Returns whether a signal stopped the rank after a checkpoint. This is not a failure.
    pub(super) fn is_stop(&self) -> bool {
        matches!(self.code, Some(130 | 143))
    }

    /// Returns whether a request to stop ended the rank before it had installed its handlers, so before training.
    pub(super) fn is_stop_at_start(&self) -> bool {
        matches!((self.code, self.signal), (None, Some(SIGINT | SIGTERM)))
    }

    /// Returns the exit status of the launcher after this failure. After a request to stop, this is the status with
    /// which a rank that handles the signal exits.
    pub(super) fn exit_status(&self) -> u8 {
        match (self.code, self.signal) {
            (None, Some(SIGINT)) => 130,
            (None, Some(SIGTERM)) => 143,
            (code, _) => code.map_or(4, |code| u8::try_from(code).unwrap_or(1)),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "rank {} exited with status {code}", self.rank),
            (None, signal) => write!(f, "rank {} was killed by signal {}", self.rank, signal.unwrap_or(0)),
        }
    }
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AttemptOutcome {
    /// The rank that failed first. A rank that ended because it lost a peer counts only if no rank failed for another
    /// reason, even if the launcher noticed its end first.
    pub(super) first: Option<Failure>,
    /// Number of ranks that crashed: killed by a signal that no launcher sent, or exited with status 1.
    pub(super) lost: usize,
}

impl AttemptOutcome {
    /// Combines the outcomes of all hosts, which are given in the order of the hosts.
    pub(super) fn of_all(hosts: impl IntoIterator<Item = AttemptOutcome>) -> Self {
        hosts.into_iter().fold(Self::default(), |all, host| {
            let first = match (all.first, host.first) {
                (Some(a), Some(b)) if a.follows() && !b.follows() => Some(b),
                (a, b) => a.or(b),
            };
            Self { first, lost: all.lost + host.lost }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_of_several_hosts_is_the_cause_and_not_a_lost_peer() {
        let failure = |rank, code, signal| Some(Failure { rank, code, signal });
        let follower = AttemptOutcome { first: failure(0, Some(4), None), lost: 0 };
        let killed = AttemptOutcome { first: failure(3, None, Some(9)), lost: 1 };
        for hosts in [[follower, killed], [killed, follower]] {
            assert_eq!(AttemptOutcome::of_all(hosts), killed);
        }
        assert_eq!(AttemptOutcome::of_all([follower; 2]), follower);
        assert_eq!(AttemptOutcome::of_all([AttemptOutcome::default(); 2]), AttemptOutcome::default());
    }

    #[test]
    fn the_status_of_an_error_replaces_status_1() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "3").expect("a file");
        let code = |status: i32, path| Failure::new(0, ExitStatus::from_raw(status << 8), path).code;
        assert_eq!((code(1, Some(file.path())), code(101, Some(file.path()))), (Some(3), Some(101)));
        assert_eq!((code(1, Some(Path::new("/nowhere"))), code(1, None)), (Some(1), Some(1)));
    }

    #[test]
    fn user_errors_and_stops_are_not_restarted() {
        let ended = |code| Failure { rank: 0, code: Some(code), signal: None };
        let killed = |signal| Failure { rank: 0, code: None, signal: Some(signal) };
        for code in [2, 3, 5] {
            assert!(!ended(code).is_death(true) && ended(code).is_death(false), "{code}");
        }
        for failure in [ended(1), ended(4), ended(101), killed(9)] {
            assert!(failure.is_death(true) && failure.is_death(false), "{failure}");
        }
        for failure in [ended(130), ended(143), killed(SIGINT), killed(SIGTERM)] {
            assert!(!failure.is_death(true) && !failure.is_death(false), "{failure}");
            assert!(matches!(failure.exit_status(), 130 | 143), "{failure}");
        }
        assert_eq!(killed(9).exit_status(), 4);
    }
}
