//! Lets collectives between GPUs run ahead of the host, which enqueues them without waiting, once the ranks have
//! compared their programs.

use std::fmt::Debug;

use candle_core::Device;
use zero_comm::{Communicator, agree};
use zero_config::Config;
use zero_partition::OnGpu;
use zero_pipeline::Program;

use crate::error::Error;

/// Whether collectives between GPUs run ahead of the host. If they do not, the ranks meet on the host before each
/// collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    /// They never do.
    Never,
    /// They will after the first step. That step opens all connections, with calls that may wait for all work of the
    /// GPU.
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

    /// Lets the collectives of `world` run ahead from the second step on. Before that, compares the programs of the
    /// ranks of `comm`. Collective.
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

    /// If collectives run ahead, checks that a value that determines a program is equal on all ranks. Collective.
    pub(super) fn agree(self, comm: &dyn Communicator, what: &str, value: &dyn Debug) -> Result<(), Error> {
        match self {
            Self::Now => Ok(agree(comm, &[(what.to_string(), format!("{value:?}"))])?),
            _ => Ok(()),
        }
    }

    /// If collectives run ahead, waits for the GPU and returns the error of any such collective. Collective.
    pub(super) fn settle(self, device: &Device, comm: &dyn Communicator) -> Result<(), Error> {
        if self == Self::Now {
            device.synchronize()?;
            comm.barrier().wait()?;
        }
        Ok(())
    }
}

/// Checks that the programs are equal on all ranks. The error names the first instruction that differs.
fn agree_on_programs(programs: &[Program], comm: &dyn Communicator) -> Result<(), Error> {
    // `agree` compares all terms, but can name a difference only in the first 64 KiB. Each term takes at most 200
    // bytes.
    const AT_ONCE: usize = 256;
    for (stage, Program { instructions, .. }) in programs.iter().enumerate() {
        agree(comm, &[(format!("the number of instructions of stage {stage}"), instructions.len().to_string())])?;
        let indices: Vec<usize> = (0..instructions.len()).collect();
        for indices in indices.chunks(AT_ONCE) {
            let term =
                |&index: &usize| (format!("instruction {index} of stage {stage}"), instructions[index].to_string());
            agree(comm, &indices.iter().map(term).collect::<Vec<_>>())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use zero_comm::{Options, threads};
    use zero_pipeline::Instruction;

    use super::*;

    /// Returns the errors of three ranks, where the last rank has a different program for the second stage.
    fn errors(other: impl Fn(&mut Vec<Instruction>)) -> Vec<Option<String>> {
        let program = |first: usize| Program {
            instructions: (first..first + 300).map(|segment| Instruction::Gather { segments: vec![segment] }).collect(),
            micro_batches: 1,
        };
        std::thread::scope(|scope| {
            let ranks = threads(3, &Options::default()).into_iter().map(|comm| {
                let mut programs = [program(0), program(7)];
                if comm.rank() == 2 {
                    other(&mut programs[1].instructions);
                }
                scope.spawn(move || agree_on_programs(&programs, &*comm).err().map(|error| error.to_string()))
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        })
    }

    #[test]
    fn the_rank_and_the_instruction_that_differ_are_named() {
        assert_eq!(errors(|_| {}), [None, None, None]);
        let swapped = errors(|instructions| instructions.swap(270, 271));
        let expected = "the ranks were started with different settings: instruction 270 of stage 1 is gather segments [277] \
                        on rank 0 and gather segments [278] on rank 2";
        assert!(swapped.iter().all(|error| error.as_deref() == Some(expected)), "{swapped:?}");
        let shorter = errors(|instructions| instructions.truncate(299));
        let expected = "the ranks were started with different settings: the number of instructions of stage 1 is 300 on \
                        rank 0 and 299 on rank 2";
        assert!(shorter.iter().all(|error| error.as_deref() == Some(expected)), "{shorter:?}");
    }
}
