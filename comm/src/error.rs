//! Errors between ranks, each with the rank, the operation and its sequence number.
//!
//! Ranks in these errors are global ranks, also for a communicator created by `split`, because logs and launchers use
//! global ranks.

use std::time::Duration;

use crate::buffers::dtype::Dtype;
use crate::collective::signature::Operation;

/// Why an operation or the rendezvous of the ranks failed.
///
/// All errors except [`Invalid`](CommError::Invalid), [`Dtype`](CommError::Dtype) and [`OnDevice`](CommError::OnDevice)
/// are final: every later operation on the communicator and on all its splits fails with the same cause, on every rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A peer was lost: its process ended, its connection broke, or it dropped its communicator while other ranks still
    /// used the group. A rank that the others report as lost gets this error with itself as the peer.
    #[error("rank {rank} {} in {operation} #{sequence}: {detail}", lost(*rank, *peer))]
    LostPeer {
        /// This rank.
        rank: usize,
        /// The lost rank.
        peer: usize,
        /// The operation that this rank was running.
        operation: Operation,
        /// The operation's sequence number.
        sequence: u64,
        /// How this rank detected the loss.
        detail: String,
    },
    /// A peer did not start or did not continue the operation in time.
    #[error("rank {rank} timed out after {timeout:?} waiting for rank {peer} in {operation} #{sequence}")]
    Deadline {
        /// This rank.
        rank: usize,
        /// The rank that this rank waited for.
        peer: usize,
        /// The operation that this rank was running.
        operation: Operation,
        /// The operation's sequence number.
        sequence: u64,
        /// How long this rank waited.
        timeout: Duration,
    },
    /// Two ranks called different operations, or the same operation with different lengths or types, or belong to
    /// different jobs.
    #[error("ranks called different operations: rank {rank} is in {here}, rank {peer} in {there}")]
    Mismatch {
        /// The rank that detected the mismatch.
        rank: usize,
        /// The operation on that rank.
        here: String,
        /// The other rank.
        peer: usize,
        /// The operation on the other rank.
        there: String,
    },
    /// A rank called `abort`, or stopped for a reason that it announced to the others.
    #[error("rank {rank} stopped in {operation} #{sequence}: rank {by} aborted: {reason}")]
    Aborted {
        /// This rank.
        rank: usize,
        /// The rank that aborted.
        by: usize,
        /// The reason that the aborting rank gave.
        reason: String,
        /// The operation that this rank was running.
        operation: Operation,
        /// The operation's sequence number.
        sequence: u64,
    },
    /// The rendezvous of the ranks failed.
    #[error("rank {rank} could not connect to the other ranks at {address}: {detail}")]
    Rendezvous {
        /// This rank.
        rank: usize,
        /// The address of the rendezvous.
        address: String,
        /// Why it failed and, where known, which setting to change.
        detail: String,
    },
    /// Two ranks were started with different versions, programs or settings ([`Options::terms`](crate::Options)), or
    /// with different numbers of ranks.
    #[error(
        "the ranks were started with different settings: {key} is {here} on rank {rank} and {there} on rank {peer}"
    )]
    Disagreement {
        /// The lower of the two ranks; for different terms, rank 0.
        rank: usize,
        /// The other rank; for different terms, the lowest one that differs from rank 0.
        peer: usize,
        /// The first key that differs.
        key: String,
        /// Its value on `rank`.
        here: String,
        /// Its value on `peer`.
        there: String,
    },
    /// The other side of a connection could not prove that it knows the job token, or refused this side's proof.
    #[error("{address}: {detail}")]
    Unauthorized {
        /// The address of the other side.
        address: String,
        /// What went wrong.
        detail: String,
    },
    /// The arguments of an operation contradict each other or the size of the group. No data was sent.
    #[error("rank {rank}, {operation}: {detail}")]
    Invalid {
        /// This rank.
        rank: usize,
        /// The method that was called.
        operation: Operation,
        /// What is wrong with the arguments.
        detail: String,
    },
    /// A buffer holds a different element type than requested.
    #[error("buffer holds {found}, not {expected}")]
    Dtype {
        /// The requested type.
        expected: Dtype,
        /// The type in the buffer.
        found: Dtype,
    },
    /// A buffer is in device memory, but the call needs host memory.
    #[error("the buffer is in the memory of device {device}; copy it to host memory first")]
    OnDevice {
        /// The index of the device.
        device: usize,
    },
    /// An operating-system error other than a lost peer.
    #[error("rank {rank}: {detail}")]
    Io {
        /// This rank.
        rank: usize,
        /// The failed action and the error it returned.
        detail: String,
    },
}

/// Says which peer a rank has lost, or that the other ranks have lost this rank.
fn lost(rank: usize, peer: usize) -> String {
    if rank == peer { "was lost by another rank".into() } else { format!("lost rank {peer}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_not_said_to_have_lost_itself() {
        let of = |peer| CommError::LostPeer {
            rank: 2,
            peer,
            operation: Operation::AllToAll,
            sequence: 16,
            detail: "its connection broke".into(),
        };
        assert_eq!(of(1).to_string(), "rank 2 lost rank 1 in all_to_all #16: its connection broke");
        assert_eq!(of(2).to_string(), "rank 2 was lost by another rank in all_to_all #16: its connection broke");
    }
}
