//! Collects the timelines of all ranks.

use zero_comm::{Communicator, from_each_rank};

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
    let all = from_each_rank(comm, own)?;
    Ok(all.iter().map(|own| own.chunks_exact(3).map(done).collect()).collect())
}

/// Splits a timeline into steps: a step begins where the instruction index does not increase.
pub fn steps(done: &[Done]) -> impl Iterator<Item = &[Done]> {
    done.chunk_by(|a, b| a.index < b.index)
}
