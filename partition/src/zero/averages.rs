//! Exchanges the weights with their averages, for evaluations.

use zero_pipeline::{Placement, SegmentId};

use super::ShardedState;
use super::shards::{Kind, Range};
use crate::accounting::ledger::Category;
use crate::disk::Stored;
use crate::error::{ZeroError, missing};

impl ShardedState {
    /// Exchanges the trainable parameters with their averages. A second call restores both bit for bit. Collective:
    /// every rank must call it. Changes nothing without averages.
    ///
    /// # Errors
    /// Fails if a rank is lost or the disk fails.
    pub fn exchange_averages(&mut self) -> Result<(), ZeroError> {
        if !self.rank.options.has_averages() {
            return Ok(());
        }
        let average = Kind::State(0);
        let ranges: Vec<Range> = self.held_ranges(average).into_iter().flat_map(Range::portions).collect();
        match self.rank.options.is_schedule_free() {
            true => self.exchange_sums(&ranges)?,
            false => {
                for range in &ranges {
                    let (weights, averages) = (self.read(Kind::Parameter, range)?, self.read(average, range)?);
                    self.write(average, range, &weights)?;
                    self.write(Kind::Parameter, range, &averages)?;
                }
            }
        }
        let (layout, stages) = (self.rank.layout.clone(), self.rank.stages.clone());
        for (id, segment) in layout.segments().iter().enumerate().filter(|(_, segment)| segment.is_trainable) {
            let placements = segment.placements;
            // First send the values to the ranks that hold the parameters but not their state, and then to other
            // pipeline stages.
            if placements.parameters == Placement::Replicated
                && placements.optimizer == Placement::Sharded
                && self.owns(id)
            {
                self.refresh(&[id])?;
                self.await_refresh(&[id])?;
            }
            if stages.borrowers(id).is_empty() {
                continue;
            }
            for piece in &segment.pieces {
                let values = self.full(Kind::Parameter, piece.parameter)?;
                self.write_parameter(piece.parameter, &values)?;
            }
        }
        Ok(())
    }

    /// Exchanges weights with the averages of a schedule-free optimizer, whose states are the averages minus the
    /// weights. A copy of the weights is kept, on the disk if the states are there, because computing the weights from
    /// averages and differences would not be bit-identical.
    fn exchange_sums(&mut self, ranges: &[Range]) -> Result<(), ZeroError> {
        let kept = std::mem::take(&mut self.weights);
        if !kept.is_empty() {
            for (range, weights) in ranges.iter().zip(kept) {
                if let Some(weights) = weights {
                    self.write(Kind::Parameter, range, &weights)?;
                    self.memory.uncount(Category::Staging, weights.len(), size_of::<f32>());
                    continue;
                }
                let mut weights = vec![0.0; range.elements.len()];
                let (id, start) = self.place_of(range)?;
                self.disk.read(&self.rank, id, Stored::Kept, start, &mut weights)?;
                self.write(Kind::Parameter, range, &weights)?;
            }
            return Ok(());
        }
        for range in ranges {
            let (weights, differences) = (self.read(Kind::Parameter, range)?, self.read(Kind::State(0), range)?);
            let averages: Vec<f32> = weights.iter().zip(differences).map(|(weight, more)| weight + more).collect();
            self.write(Kind::Parameter, range, &averages)?;
            let (id, start) = self.place_of(range)?;
            if self.disk.has(id, Stored::Kept) {
                self.disk.write(&self.rank, id, Stored::Kept, start, &weights)?;
                self.weights.push(None);
                continue;
            }
            self.memory.count(Category::Staging, weights.len(), size_of::<f32>());
            self.weights.push(Some(weights));
        }
        Ok(())
    }

    /// Returns the segment of a range, and the index at which the range begins in this rank's part of the segment.
    fn place_of(&self, range: &Range) -> Result<(SegmentId, usize), ZeroError> {
        let (id, at) = self.locate(range)?;
        Ok((id, at.start.checked_sub(self.rank.own_range(id).start).ok_or_else(missing)?))
    }
}
