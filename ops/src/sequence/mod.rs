//! Slices of sequences: several ranks share each sequence, and each rank runs the operations on a slice of its
//! positions.
//!
//! Most operations work on each position alone and need not know about slices. Two kinds look up the [`SequenceGroup`]
//! of their thread: operations that depend on where in the sequence a position is (positions, rotary embedding,
//! dropout), and attention, which mixes positions. Attention gets the other positions in one of two ways ([`Sharing`]):
//!
//! - It exchanges its slice of all heads for all positions of some heads, and back again (`exchange`):
//!   DeepSpeed-Ulysses (Jacobs et al., "DeepSpeed Ulysses: System optimizations for enabling training of extreme long
//!   sequence transformer models", 2023).
//! - It computes all heads for its own queries, with the keys and values of all positions. It gathers them first
//!   (`ops/src/attention/gathered.rs`): the context parallelism of Llama 3 (Grattafiori et al., "The Llama 3 herd of
//!   models", 2024, section 3.3.2). Or the ranks pass their keys and values from rank to rank
//!   (`ops/src/attention/ring.rs`): ring attention (Liu et al., "Ring attention with blockwise transformers for
//!   near-infinite context", 2023).
//!
//! After an exchange of heads, or with gathered keys and values, a query sees the same numbers as on one rank, so on
//! the CPU the forward is bit-identical to the forward of a single rank. The two ways can be combined: groups of ranks
//! then share keys and values, and the ranks inside a group split the group's slice and exchange heads.
//!
//! The ranks of a tensor group ([`Sharing::Layers`], `ops/src/tensor/`) work on slices only outside of attentions and
//! feed-forward networks, which gather whole sequences.

mod element;
mod exchange;
#[cfg(feature = "cuda")]
mod gpu;
mod heads;
mod total;

use crate::flag::Replaced;
use crate::meta::{self, tracing};
use crate::tensor::Along;
use candle_core::{Result, Tensor, bail};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use zero_comm::{Buffer, CommError, Communicator, Exchanged, Gathered, Pending, ReduceOp, Scattered};

#[cfg(feature = "cuda")]
pub(crate) use self::gpu::Arriving;
pub(crate) use element::{Element, dense, of_element, transposed};
pub(crate) use exchange::{to_heads, to_positions};
pub(crate) use heads::HeadShares;
pub use total::sum_of_slices;

/// How attention gets the positions that a slice lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Each rank computes some heads over all positions. Rank i of n has the i-th of n slices.
    Heads,
    /// Each rank computes all heads for its own queries. A sequence is split into 2n chunks. Rank i of n has the i-th
    /// chunk from the beginning and the i-th from the end, so that the queries of all ranks see equally many positions.
    Queries,
    /// Like [`Sharing::Queries`], but the ranks pass keys and values from rank to rank instead of gathering them: ring
    /// attention. No rank holds the keys and values of all positions.
    Ring,
    /// Attentions and feed-forward networks gather all positions, and each rank computes a part of their heads and
    /// columns: tensor parallelism. Elsewhere, rank i of n has the i-th of n slices.
    Layers,
}

/// The ranks that share sequences, from the view of one of them.
#[derive(Clone)]
pub struct SequenceGroup {
    sharing: Sharing,
    index: usize,
    size: usize,
    /// Whether other operations run during the exchanges of a backward.
    overlaps: bool,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only exchanges of values in GPU memory read it"))]
    by_gpu: ByGpu,
    /// The name of the running layer, if it may not exchange.
    silent: Option<Arc<str>>,
    /// `None` in a trace, which exchanges nothing.
    members: Option<Arc<Members>>,
    /// The outer group, whose slices the ranks of this group split again.
    outer: Option<Arc<SequenceGroup>>,
}

/// Which values the communicator exchanges directly between GPUs. Other values go through the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByGpu {
    /// Values that are only moved.
    pub moves: bool,
    /// Values that are summed; NCCL chooses the order.
    pub sums: bool,
}

struct Members {
    comm: Arc<dyn Communicator>,
    failure: OnceLock<CommError>,
}

