//! The ranks of a run: pipeline stages × data-parallel ranks × ranks that share a sequence × tensor-parallel ranks. The
//! data-parallel ranks are divided into shard groups.

use crate::config::derived::common_divisor;
use crate::config::{Config, Launcher, Mesh, Pipeline, TensorParallel};
use crate::errors::ErrorKind;
use crate::origin::Origin;
use crate::path::last;
use crate::read::node::At;
use crate::read::reader::{Find as _, Read as _, Resolver};

/// Maximum number of ranks that is accepted.
const MAX_RANKS: usize = 1 << 20;

const RANKS: &str = Launcher::num_processes;
const STAGES: &str = Pipeline::stages;
const SLICES: &str = Config::sequence_parallel_size;
const CONTEXT: &str = Mesh::context_parallel_degree;
const TENSOR: &str = TensorParallel::autotp_size;
const REPLICATES: &str = Mesh::data_parallel_replicate_degree;
const SHARDS: &str = Mesh::data_parallel_shard_degree;

/// Number of ranks; a multiple of stages × ranks that share a sequence × tensor-parallel ranks, unless an error has
/// been reported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct World {
    pub(crate) ranks: usize,
    stages: usize,
    /// Number of ranks that share a sequence; the next field has the two keys that determine it.
    pub(crate) context: usize,
    sharing: [(&'static str, usize); 2],
    /// Number of tensor-parallel ranks.
    tensor: usize,
    /// Number of shard groups per stage; divides the data-parallel ranks unless an error has been reported.
    pub(crate) replicates: usize,
    /// Number of ranks of a shard group, if `mesh.data_parallel_shard_degree` is `auto`.
    pub(crate) shards: Option<usize>,
    /// Origin of the number of ranks.
    at: At,
}

impl World {
    /// Determines the number of ranks: `started` if given, else `launcher.num_processes`, else the minimum that the
    /// other keys allow.
    pub(crate) fn read(resolver: &mut Resolver<'_>, started: Option<usize>) -> Self {
        let mut keys = resolver.top();
        let stages = Pipeline::read(&mut keys, Config::pipeline).stages;
        let slices = usize::find(&mut keys, SLICES).unwrap_or(1);
        let tensor = usize::find(&mut keys.section(Config::tensor_parallel), last(TENSOR)).unwrap_or(1).max(1);
        let written = usize::find(&mut keys.section(Config::launcher), last(RANKS));
        let mut mesh = keys.section(Config::mesh);
        let degree = usize::find(&mut mesh, last(CONTEXT)).unwrap_or(1);
        let (context, sharing) = (slices.saturating_mul(degree), [(SLICES, slices), (CONTEXT, degree)]);
        let mut degrees = [REPLICATES, SHARDS].map(|path| usize::find(&mut mesh, last(path)));
        let is_auto = [REPLICATES, SHARDS].map(|path| resolver.fields.is_auto(path));
        let at = started.map_or(resolver.at(RANKS), At::Launch);
        let ranks = started.or(written).unwrap_or(stages.saturating_mul(context).saturating_mul(tensor));
        if ranks == 0 || ranks > MAX_RANKS {
            let message = format!("{ranks} ranks: the number must be from 1 to {MAX_RANKS}");
            resolver.report.error(ErrorKind::Value, RANKS, at, message, None);
        }
        if started.is_some() && started != written {
            resolver.origins.record(RANKS.to_string(), Origin::Launch);
        }
        let ranks = ranks.clamp(1, MAX_RANKS);
        let world = Self { ranks, stages, context, sharing, tensor, replicates: 1, shards: None, at };
        world.divide(resolver);
        if is_auto.contains(&true) && degrees == [None, None] {
            degrees[1] = Some(world.in_a_host(resolver.typed.ranks_per_host));
        }
        let replicates = world.replicates(resolver, degrees);
        let shards = is_auto[1].then(|| world.data_parallel() / replicates);
        Self { replicates, shards, ..world }
    }

    fn divide(self, resolver: &mut Resolver<'_>) {
        let Self { ranks, stages, at, .. } = self;
        let each = self.each();
        let next = ranks.checked_next_multiple_of(each).unwrap_or(each);
        if !ranks.is_multiple_of(stages) {
            let message = format!("{} not a multiple of {STAGES} {stages}", ranks_are(ranks));
            let help = format!("each pipeline needs {stages} ranks; the next multiple is {next}");
            resolver.report.contradiction(&[(STAGES, resolver.at(STAGES)), (RANKS, at)], message, Some(help));
        } else if !ranks.is_multiple_of(each) {
            let [heads, queries] = self.sharing;
            let degrees = [(STAGES, stages), heads, queries, (TENSOR, self.tensor)];
            let degrees: Vec<_> = degrees.into_iter().filter(|(_, degree)| *degree > 1).collect();
            let joined = |texts: Vec<String>| texts.join(" × ");
            let keys = joined(degrees.iter().map(|(key, _)| (*key).to_string()).collect());
            let of = match &*degrees {
                [_] => format!("{keys} {each}"),
                _ => {
                    let numbers = joined(degrees.iter().map(|(_, degree)| degree.to_string()).collect());
                    format!("{keys} = {numbers} = {each}")
                }
            };
            let own: Vec<_> = degrees.iter().rev().map(|(key, _)| (*key, resolver.at(key))).collect();
            let places: Vec<_> = own.into_iter().chain([(RANKS, at)]).collect();
            let help = match (self.context, self.tensor) {
                (context, 1) => format!("{context} ranks share each sequence; the next multiple is {next}"),
                (1, tensor) => format!("{tensor} ranks split each layer; the next multiple is {next}"),
                _ => format!("the next multiple is {next}"),
            };
            resolver.report.contradiction(&places, format!("{} not a multiple of {of}", ranks_are(ranks)), Some(help));
        } else if ![STAGES, SLICES, CONTEXT, TENSOR].iter().any(|path| resolver.report.is_poisoned(path)) {
            return;
        }
        // Suppress errors that would only follow from this one, such as batch sizes that are not divisible.
        resolver.report.poison(RANKS.to_string());
    }

    /// Returns the product of all axes except the data-parallel axis.
    fn each(self) -> usize {
        self.stages.saturating_mul(self.context).saturating_mul(self.tensor)
    }

    /// Returns the largest shard group of consecutive ranks that divides a stage evenly and keeps each group on one
    /// host.
    fn in_a_host(self, ranks_per_host: Option<usize>) -> usize {
        let data = self.data_parallel();
        common_divisor(data, ranks_per_host.map_or(data, |ranks| (ranks / self.context / self.tensor).max(1)))
    }

    /// Returns the number of shard groups of a stage, given the degrees in the file.
    fn replicates(self, resolver: &mut Resolver<'_>, degrees: [Option<usize>; 2]) -> usize {
        let (data, name) = (self.data_parallel(), self.data_parallel_name());
        let (product, replicates, written) = match degrees {
            [None, None] => return 1,
            [Some(replicates), None] => (replicates, replicates, &[REPLICATES][..]),
            [None, Some(shards)] => (shards, data / shards, &[SHARDS][..]),
            [Some(replicates), Some(shards)] => {
                (replicates.saturating_mul(shards), replicates, &[REPLICATES, SHARDS][..])
            }
        };
        let fits = if written.len() == 2 { data == product } else { data.is_multiple_of(product) };
        if fits {
            return replicates;
        }
        let (relation, help) = match written {
            [_] => {
                let next = data.next_multiple_of(product).saturating_mul(self.each());
                let help = format!("the next number of ranks that fits is {next}");
                (format!("a multiple of {} {product}", written[0]), help)
            }
            _ => {
                let help = "remove one of the two: it is computed from the other".to_string();
                (format!("{REPLICATES} × {SHARDS} = {product}"), help)
            }
        };
        let own: Vec<_> = written.iter().map(|path| (*path, resolver.at(path))).collect();
        let places: Vec<_> = own.into_iter().chain(self.places(resolver)).collect();
        resolver.report.contradiction(&places, format!("{data} {name} are not {relation}"), Some(help));
        1
    }

    /// Returns the data-parallel degree: how many ranks of a stage train on different samples. Ranks that share a
    /// sequence count as one rank, and so do the ranks of a tensor group.
    pub(crate) fn data_parallel(self) -> usize {
        (self.ranks / self.each()).max(1)
    }

    /// Returns what messages call the ranks that [`data_parallel`](Self::data_parallel) counts: "ranks" if these are
    /// all ranks.
    pub(crate) fn data_parallel_name(self) -> &'static str {
        if self.each() == 1 { "ranks" } else { "data-parallel ranks" }
    }

    /// Returns the keys that determine [`data_parallel`](Self::data_parallel), with their locations.
    pub(crate) fn places(self, resolver: &Resolver<'_>) -> Vec<(&'static str, At)> {
        let stages = (self.stages > 1).then(|| (STAGES, resolver.at(STAGES)));
        let sharing = self.sharing.into_iter().filter(|(_, size)| *size > 1);
        let context = sharing.map(|(key, _)| (key, resolver.at(key)));
        let tensor = (self.tensor > 1).then(|| (TENSOR, resolver.at(TENSOR)));
        std::iter::once((RANKS, self.at)).chain(stages).chain(context).chain(tensor).collect()
    }
}

/// Returns the beginning of a sentence about a number of ranks.
fn ranks_are(ranks: usize) -> String {
    if ranks == 1 { "1 rank is".into() } else { format!("{ranks} ranks are") }
}
