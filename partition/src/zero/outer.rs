//! Executes the outer steps of replicates that train independently, on the parameters of a rank.

use zero_pipeline::SegmentId;

use super::{Kind, Range, ShardedState};
use crate::error::ZeroError;
use crate::options::OuterOptions;
use crate::outer::{OuterState, share, store};

impl ShardedState {
    /// Starts averaging this rank's range of a segment's parameters over the replicates. If the working dtype has 16
    /// bits, the f32 copies are averaged.
    ///
    /// # Errors
    /// Fails if the rank has no replicates that train independently.
    pub fn outer_step(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let own = self.rank.own_range(id);
        let mut values = self.memory.take(own.len());
        for (parameter, elements, at) in self.rank.segment(id).overlaps(own) {
            self.read_into(Kind::Parameter, &Range { parameter, elements }, &mut values[at])?;
        }
        self.outer.start(&self.rank, &mut self.memory, id, values)
    }

    /// Waits for the average, runs the outer optimizer on this rank's share, gathers the result from all replicates and
    /// stores it.
    ///
    /// # Errors
    /// Returns the error of the collectives.
    pub fn await_outer_step(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let Self { rank, memory, parameters, optimizer, outer, .. } = self;
        let values = outer.finish(rank, memory, id)?;
        if !optimizer.master(id).is_empty() {
            optimizer.segment_mut(id).master.write(0, &values)?;
        }
        let own = rank.own_range(id);
        for (index, inside, at) in rank.segment(id).overlaps(own) {
            match parameters.shard_mut(id) {
                Some(shard) => store(&values[at.clone()], shard, at)?,
                None => {
                    let parameter = &rank.model.parameters()[index];
                    let mut full = parameter.take()?;
                    let stored = store(&values[at], &mut full, inside);
                    parameter.put(full)?;
                    stored?;
                }
            }
        }
        OuterState::give_back(memory, values);
        Ok(())
    }

    /// Returns the outer optimizer, with this rank's share of its state; `None` if no replicates train independently.
    #[must_use]
    pub fn outer(&self) -> Option<OuterOptions> {
        self.rank.options.outer
    }

    /// Returns the parts of this rank's ranges for which it holds the outer momentum.
    pub(super) fn momentum_ranges(&self) -> Vec<Range> {
        let has_momentum = self.rank.options.outer.is_some_and(|outer| outer.momentum > 0.0);
        let segments = 0..if has_momentum { self.rank.layout.segments().len() } else { 0 };
        let of_segment = |id: SegmentId| {
            let (own, share) = (self.rank.own_range(id), share(&self.rank, id).unwrap_or(0..0));
            let held = own.start + share.start..own.start + share.end;
            self.rank.segment(id).overlaps(held).map(|(parameter, elements, _)| Range { parameter, elements })
        };
        segments.flat_map(of_segment).collect()
    }
}
