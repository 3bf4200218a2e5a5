//! Gathers vectors whose lengths differ between ranks.

use crate::{Buffer, CommError, Communicator};

/// Gathers a vector from each rank, in rank order. The vectors may have different lengths. Collective.
///
/// # Errors
/// Returns the error of a collective.
pub fn from_each_rank<T>(comm: &dyn Communicator, own: Vec<T>) -> Result<Vec<Vec<T>>, CommError>
where
    T: Clone + Default,
    Buffer: From<Vec<T>>,
    Vec<T>: TryFrom<Buffer, Error = CommError>,
{
    let size = comm.size();
    let length = Buffer::I64(vec![own.len() as i64]);
    let lengths = comm.all_gather(length, Buffer::I64(vec![0; size]), &vec![1; size]).wait()?.output.into_i64()?;
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let total = lengths.iter().sum();
    if total == 0 {
        return Ok(vec![vec![]; size]);
    }
    let all = Buffer::from(vec![T::default(); total]);
    let all = comm.all_gather(own.into(), all, &lengths).wait()?.output;
    let mut rest = Vec::try_from(all)?.into_iter();
    Ok(lengths.into_iter().map(|length| rest.by_ref().take(length).collect()).collect())
}
