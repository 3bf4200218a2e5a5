//! Whether the job is still whole, and if not, why: the first cause wins and every operation ends with it.
//!
//! One `Health` per rank of the world, shared by its communicator and all splits. Ranks that are threads share one `Board`;
//! a process has its own and keeps it in step with the others' over control connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::CommError;
use crate::inquiry::WaitRegistry;
use crate::signature::Signature;

/// How long a wait sleeps before it looks whether the job is still whole. Half a second is promised; this leaves room.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Why the job is over. Ranks are ranks of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    Lost { peer: usize, detail: String },
    Aborted { by: usize, reason: String },
    Mismatch { rank: usize, here: String, peer: usize, there: String },
}

/// Why one operation could not go on.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// The job is over, or this operation ends it.
    Cause(Cause),
    /// This rank's patience with `peer` is at an end.
    Deadline { peer: usize },
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Failure {
        Failure::Cause(cause)
    }
}

/// How a rank talks to the others about the job as a whole.
pub(crate) trait Announce: Send + Sync {
    /// Tells everybody why the job is over.
    /// Must not block for long and must not fail: whoever cannot be reached is gone or will find out.
    fn announce(&self, cause: &Cause);

    /// Asks a rank whom it waits for, on a topic. The answer, if any, comes to the [`WaitRegistry`]. Must not block for long.
    fn ask(&self, peer: usize, topic: u64);
}

/// What is known about the job: the cause of its end, and who has left in good order.
pub(crate) struct Board {
    cause: OnceLock<Cause>,
    left: Vec<AtomicBool>,
}

impl Board {
    pub(crate) fn new(world_size: usize) -> Arc<Board> {
        Arc::new(Board { cause: OnceLock::new(), left: (0..world_size).map(|_| AtomicBool::new(false)).collect() })
    }

    pub(crate) fn cause(&self) -> Option<&Cause> {
        self.cause.get()
    }

    /// Whether this was the first cause.
    pub(crate) fn learn(&self, cause: Cause) -> bool {
        self.cause.set(cause).is_ok()
    }

    pub(crate) fn leave(&self, rank: usize) {
        self.left[rank].store(true, Ordering::SeqCst);
    }

    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.left[rank].load(Ordering::SeqCst)
    }
}

/// One rank's view of the job.
pub(crate) struct Health {
    /// Rank in the world.
    pub(crate) rank: usize,
    pub(crate) board: Arc<Board>,
    pub(crate) registry: Arc<WaitRegistry>,
    announcer: Option<Box<dyn Announce>>,
}

impl Health {
    pub(crate) fn new(
        rank: usize,
        board: Arc<Board>,
        registry: Arc<WaitRegistry>,
        announcer: Option<Box<dyn Announce>>,
    ) -> Arc<Health> {
        Arc::new(Health { rank, board, registry, announcer })
    }

    pub(crate) fn ask(&self, peer: usize, topic: u64) {
        if let Some(announcer) = &self.announcer {
            announcer.ask(peer, topic);
        }
    }

    pub(crate) fn check(&self) -> Result<(), Failure> {
        match self.board.cause() {
            None => Ok(()),
            Some(cause) => Err(cause.clone().into()),
        }
    }

    /// Ends the job, unless it has ended already, and tells the others.
    pub(crate) fn end(&self, cause: Cause) {
        if self.board.learn(cause.clone())
            && let Some(announcer) = &self.announcer
        {
            announcer.announce(&cause);
        }
    }

    /// Ends the job because an operation failed.
    pub(crate) fn end_because(&self, failure: &Failure, signature: &Signature, timeout: Duration) {
        self.end(match failure {
            Failure::Cause(cause) => cause.clone(),
            Failure::Deadline { peer } => {
                let (operation, sequence) = (signature.operation, signature.sequence);
                let reason = format!("waited {timeout:?} for rank {peer} in {operation} #{sequence}");
                Cause::Aborted { by: self.rank, reason }
            }
        });
    }

    /// A connection to `peer` broke while it was needed. If that happened because the peer knew of an earlier fault, its own
    /// message about it is on the way and says more than the broken connection does.
    pub(crate) fn broken(&self, peer: usize, detail: &str) -> Failure {
        // When the peer's process has ended the watch says so sooner.
        let until = Instant::now() + 20 * SLICE;
        while Instant::now() < until && !self.board.has_left(peer) {
            if let Err(failure) = self.check() {
                return failure;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        if let Err(failure) = self.check() {
            return failure;
        }
        Cause::Lost { peer, detail: detail.to_string() }.into()
    }

    /// The failure of one operation as its caller sees it.
    pub(crate) fn error(&self, failure: Failure, signature: &Signature, timeout: Duration) -> CommError {
        let (rank, operation, sequence) = (self.rank, signature.operation, signature.sequence);
        match failure {
            Failure::Deadline { peer } => CommError::Deadline { rank, peer, operation, sequence, timeout },
            Failure::Cause(Cause::Lost { peer, detail }) => {
                CommError::LostPeer { rank, peer, operation, sequence, detail }
            }
            Failure::Cause(Cause::Aborted { by, reason }) => {
                CommError::Aborted { rank, by, reason, operation, sequence }
            }
            Failure::Cause(Cause::Mismatch { rank, here, peer, there }) => {
                CommError::Mismatch { rank, here, peer, there }
            }
        }
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        self.board.leave(self.rank);
    }
}
