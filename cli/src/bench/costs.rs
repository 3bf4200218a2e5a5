//! `zero-train bench costs`: measures a cost table. Plans predict the time of a step from it.

use std::path::Path;

use zero_engine::costs::Length as CostLength;

use super::ranks::{Role, take_part};
use crate::arguments::ConfigArgs;

/// Measures on all ranks and writes the table on rank 0. Returns the exit status.
///
/// # Errors
/// Fails if training would fail, or if `out` cannot be written.
pub(crate) fn costs(args: &ConfigArgs, out: &Path, length: &CostLength) -> anyhow::Result<u8> {
    let (config, cores, comm) = match take_part(args)? {
        Role::Launcher(status) => return Ok(status),
        Role::Rank { config, cores, comm } => (config, cores, comm),
    };
    let table = zero_train::train::measure_costs(&config, &comm, length)?;
    if comm.rank() == 0 {
        table.write(out)?;
        println!("{cores}");
        println!("{table}");
        println!("written to {}", out.display());
    }
    comm.barrier().wait()?;
    Ok(0)
}