thread_local! {
    static CURRENT: RefCell<Option<SequenceGroup>> = const { RefCell::new(None) };
    static GATHERED: RefCell<Option<(SequenceGroup, Along)>> = const { RefCell::new(None) };
}

impl SequenceGroup {
    /// Creates the group of the ranks of `comm`. Their order is the order of the slices.
    #[must_use]
    pub fn new(comm: Arc<dyn Communicator>, sharing: Sharing) -> Self {
        let (index, size) = (comm.rank(), comm.size());
        let members = Some(Arc::new(Members { comm, failure: OnceLock::new() }));
        Self { members, ..Self::traced(index, size, sharing) }
    }

    /// Creates a group of `size` ranks for counting memory ([`meta`](crate::meta)). It has no connection to other
    /// ranks.
    #[must_use]
    pub fn traced(index: usize, size: usize, sharing: Sharing) -> Self {
        Self {
            sharing,
            index,
            size,
            overlaps: false,
            by_gpu: ByGpu::default(),
            silent: None,
            members: None,
            outer: None,
        }
    }

    /// Returns this group inside `outer`: its ranks split each slice of `outer` among them. This group must be a tensor
    /// group or share heads, and its ranks must all have the same index in their outer groups.
    #[must_use]
    pub fn inside(self, outer: Option<Self>) -> Self {
        Self { outer: outer.map(Arc::new), ..self }
    }

    /// Sets whether a backward computes gradients of weights during the exchanges of a tensor group.
    #[must_use]
    pub fn overlapping(self, overlaps: bool) -> Self {
        Self { overlaps, ..self }
    }

    /// Sets which values the communicator exchanges in GPU memory. By default all values go through the host.
    #[must_use]
    pub fn by_gpu(self, by_gpu: ByGpu) -> Self {
        Self { by_gpu, ..self }
    }

    /// Returns whether a backward computes gradients of weights during exchanges.
    pub(crate) fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// Returns the outer group, whose slices the ranks of this group split, if it has more than one rank.
    pub(crate) fn outer(&self) -> Option<&Self> {
        self.outer.as_deref().filter(|outer| outer.size > 1)
    }

    /// Returns the group whose ranks share the sequences of a batch: this group or, for a tensor group, the outer one.
    /// A tensor group without an outer group gets whole batches.
    #[must_use]
    pub fn of_batch(&self) -> Option<&Self> {
        match self.sharing {
            Sharing::Layers => self.outer.as_deref(),
            Sharing::Heads | Sharing::Queries | Sharing::Ring => Some(self),
        }
    }

    /// Returns the group for a forward on whole sequences: a tensor group without its outer group, or `None` for other
    /// groups.
    #[must_use]
    pub fn of_whole_batch(&self) -> Option<Self> {
        (self.sharing == Sharing::Layers).then(|| Self { outer: None, ..self.clone() })
    }

    /// Returns how attention gets the positions that a slice lacks.
    #[must_use]
    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Returns which slice of each sequence this rank has.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the number of slices of each sequence.
    #[must_use]
    pub fn slices(&self) -> usize {
        self.size * self.outer.as_ref().map_or(1, |outer| outer.slices())
    }

    /// Returns the group for a layer, given whether it declares exchanges with the ranks that share its sequences and
    /// with those of the tensor group. Other exchanges fail with an error that names the layer.
    #[must_use]
    pub fn declared_by(&self, layer: &str, of_sequences: bool, of_layers: bool) -> Self {
        let is_declared = if self.sharing == Sharing::Layers { of_layers } else { of_sequences };
        let silent = (!is_declared).then(|| layer.into());
        let outer = self.outer.as_ref().map(|outer| outer.declared_by(layer, of_sequences, of_layers));
        Self { silent, ..self.clone() }.inside(outer)
    }

