//! Checks that a segment's parameters are gathered when they are read, and that they may be released, updated and sent.

use super::{Fact, State};
use crate::effects::Computation;
use crate::ids::SegmentId;
use crate::shape::Placement;
use crate::validate::check::{Check, ensure};

impl State<'_> {
    pub(super) fn is_own(&self, segment: SegmentId) -> Check {
        ensure(self.world.stages.owner(segment) == self.stage, || "another stage owns the segment".into())?;
        ensure(self.is_trainable(segment), || "the segment is frozen".into())
    }

    pub(super) fn can_be_updated(&self, segment: SegmentId) -> Check {
        self.is_own(segment)?;
        ensure(self.has(Fact::Norm), || "the gradient norm must be computed first".into())?;
        ensure(self.has(Fact::Reduced(segment)), || "its gradients are not reduced".into())?;
        self.cannot_be_stale(segment)
    }

    pub(super) fn is_refreshed(&self, segment: SegmentId) -> bool {
        self.has(Fact::Refreshed(segment)) || !self.placements(segment).need_refresh()
    }

    /// Checks that all parameters read by a computation are gathered.
    pub(super) fn readable(&self, computation: Computation) -> Check {
        computation.reads(self.world.shape).into_iter().flatten().try_for_each(|&segment| {
            let state = self.parameters(segment);
            ensure(state == "gathered", || format!("it reads segment {segment}, which is still {state}"))
        })
    }

    fn parameters(&self, segment: SegmentId) -> &'static str {
        match self.placements(segment).parameters {
            Placement::Sharded if self.has(Fact::Gathering(segment)) => "being gathered",
            Placement::Sharded if !self.has(Fact::Gathered(segment)) => "released",
            Placement::Sharded | Placement::Replicated => "gathered",
        }
    }

    pub(super) fn is_gathered(&mut self, segment: SegmentId) -> Check {
        self.facts.remove(&Fact::Gathering(segment));
        self.makes(Fact::Gathered(segment), "gathered twice")
    }

    pub(super) fn parameters_are(&self, segment: SegmentId, state: &str) -> Check {
        let found = self.parameters(segment);
        let is_sharded = self.placements(segment).parameters == Placement::Sharded;
        ensure(is_sharded, || "its parameters are replicated".into())?;
        ensure(found == state, || format!("its parameters are {found}, not {state}"))
    }

    /// Checks that no parameters are gathered, because an update would make the gathered copy stale.
    pub(super) fn cannot_be_stale(&self, segment: SegmentId) -> Check {
        let is_sharded = self.placements(segment).parameters == Placement::Sharded;
        let is_gathered = is_sharded && self.parameters(segment) != "released";
        ensure(!is_gathered, || "its gathered parameters would become stale; they must be released first".into())
    }
}
