//! Lets collectives between GPUs run ahead of the host, once the ranks have compared their programs.

use std::fmt::Debug;

use candle_core::Device;
use zero_comm::{Communicator, agree};
use zero_config::Config;
use zero_partition::OnGpu;
use zero_pipeline::Program;

use crate::error::Error;

/// Whether collectives between GPUs run ahead. Otherwise the ranks meet on the host before each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    /// They never do.
    Never,
    /// They will after a first step. It opens all connections, which takes calls that can wait for the whole GPU.
    AfterAStep,
    /// They will in the next step.
    Next,
    /// They do.
    Now,
}

impl Ahead {
    pub(super) fn new(config: &Config, on_gpu: &OnGpu) -> Self {
        if on_gpu.gathers && !config.launcher.check_collectives { Self::AfterAStep } else { Self::Never }
    }

    /// Notes that a step has ended.
    pub(super) fn after_step(&mut self) {
        if *self == Self::AfterAStep {
            *self = Self::Next;
        }
    }

    /// Lets the collectives of `world` run ahead after the first step. Compares the programs of the ranks of `comm`
    /// first. Collective.
    pub(super) fn before_step(
        &mut self,
        programs: impl FnOnce() -> Vec<Program>,
        comm: &dyn Communicator,
        world: &dyn Communicator,
    ) -> Result<(), Error> {
        if *self == Self::Next {
            agree_on_programs(&programs(), comm)?;
            world.run_ahead();
            *self = Self::Now;
        }
        Ok(())
    }

    /// Compares a value that determines a program between the ranks, if collectives run ahead. Collective.
    pub(super) fn agree(self, comm: &dyn Communicator, what: &str, value: &dyn Debug) -> Result<(), Error> {
        match self {
            Self::Now => Ok(agree(comm, &[(what.to_string(), format!("{value:?}"))])?),
            _ => Ok(()),
        }
    }

    /// Waits for the GPU, and returns the error of a collective that ran ahead. Collective.
    pub(super) fn settle(self, device: &Device, comm: &dyn Communicator) -> Result<(), Error> {
        if self == Self::Now {
            device.synchronize()?;
            comm.barrier().wait()?;
        }
        Ok(())
    }
}

fn agree_on_programs(programs: &[Program], comm: &dyn Communicator) -> Result<(), Error> {
    let term = |(stage, program): (usize, &Program)| {
        let text: String = program.instructions.iter().map(|instruction| format!("{instruction}\n")).collect();
        (format!("the program of stage {stage}"), text)
    };
    Ok(agree(comm, &programs.iter().enumerate().map(term).collect::<Vec<_>>())?)
}
