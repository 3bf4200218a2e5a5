//! Collects the timelines of all ranks.

use zero_comm::{Buffer, Communicator};

use crate::error::Error;
use crate::timing::Span;

/// One executed instruction of one rank.
#[derive(Debug, Clone, Copy)]
pub struct Done {
    /// Position of the instruction in the step's program.
    pub index: usize,
    /// Start in seconds.
    pub start: f64,
    /// End in seconds.
    pub end: f64,
}

/// Gathers the timelines of all ranks. Collective.
pub fn gathered(comm: &dyn Communicator, spans: &[Span]) -> Result<Vec<Vec<Done>>, Error> {
    let nanoseconds = |time: std::time::Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    let own: Vec<i64> =
        spans.iter().flat_map(|span| [span.index as i64, nanoseconds(span.start), nanoseconds(span.end)]).collect();
    let done =
        |three: &[i64]| Done { index: three[0] as usize, start: three[1] as f64 / 1e9, end: three[2] as f64 / 1e9 };
    let all = of_each_rank(comm, own)?;
    Ok(all.iter().map(|own| own.chunks_exact(3).map(done).collect()).collect())
}

/// Gathers a vector of any length from each rank. Collective.
pub(crate) fn of_each_rank(comm: &dyn Communicator, own: Vec<i64>) -> Result<Vec<Vec<i64>>, Error> {
    let (size, length) = (comm.size(), Buffer::I64(vec![own.len() as i64]));
    let lengths = comm.all_gather(length, Buffer::I64(vec![0; size]), &vec![1; size]).wait()?.output.into_i64()?;
    let counts: Vec<usize> = lengths.iter().map(|&n| n as usize).collect();
    let room = Buffer::I64(vec![0; counts.iter().sum()]);
    let all = comm.all_gather(Buffer::I64(own), room, &counts).wait()?.output.into_i64()?;
    let mut rest = &all[..];
    Ok(counts
        .into_iter()
        .map(|count| {
            let (own, others) = rest.split_at(count);
            rest = others;
            own.to_vec()
        })
        .collect())
}

/// Splits a timeline into steps: a step begins where the instruction index does not increase.
pub fn steps(done: &[Done]) -> impl Iterator<Item = &[Done]> {
    done.chunk_by(|a, b| a.index < b.index)
}
