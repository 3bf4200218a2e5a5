//! Records whether the job has failed, and why. Only the first cause counts: every later operation fails with this
//! cause.
//!
//! Each rank of the job has one `Health`, shared by its communicator and all splits. Ranks that are threads share one
//! `Board`; a process has its own and synchronizes it with the other processes over control connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::collective::signature::Signature;
use crate::error::CommError;
use crate::inquiry::WaitRegistry;

/// How long a waiting thread sleeps before it checks again whether the job has failed. A rank must notice a failure
/// within half a second, as documented; this leaves a margin.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Why the job ended. Ranks are global ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    Lost { peer: usize, detail: String },
    Aborted { by: usize, reason: String },
    Mismatch { rank: usize, here: String, peer: usize, there: String },
}

/// Why one operation failed.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// The job has ended, or this operation ends it.
    Cause(Cause),
    /// This rank has waited for `peer` until the deadline.
    Deadline { peer: usize },
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Failure {
        Failure::Cause(cause)
    }
}

/// Sends messages about the job as a whole to the other ranks.
pub(crate) trait Announce: Send + Sync {
    /// Tells all ranks why the job ended. Must not block for long and must not fail: a rank that cannot be reached has
    /// either ended or will detect the failure by itself.
    fn announce(&self, cause: &Cause);

    /// Asks rank `peer` which ranks it waits for in the operation with this topic. The answer, if any, arrives in the
    /// [`WaitRegistry`]. Must not block for long.
    fn ask(&self, peer: usize, topic: u64);
}

/// The known state of the job: the cause of its end, and the ranks that have left in an orderly way.
pub(crate) struct Board {
    cause: OnceLock<Cause>,
    left: Vec<AtomicBool>,
}

impl Board {
    pub(crate) fn new(world_size: usize) -> Arc<Board> {
        Arc::new(Board { cause: OnceLock::new(), left: (0..world_size).map(|_| AtomicBool::new(false)).collect() })
    }

    /// Returns the number of ranks in the job.
    pub(crate) fn ranks(&self) -> usize {
        self.left.len()
    }

    pub(crate) fn cause(&self) -> Option<&Cause> {
        self.cause.get()
    }

    /// Records a cause. Returns whether it was the first.
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
    /// This rank's number in the job.
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

    /// Ends the job with `cause`, unless it has already ended, and tells the other ranks.
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
                let reason = format!("timed out after {timeout:?} waiting for rank {peer} in {operation} #{sequence}");
                Cause::Aborted { by: self.rank, reason }
            }
        });
    }

    /// Returns the failure for a connection to `peer` that broke while in use. The peer may have closed the connection
    /// because of an earlier fault, about which it has sent a message. This waits for that message, which is more
    /// informative than the broken connection.
    pub(crate) fn broken(&self, peer: usize, detail: &str) -> Failure {
        // If the peer's process has ended, the control connection reports its end before this limit.
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

    /// Converts the failure of one operation to the error that its caller gets.
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
