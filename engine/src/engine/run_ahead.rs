//! Lets collectives between GPUs run ahead of the host, once the ranks have compared their programs.

use zero_comm::{Communicator, agree};
use zero_config::Config;
use zero_partition::OnGpu;
use zero_pipeline::Program;

use super::Engine;
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
}

impl Engine {
    /// Notes that a step has ended.
    pub(super) fn has_stepped(&mut self) {
        if self.ahead == Ahead::AfterAStep {
            self.ahead = Ahead::Next;
        }
    }

    /// Begins to run ahead after the first step. Compares the programs of the ranks first. Collective.
    pub(super) fn begin_to_run_ahead(&mut self) -> Result<(), Error> {
        if self.ahead != Ahead::Next {
            return Ok(());
        }
        agree_on_programs(&self.all_programs(), &*self.comm)?;
        self.zero.groups().world().run_ahead();
        self.ahead = Ahead::Now;
        Ok(())
    }

    /// Compares a value that determines a program between the ranks, if collectives run ahead. Collective.
    pub(super) fn agree_if_ahead(&self, what: &str, value: &dyn std::fmt::Debug) -> Result<(), Error> {
        match self.ahead {
            Ahead::Now => Ok(agree(&*self.comm, &[(what.to_string(), format!("{value:?}"))])?),
            _ => Ok(()),
        }
    }

    /// Waits for the GPU, and returns the error of a collective that ran ahead. Collective.
    pub(super) fn settle_if_ahead(&self) -> Result<(), Error> {
        if self.ahead == Ahead::Now {
            self.model().device().synchronize()?;
            self.comm.barrier().wait()?;
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
