//! The ranks of a run: pipeline stages × data-parallel ranks.

use crate::config::{Config, Launcher, Pipeline};
use crate::errors::ErrorKind;
use crate::node::At;
use crate::origin::Origin;
use crate::reader::{Find as _, Read as _, Resolver};
use crate::table::last;

/// Maximum number of ranks that is accepted.
const MAX_RANKS: usize = 1 << 20;

const RANKS: &str = Launcher::num_processes;
const STAGES: &str = Pipeline::stages;

/// Number of ranks; a multiple of the stages unless an error has been reported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct World {
    pub(crate) ranks: usize,
    stages: usize,
    /// Origin of the number of ranks.
    at: At,
}

impl World {
    /// Determines the number of ranks: `started`, else `launcher.num_processes`, else one rank per pipeline stage.
    pub(crate) fn read(resolver: &mut Resolver<'_>, started: Option<usize>) -> Self {
        let mut keys = resolver.top();
        let stages = Pipeline::read(&mut keys, Config::pipeline).stages;
        let written = usize::find(&mut keys.section(Config::launcher), last(RANKS));
        let at = started.map_or(resolver.at(RANKS), At::Launch);
        let ranks = started.or(written).unwrap_or(stages);
        if ranks == 0 || ranks > MAX_RANKS {
            let message = format!("{ranks} ranks: there are at least 1 and at most {MAX_RANKS}");
            resolver.report.error(ErrorKind::Value, RANKS, at, message, None);
        }
        if started.is_some() && started != written {
            resolver.origins.record(RANKS.to_string(), Origin::Launch);
        }
        let world = Self { ranks: ranks.clamp(1, MAX_RANKS), stages, at };
        world.divide(resolver);
        world
    }

    fn divide(self, resolver: &mut Resolver<'_>) {
        let Self { ranks, stages, at } = self;
        if !ranks.is_multiple_of(stages) {
            let message = format!("{ranks} ranks are not a multiple of {STAGES} {stages}");
            let next = ranks.next_multiple_of(stages);
            let help = format!("each pipeline takes {stages} ranks; the next multiple is {next}");
            resolver.report.contradiction(&[(STAGES, resolver.at(STAGES)), (RANKS, at)], message, Some(help));
        } else if !resolver.report.is_poisoned(STAGES) {
            return;
        }
        // Suppress errors that would only follow from this one, such as batch sizes that are not divisible.
        resolver.report.poison(RANKS.to_string());
    }

    /// Returns the number of ranks that train on different data.
    pub(crate) fn data_parallel(self) -> usize {
        (self.ranks / self.stages).max(1)
    }

    /// Returns how messages call the ranks counted by [`data_parallel`](Self::data_parallel): without a pipeline,
    /// all ranks.
    pub(crate) fn data_parallel_name(self) -> &'static str {
        if self.stages == 1 { "ranks" } else { "data-parallel ranks" }
    }

    /// Returns the keys that determine [`data_parallel`](Self::data_parallel), with their locations.
    pub(crate) fn places(self, resolver: &Resolver<'_>) -> Vec<(&'static str, At)> {
        let stages = (self.stages > 1).then(|| (STAGES, resolver.at(STAGES)));
        std::iter::once((RANKS, self.at)).chain(stages).collect()
    }
}
