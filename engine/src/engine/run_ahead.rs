//! Lets collectives between GPUs run ahead of the host, once the ranks have compared their programs.

use zero_comm::{Communicator, agree};
use zero_config::Config;
use zero_partition::OnGpu;
use zero_pipeline::Program;

use crate::error::Error;

/// Returns whether collectives between GPUs run ahead. Otherwise the ranks meet on the host before each of them.
pub(super) fn is_ahead(config: &Config, on_gpu: &OnGpu) -> bool {
    on_gpu.gathers && !config.launcher.check_collectives
}

/// Compares the programs of all stages between the ranks of `comm`, and then lets the collectives of `world` run ahead.
/// Collective.
///
/// # Errors
/// Fails on every rank if two ranks have different programs; names the first stage that differs.
pub(super) fn run_ahead(programs: &[Program], comm: &dyn Communicator, world: &dyn Communicator) -> Result<(), Error> {
    agree_on_programs(programs, comm)?;
    world.run_ahead();
    Ok(())
}

/// Compares the programs of all stages between the ranks. Collective.
///
/// # Errors
/// As [`run_ahead`].
pub(super) fn agree_on_programs(programs: &[Program], comm: &dyn Communicator) -> Result<(), Error> {
    let term = |(stage, program): (usize, &Program)| {
        let text: String = program.instructions.iter().map(|instruction| format!("{instruction}\n")).collect();
        (format!("the program of stage {stage}"), text)
    };
    Ok(agree(comm, &programs.iter().enumerate().map(term).collect::<Vec<_>>())?)
}
