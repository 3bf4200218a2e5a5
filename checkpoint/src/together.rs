//! Ranks go on together or not at all.

use zero_comm::{Buffer, CommError, Communicator};

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
