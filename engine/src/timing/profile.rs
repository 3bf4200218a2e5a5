//! `flops_profiler`: multiply-accumulates and time of each layer, measured during a training step.

use std::time::Duration;

use zero_comm::{Communicator, from_each_rank};
use zero_model::ops::measure;
use zero_pipeline::Instruction;

use crate::error::Error;

/// Work of a layer's forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProfiledWork {
    /// Number of multiply-accumulates.
    pub macs: u64,
    /// Time in nanoseconds.
    pub nanoseconds: u64,
}

impl ProfiledWork {
    /// Returns the time in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.nanoseconds as f64 / 1e9
    }
}

impl std::ops::AddAssign for ProfiledWork {
    fn add_assign(&mut self, more: Self) {
        self.macs += more.macs;
        self.nanoseconds += more.nanoseconds;
    }
}

/// Work of one layer in a step, summed over the micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerWork {
    /// Forward passes, without recomputation.
    pub forward: ProfiledWork,
    /// Backward passes and recomputed forward passes. Includes the last layer's forward, which runs as part of its
    /// backward.
    pub backward: ProfiledWork,
}

/// Profile of one step on this rank, by layer.
#[derive(Debug)]
pub struct Profile {
    layers: Vec<LayerWork>,
    /// Time of the gradient norm and the optimizer.
    update: Duration,
    /// The thread's counter of multiply-accumulates after the last instruction.
    macs: u64,
}

impl Profile {
    pub(crate) fn begin(layers: usize) -> Self {
        Self { layers: vec![LayerWork::default(); layers], update: Duration::ZERO, macs: measure::macs() }
    }

    /// Adds the multiply-accumulates since the previous instruction to this instruction's layer. Must run on the thread
    /// that began the profile.
    pub(crate) fn note_macs(&mut self, instruction: &Instruction) {
        let macs = measure::macs();
        let counted = macs.wrapping_sub(std::mem::replace(&mut self.macs, macs));
        if let Some(work) = self.of(instruction) {
            work.macs += counted;
        }
    }

    /// Adds an instruction's time to its layer.
    pub(crate) fn note_time(&mut self, instruction: &Instruction, duration: Duration) {
        if let Some(work) = self.of(instruction) {
            work.nanoseconds += u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        }
        if let Instruction::GradientNorm
        | Instruction::Update { .. }
        | Instruction::MeasureTile { .. }
        | Instruction::UpdateTile { .. } = instruction
        {
            self.update += duration;
        }
    }

    fn of(&mut self, instruction: &Instruction) -> Option<&mut ProfiledWork> {
        match instruction {
            Instruction::Forward { layer, .. } => Some(&mut self.layers[*layer].forward),
            Instruction::Recompute { layer, .. }
            | Instruction::Backward { layer, .. }
            | Instruction::BackwardInput { layer, .. }
            | Instruction::BackwardWeight { layer, .. } => Some(&mut self.layers[*layer].backward),
            _ => None,
        }
    }

    /// Merges the profiles of all ranks, taking each layer from the first rank that ran it. Collective.
    pub fn together(self, comm: &dyn Communicator) -> Result<Found, Error> {
        let words = |layer: &LayerWork| [layer.forward, layer.backward].map(|work| [work.macs, work.nanoseconds]);
        let own = self.layers.iter().flat_map(|layer| words(layer).into_iter().flatten().map(|word| word as i64));
        let own: Vec<i64> = own.collect();
        let ranks: Vec<Vec<LayerWork>> =
            from_each_rank(comm, own)?.iter().map(|rank| rank.chunks(4).map(layer).collect()).collect();
        let first = |layer: usize| {
            let of_ranks = ranks.iter().map(|rank| rank[layer]);
            of_ranks.into_iter().find(|work| *work != LayerWork::default()).unwrap_or_default()
        };
        let layers = (0..self.layers.len()).map(first).collect();
        let own = if comm.rank() == 0 { self.layers } else { vec![] };
        Ok(Found { layers, own, update: self.update })
    }
}

fn layer(words: &[i64]) -> LayerWork {
    let work = |at: usize| ProfiledWork { macs: words[at] as u64, nanoseconds: words[at + 1] as u64 };
    LayerWork { forward: work(0), backward: work(2) }
}

/// The merged result of a profile.
#[derive(Debug)]
pub struct Found {
    /// Work of every layer of the model, each from the first rank that ran it.
    pub layers: Vec<LayerWork>,
    /// Work on rank 0 only; the entries of layers on other stages are zero. Empty on other ranks.
    pub own: Vec<LayerWork>,
    /// Time of the gradient norm and the optimizer on this rank.
    pub update: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_added_to_layers() {
        let mut profile = Profile::begin(2);
        let ms = Duration::from_millis;
        profile.note_time(&Instruction::Forward { layer: 0, micro_batch: 0 }, ms(1));
        profile.note_time(&Instruction::Forward { layer: 0, micro_batch: 1 }, ms(2));
        profile.note_time(&Instruction::Gather { segments: vec![0] }, ms(50));
        profile.note_time(&Instruction::Recompute { layer: 1, micro_batch: 0 }, ms(3));
        profile.note_time(&Instruction::Backward { layer: 1, micro_batch: 0 }, ms(4));
        profile.note_time(&Instruction::Update { segment: 0 }, ms(5));
        let of = |ms: u64| ProfiledWork { macs: 0, nanoseconds: ms * 1_000_000 };
        assert_eq!(
            profile.layers,
            [
                LayerWork { forward: of(3), backward: ProfiledWork::default() },
                LayerWork { forward: ProfiledWork::default(), backward: of(7) }
            ]
        );
        assert_eq!(profile.update, ms(5));
    }
}
