//! The values as written, each checked and with its location.

use crate::read::node::Node;
use crate::report::Report;
use crate::value::Fields;

/// A configuration as written.
///
/// It also holds the errors about single keys and values. [`resolve`](Self::resolve) reports them together with
/// contradictions between keys, so that a user sees all errors at once.
#[derive(Debug, Clone)]
pub struct Typed {
    pub(crate) report: Report,
    pub(crate) fields: Fields,
    /// The tree that the values were read from.
    pub(crate) root: Node,
    pub(crate) ignores_unknown_keys: bool,
    /// Number of ranks of each host; `None` if one host has all ranks.
    pub(crate) ranks_per_host: Option<usize>,
}

impl Typed {
    /// Sets the number of ranks of each host, from which `mesh.data_parallel_shard_degree: auto` follows. Without it,
    /// one host has all ranks.
    #[must_use]
    pub fn on_hosts(self, ranks_per_host: usize) -> Self {
        Self { ranks_per_host: Some(ranks_per_host), ..self }
    }

    /// Returns the unknown keys at the top of the files, each of which is an error. Returns none if there are more
    /// errors than are listed.
    pub fn unknown_keys(&self) -> Vec<&str> {
        self.report.unknown_at_the_top().flat_map(|error| &error.places).map(|place| place.path.as_str()).collect()
    }

    /// Returns the name of the file.
    pub fn name(&self) -> &str {
        &self.report.source().name
    }
}
