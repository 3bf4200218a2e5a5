//! Gathers a few bytes of all ranks while they connect.

use std::time::Instant;

use crate::buffers::dtype::Dtype;
use crate::buffers::ranges::consecutive;
use crate::collective::deadline::Deadline;
use crate::collective::signature::{Operation, Signature};
use crate::collective::step::{Collective, Membership, Step, Vector};
use crate::health::Failure;

/// Returns the bytes `mine` of all ranks of the group, in rank order. Used while connecting, before the communicator
/// exists.
pub(crate) fn gather_all(
    endpoint: &mut dyn Collective,
    membership: &Membership,
    mine: &[u8],
    round: u64,
    deadline: Instant,
) -> Result<Vec<Vec<u8>>, (Failure, Signature)> {
    let size = membership.size();
    let mut buffer = vec![0; size * mine.len()];
    let ranges = consecutive(vec![mine.len(); size], 1);
    buffer[ranges[membership.rank].clone()].copy_from_slice(mine);
    let signature = Signature {
        operation: Operation::Split,
        sequence: round,
        vectors: 1,
        dtype: Some(Dtype::U8),
        length: buffer.len() as u64,
        reduce: None,
        layout: 0,
        on_device: false,
    };
    let vectors = vec![Vector::new(Dtype::U8, &mut buffer, ranges.clone())];
    let deadline = Deadline::after(deadline.saturating_duration_since(Instant::now()));
    let step = Step { signature, reduce: None, vectors, gather: true, deadline };
    endpoint.run(step).map_err(|failure| (failure, signature))?;
    Ok(ranges.into_iter().map(|range| buffer[range].to_vec()).collect())
}
