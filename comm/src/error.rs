//! What can go wrong between ranks, with who, where and when in it.
//!
//! Ranks in these errors are ranks of the world, also in a communicator made by `split`: that is what logs and launchers
//! call them.

use std::time::Duration;

use crate::buffer::Dtype;
use crate::signature::Operation;

/// Why an operation, or the meeting of the ranks, failed.
///
/// All errors but [`Invalid`](CommError::Invalid), [`Dtype`](CommError::Dtype) and [`OnDevice`](CommError::OnDevice) are final: every later operation on the
/// communicator and on all its splits fails with the same cause, on every rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// A peer's process ended, its connection broke, or it dropped its communicator while it was still needed.
    #[error("rank {rank} lost rank {peer} in {operation} #{sequence}: {detail}")]
    LostPeer {
        /// This rank.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// What this rank was doing.
        operation: Operation,
        /// Its sequence number.
        sequence: u64,
        /// How the loss was noticed.
        detail: String,
    },
    /// A peer did not come to the operation, or did not go on with it, in time.
    #[error("rank {rank} waited {timeout:?} for rank {peer} in {operation} #{sequence}")]
    Deadline {
        /// This rank.
        rank: usize,
        /// The rank that it waited for.
        peer: usize,
        /// What this rank was doing.
        operation: Operation,
        /// Its sequence number.
        sequence: u64,
        /// How long it waited.
        timeout: Duration,
    },
    /// Two ranks came to the same place with different operations, lengths, types or jobs.
    #[error("ranks do not agree: rank {rank} is at {here}, rank {peer} at {there}")]
    Mismatch {
        /// The rank that noticed.
        rank: usize,
        /// What that rank is doing.
        here: String,
        /// The other rank.
        peer: usize,
        /// What the other rank is doing.
        there: String,
    },
    /// A rank called `abort`, or gave up for a reason that it told the others.
    #[error("rank {rank} stopped in {operation} #{sequence}: rank {by} aborted: {reason}")]
    Aborted {
        /// This rank.
        rank: usize,
        /// The rank that aborted.
        by: usize,
        /// Why.
        reason: String,
        /// What this rank was doing.
        operation: Operation,
        /// Its sequence number.
        sequence: u64,
    },
    /// The ranks could not meet.
    #[error("rank {rank} could not meet the others at {address}: {detail}")]
    Rendezvous {
        /// This rank.
        rank: usize,
        /// Where they should have met.
        address: String,
        /// Why it failed, and what to set where that is known.
        detail: String,
    },
    /// Two ranks were started with different versions, programs or settings: [`Options::terms`](crate::Options).
    #[error("the ranks were not started alike: {key} is {here} on rank {rank}, and {there} on rank {peer}")]
    Disagreement {
        /// The lowest rank.
        rank: usize,
        /// The lowest that differs from it.
        peer: usize,
        /// The first of the terms that differs.
        key: String,
        /// Its value on `rank`.
        here: String,
        /// Its value on `peer`.
        there: String,
    },
    /// The other side of a connection could not prove that it knows the job token, or refused our proof.
    #[error("{address}: {detail}")]
    Unauthorized {
        /// The other side.
        address: String,
        /// What went wrong.
        detail: String,
    },
    /// The arguments of an operation contradict each other or the size of the group. Nothing was sent.
    #[error("rank {rank}, {operation}: {detail}")]
    Invalid {
        /// This rank.
        rank: usize,
        /// What was called.
        operation: Operation,
        /// What is wrong with the arguments.
        detail: String,
    },
    /// A buffer holds another element type than was asked for.
    #[error("buffer holds {found}, not {expected}")]
    Dtype {
        /// What was asked for.
        expected: Dtype,
        /// What is in the buffer.
        found: Dtype,
    },
    /// A buffer is in the memory of a device, where the host's was needed.
    #[error("the buffer is in the memory of device {device}; copy it to the host first")]
    OnDevice {
        /// The number of the device.
        device: usize,
    },
    /// The operating system refused something that is not a lost peer.
    #[error("rank {rank}: {detail}")]
    Io {
        /// This rank.
        rank: usize,
        /// What was tried and what came back.
        detail: String,
    },
}
