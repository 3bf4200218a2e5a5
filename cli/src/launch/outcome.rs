//! How an attempt ended, on one host or on all of them.

use std::process::ExitStatus;

use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGINT, SIGTERM};

use std::os::unix::process::ExitStatusExt;

/// The exit status of a rank that lost a peer.
const LOST_PEER: Option<i32> = Some(4);

/// A rank that did not end well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    /// Of all ranks.
    pub(super) rank: usize,
    /// Its exit status, if it ended itself.
    pub(super) code: Option<i32>,
    /// The signal that killed it.
    pub(super) signal: Option<i32>,
}

impl Failure {
    pub(super) fn new(rank: usize, status: ExitStatus) -> Self {
        Self { rank, code: status.code(), signal: status.signal() }
    }

    /// Whether it ended because another did.
    pub(super) fn follows(&self) -> bool {
        self.code == LOST_PEER
    }

    /// Whether it died, and was no end: not the user's mistake (2), not unreadable data (3), not a loss that is no longer finite (5),
    /// and not a signal that asks to stop. Of a foreign program only the last is known.
    pub(super) fn is_death(&self, is_ours: bool) -> bool {
        match (self.code, self.signal) {
            (Some(130 | 143), _) | (None, Some(SIGINT | SIGTERM)) => false,
            (Some(2 | 3 | 5), _) => !is_ours,
            _ => true,
        }
    }

    /// Whether it was stopped by a signal after a checkpoint: no error.
    pub(super) fn is_stop(&self) -> bool {
        matches!(self.code, Some(130 | 143))
    }

    /// The exit status of the launcher.
    pub(super) fn exit_status(&self) -> u8 {
        self.code.map_or(4, |code| u8::try_from(code).unwrap_or(1))
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "rank {} ended with status {code}", self.rank),
            (None, signal) => write!(f, "rank {} was killed by signal {}", self.rank, signal.unwrap_or(0)),
        }
    }
}

/// The end of an attempt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AttemptOutcome {
    /// Who failed first: if one of two lost the other, that other, whichever was seen first.
    pub(super) first: Option<Failure>,
    /// How many died by themselves: not of the loss of another, and not because a launcher ended them.
    pub(super) lost: usize,
}

impl AttemptOutcome {
    /// Of all hosts, in their order.
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
    fn of_several_hosts_the_cause_counts_and_not_who_followed() {
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
    fn what_is_not_tried_again() {
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
        }
    }
}