    /// Calls `run`, inside which operations work on slices of sequences.
    pub fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        let _current = Replaced::with(&CURRENT, Some(self.clone()));
        run()
    }

    /// Calls `run`, inside which operations work on gathered values: whole sequences or, with an outer group, the outer
    /// group's slices.
    pub(crate) fn gathered<T>(&self, along: Along, run: impl FnOnce() -> T) -> T {
        let _current = Replaced::with(&CURRENT, self.outer.as_deref().cloned());
        let _gathered = Replaced::with(&GATHERED, Some((self.clone(), along)));
        run()
    }

    /// Returns the tensor group whose slices the operations on this thread work on.
    pub(crate) fn of_layers() -> Option<Self> {
        Self::current().filter(|group| group.sharing == Sharing::Layers)
    }

    /// Returns the tensor group that gathered the sequences of this thread's operations, and the dimension along which
    /// it joined the slices.
    pub(crate) fn of_gathered() -> Option<(Self, Along)> {
        GATHERED.with_borrow(Clone::clone)
    }

    /// Returns the group of the operations on this thread, or `None` if sequences are whole.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(|current| current.clone().filter(|group| group.size > 1))
    }

    /// Returns the error of the first exchange that failed because a rank or a connection was lost. Operations
    /// themselves can only return the error as a text.
    #[must_use]
    pub fn failure(&self) -> Option<&CommError> {
        let own = self.members.as_ref().and_then(|members| members.failure.get());
        own.or_else(|| self.outer.as_ref()?.failure())
    }

    /// Returns the positions in this rank's slice of a sequence with `time` positions: one range, or two of the same
    /// length.
    ///
    /// # Errors
    /// Fails if the positions cannot be split into slices of the same length.
    pub fn positions(&self, time: usize) -> Result<Vec<Range<usize>>> {
        let Some(outer) = &self.outer else { return self.positions_of(self.index, time) };
        let parts = outer.positions(time)?;
        let [own] = &*self.positions_of(self.index, parts.iter().map(Range::len).sum())? else {
            bail!("slices of slices are not split into chunks from both ends");
        };
        let mut first = 0;
        let within = parts.into_iter().map(|part| {
            let at = |position: usize| part.start + position.clamp(first, first + part.len()) - first;
            let range = at(own.start)..at(own.end);
            first += part.len();
            range
        });
        Ok(within.filter(|range| !range.is_empty()).collect())
    }

    /// Returns the same group from the view of rank `index`.
    pub(crate) fn at(&self, index: usize) -> Self {
        Self { index, ..self.clone() }
    }

    /// Returns the positions of the slice of a rank.
    pub(crate) fn positions_of(&self, rank: usize, time: usize) -> Result<Vec<Range<usize>>> {
        let size = self.size;
        let (chunks, parts) = match self.sharing {
            Sharing::Heads | Sharing::Layers => (size, format!("{size} slices")),
            Sharing::Queries | Sharing::Ring => (2 * size, format!("2 × {size} chunks")),
        };
        if time == 0 || !time.is_multiple_of(chunks) {
            bail!("sequences of {time} positions cannot be split into {parts} of the same length");
        }
        let chunk = |chunk: usize| chunk * (time / chunks)..(chunk + 1) * (time / chunks);
        Ok(match self.sharing {
            Sharing::Heads | Sharing::Layers => vec![chunk(rank)],
            Sharing::Queries | Sharing::Ring => vec![chunk(rank), chunk(chunks - 1 - rank)],
        })
    }

    /// Returns this rank's slice of `[batch, time, …]`.
    ///
    /// # Errors
    /// Fails in the same cases as [`SequenceGroup::positions`].
    pub fn slice(&self, x: &Tensor) -> Result<Tensor> {
        let parts = self.positions(x.dim(1)?)?;
        if tracing() {
            // candle cannot copy the values of a traced tensor.
            let mut dims = x.dims().to_vec();
            dims[1] = parts.iter().map(Range::len).sum();
            return meta::tensor(&dims.into(), x.dtype());
        }
        let parts = parts.into_iter().map(|part| x.narrow(1, part.start, part.len()));
        let parts: Vec<Tensor> = parts.collect::<Result<_>>()?;
        if let [whole] = &*parts { whole.contiguous() } else { Tensor::cat(&parts, 1) }
    }

    /// Fails if the running layer may not exchange.
    pub(crate) fn may_exchange(&self) -> Result<()> {
        match &self.silent {
            None => Ok(()),
            Some(layer) => bail!(
                "an operation in layer `{layer}` exchanges values with {}, but the layer does not declare this; implement \
                 `Layer::exchanges`",
                if self.sharing == Sharing::Layers { "its tensor group" } else { "the ranks that share its sequences" }
            ),
        }
    }

    fn all_to_all(&self, input: Buffer, output: Buffer, counts: [&[usize]; 2]) -> Result<Buffer> {
        Ok(self.start(|comm| comm.all_to_all(input, output, counts[0], counts[1]))?.wait()?.output)
    }

    /// Starts to concatenate the slices of all ranks, which have the same length.
    pub(crate) fn all_gather<T: Element>(&self, slice: Vec<T>) -> Result<Exchanging<Gathered>> {
        let (counts, room) = (vec![slice.len(); self.size], vec![T::zero(); slice.len() * self.size]);
        self.start(|comm| comm.all_gather(T::buffer(slice), T::buffer(room), &counts))
    }

    /// Concatenates the slices of all ranks, which have the same length.
    pub(crate) fn concatenated<T: Element>(&self, slice: Vec<T>) -> Result<Vec<T>> {
        T::values(self.all_gather(slice)?.wait()?.output)
    }

    /// Starts to send values to the next rank, and to receive the same number of values from the previous rank.
    pub(crate) fn pass_on<T: Element>(&self, values: Vec<T>) -> Result<Exchanging<Exchanged>> {
        let count = values.len();
        self.start_to_pass_on(T::buffer(values), T::buffer(vec![T::zero(); count]), count)
    }

    fn start_to_pass_on(&self, values: Buffer, room: Buffer, count: usize) -> Result<Exchanging<Exchanged>> {
        let for_rank = |rank: usize| {
            let mut counts = vec![0; self.size];
            counts[rank % self.size] = count;
            counts
        };
        let (next, previous) = (for_rank(self.index + 1), for_rank(self.index + self.size - 1));
        self.start(|comm| comm.all_to_all(values, room, &next, &previous))
    }

    /// Starts to sum the inputs of all ranks. The result is this rank's part of the sum. The parts have the same
    /// length.
    pub(crate) fn reduce_scatter<T: Element>(&self, input: Vec<T>) -> Result<Exchanging<Scattered>> {
        let part = input.len() / self.size;
        let (counts, room) = (vec![part; self.size], vec![T::zero(); part]);
        self.start(|comm| comm.reduce_scatter(T::buffer(input), T::buffer(room), &counts, ReduceOp::Sum))
    }

    fn start<T>(&self, collective: impl FnOnce(&dyn Communicator) -> Pending<T>) -> Result<Exchanging<T>> {
        let Some(members) = &self.members else { bail!("a trace exchanges nothing") };
        Ok(Exchanging { pending: collective(&*members.comm), members: Arc::clone(members) })
    }
}

