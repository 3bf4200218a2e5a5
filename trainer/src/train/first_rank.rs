//! Lets only rank 0 look at a disk or a store, so that all ranks make the same decision.

use zero_checkpoint::patiently;
use zero_comm::{Buffer, Communicator};
use zero_engine::Error;

/// Runs a function on rank 0 and returns its result on every rank. A collective.
pub(super) fn on_first_rank(
    comm: &dyn Communicator,
    compute: impl FnOnce() -> Result<Option<u64>, Error>,
) -> Result<Option<u64>, Error> {
    let found = patiently(comm, || if comm.rank() == 0 { compute() } else { Ok(None) })??;
    let step = Buffer::I64(vec![found.map_or(-1, |step| step as i64)]);
    Ok(u64::try_from(comm.broadcast(step, 0).wait()?.into_i64()?[0]).ok())
}
