//! Ranks go on together or not at all.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use zero_comm::{Buffer, CommError, Communicator, ReduceOp};

use crate::error::CheckpointError;

/// The own result if all ranks succeeded; else an error on every rank, the own one first; a collective.
pub(crate) fn together<T>(comm: &dyn Communicator, mine: Result<T, CheckpointError>) -> Result<T, CheckpointError> {
    let said = mine.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let heard = exchange(comm, said.into_bytes())?;
    let value = mine?;
    match heard.into_iter().enumerate().find(|(_, reason)| !reason.is_empty()) {
        None => Ok(value),
        Some((rank, reason)) => Err(CheckpointError::OtherRank { rank, reason }),
    }
}

/// How long a rank works before it tells the others that it still does; far below every deadline.
const SIGN_OF_LIFE: Duration = Duration::from_millis(100);

/// Does what may take long, and longer on one rank than on another; a collective. A rank that is done would take one that is not for
/// lost, had it to wait for it: so all tell each other that they work until the last is done.
pub(crate) fn patiently<T>(comm: &dyn Communicator, work: impl FnOnce() -> T) -> Result<T, CommError> {
    thread::scope(|scope| {
        let (done, wait) = mpsc::channel::<()>();
        let signs = scope.spawn(move || {
            // Ends with an error when the other end is dropped, be it by a panic.
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

/// Whether it is so on any rank; a collective.
pub(crate) fn any(comm: &dyn Communicator, here: bool) -> Result<bool, CommError> {
    let all = comm.all_reduce(Buffer::I64(vec![i64::from(here)]), ReduceOp::Max).wait()?.into_i64()?;
    Ok(all.iter().any(|&one| one != 0))
}

/// What each rank says, in rank order.
fn exchange(comm: &dyn Communicator, said: Vec<u8>) -> Result<Vec<String>, CommError> {
    let ranks = comm.size();
    let length = Buffer::I64(vec![said.len() as i64]);
    let lengths = comm.all_gather(length, Buffer::I64(vec![0; ranks]), &vec![1; ranks]).wait()?.output.into_i64()?;
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    if lengths.iter().all(|&length| length == 0) {
        return Ok(vec![String::new(); ranks]);
    }
    let all = Buffer::U8(vec![0; lengths.iter().sum()]);
    let mut all = comm.all_gather(Buffer::U8(said), all, &lengths).wait()?.output.into_u8()?;
    Ok(lengths
        .into_iter()
        .map(|length| {
            let rest = all.split_off(length);
            String::from_utf8_lossy(&std::mem::replace(&mut all, rest)).into_owned()
        })
        .collect())
}