/// A collective in flight.
pub(crate) struct Exchanging<T> {
    pending: Pending<T>,
    members: Arc<Members>,
}

impl<T> Exchanging<T> {
    /// Returns the result. The group keeps the error.
    pub(crate) fn wait(self) -> Result<T> {
        self.pending.wait().or_else(|error| {
            let message = error.to_string();
            let _ = self.members.failure.set(error);
            bail!("{message}")
        })
    }
}

/// Returns this rank's slice of `[batch, time, …]` if ranks share sequences, otherwise `x` itself.
///
/// # Errors
/// Fails in the same cases as [`SequenceGroup::positions`].
pub fn own_slice(x: &Tensor) -> Result<Tensor> {
    SequenceGroup::current().map_or_else(|| Ok(x.clone()), |group| group.slice(x))
}

/// Returns the length of whole sequences, given the `time` positions of this rank's slice.
#[must_use]
pub fn whole_length(time: usize) -> usize {
    SequenceGroup::current().map_or(time, |group| group.slices() * time)
}

/// Returns where the `time` positions of this rank's slice are in their sequences, or `None` if sequences are whole.
///
/// # Errors
/// Fails in the same cases as [`SequenceGroup::positions`].
pub(crate) fn own_positions(time: usize) -> Result<Option<Vec<u32>>> {
    let Some(group) = SequenceGroup::current() else { return Ok(None) };
    let parts = group.positions(group.slices() * time)?;
    Ok(Some(parts.into_iter().flatten().map(|position| position as u32).collect()))
}
