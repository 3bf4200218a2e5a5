//! Collective error handling: either all ranks continue or all fail.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use zero_comm::{Buffer, CommError, Communicator, ReduceOp, from_each_rank};

use crate::error::CheckpointError;

/// Returns `mine` if all ranks succeeded. Otherwise fails on every rank: a failed rank returns its own error, and the
/// others return the error of the lowest failed rank. Collective.
pub(crate) fn together<T>(comm: &dyn Communicator, mine: Result<T, CheckpointError>) -> Result<T, CheckpointError> {
    let said = mine.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let heard = from_each_rank(comm, said.into_bytes())?;
    let value = mine?;
    match heard.into_iter().enumerate().find(|(_, reason)| !reason.is_empty()) {
        None => Ok(value),
        Some((rank, reason)) => {
            Err(CheckpointError::OtherRank { rank, reason: String::from_utf8_lossy(&reason).into_owned() })
        }
    }
}

/// Interval at which a working rank tells the others that it is still alive. It is far below every deadline.
const SIGN_OF_LIFE: Duration = Duration::from_millis(100);

/// Runs `work`, which may take much longer on one rank than on another. Collective. A rank that finished early would
/// otherwise time out in its next collective and report the others as lost. Therefore all ranks keep telling each other
/// that they are alive until the last one has finished.
///
/// # Errors
/// Fails if a rank is lost.
pub fn patiently<T>(comm: &dyn Communicator, work: impl FnOnce() -> T) -> Result<T, CommError> {
    thread::scope(|scope| {
        let (done, wait) = mpsc::channel::<()>();
        let signs = scope.spawn(move || {
            // `recv_timeout` returns a disconnect error once `done` is dropped, even by a panic.
            let mut works = true;
            loop {
                works = works && wait.recv_timeout(SIGN_OF_LIFE) == Err(mpsc::RecvTimeoutError::Timeout);
                if !any(comm, works)? {
                    return Ok(());
                }
            }
        });
        let value = work();
        drop(done);
        signs.join().unwrap_or(Ok(()))?;
        Ok(value)
    })
}

/// Returns whether `here` is true on any rank. Collective.
pub(crate) fn any(comm: &dyn Communicator, here: bool) -> Result<bool, CommError> {
    let all = comm.all_reduce(Buffer::I64(vec![i64::from(here)]), ReduceOp::Max).wait()?.into_i64()?;
    Ok(all.iter().any(|&one| one != 0))
}
