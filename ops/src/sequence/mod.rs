//! Slices of sequences: several ranks share each sequence, and each of them computes the operations on a slice of its
//! positions.
//!
//! Most operations work on each position alone and need to know nothing of slices. Those that depend on the place of a
//! position (positions, rotary embedding, dropout) and those that mix positions (attention) look up the
//! [`SequenceGroup`] of their thread. Attention exchanges its slice of all heads for all positions of some heads, and
//! back (`exchange`): DeepSpeed-Ulysses (Jacobs et al., "DeepSpeed Ulysses: System optimizations for enabling training
//! of extreme long sequence transformer models", 2023). A head then sees the same numbers as on one rank, so the forward
//! has the same bits.

mod exchange;
mod heads;

use candle_core::{Result, Tensor, bail};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use zero_comm::{Buffer, CommError, Communicator};

pub(crate) use exchange::{to_heads, to_positions};
pub(crate) use heads::HeadShares;

/// The ranks that share sequences, as one of them sees it. Rank `index` of the group has positions `index·time` to
/// `(index + 1)·time` of each sequence, where `time` is the length of a slice.
#[derive(Clone)]
pub struct SequenceGroup {
    index: usize,
    size: usize,
    /// The layer that runs, if it may not exchange.
    silent: Option<Arc<str>>,
    /// `None` in a trace, which exchanges nothing.
    members: Option<Arc<Members>>,
}

struct Members {
    comm: Arc<dyn Communicator>,
    failure: OnceLock<CommError>,
}

thread_local! {
    static CURRENT: RefCell<Option<SequenceGroup>> = const { RefCell::new(None) };
}

impl SequenceGroup {
    /// Creates the group of the ranks of `comm`, whose order is that of the slices.
    #[must_use]
    pub fn new(comm: Arc<dyn Communicator>) -> Self {
        let (index, size) = (comm.rank(), comm.size());
        Self { index, size, silent: None, members: Some(Arc::new(Members { comm, failure: OnceLock::new() })) }
    }

    /// Creates a group of `size` ranks for counting memory ([`meta`](crate::meta)): a rank of it with no others.
    #[must_use]
    pub fn traced(index: usize, size: usize) -> Self {
        Self { index, size, silent: None, members: None }
    }

    /// Returns which slice of each sequence this rank has.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of ranks, which is the number of slices of each sequence.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns the same group for a layer that does not exchange, or did not say so: an exchange fails and names it.
    #[must_use]
    pub fn silent_in(&self, layer: &str) -> Self {
        Self { silent: Some(layer.into()), ..self.clone() }
    }

    /// Runs `run`, in which operations see slices of sequences.
    pub fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        struct Reset(Option<SequenceGroup>);
        impl Drop for Reset {
            fn drop(&mut self) {
                drop(CURRENT.replace(self.0.take()));
            }
        }
        let _reset = Reset(CURRENT.replace(Some(self.clone())));
        run()
    }

    /// Returns the group of the operations on this thread; `None` if sequences are whole.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(|current| current.clone().filter(|group| group.size > 1))
    }

    /// Returns the error of the first exchange that failed because a rank or a connection was lost. Operations can only
    /// return a text.
    #[must_use]
    pub fn failure(&self) -> Option<&CommError> {
        self.members.as_ref().and_then(|members| members.failure.get())
    }

    /// Returns the positions of this rank's slice of sequences of `time` positions.
    ///
    /// # Errors
    /// Fails if they cannot be cut into slices of the same length.
    pub fn positions(&self, time: usize) -> Result<Range<usize>> {
        if time == 0 || !time.is_multiple_of(self.size) {
            let size = self.size;
            bail!("sequences of {time} positions cannot be cut into {size} slices of the same length");
        }
        let slice = time / self.size;
        Ok(self.index * slice..(self.index + 1) * slice)
    }

    /// Returns this rank's slice of `[batch, time, …]`.
    ///
    /// # Errors
    /// As [`SequenceGroup::positions`].
    pub fn slice(&self, x: &Tensor) -> Result<Tensor> {
        let positions = self.positions(x.dim(1)?)?;
        x.narrow(1, positions.start, positions.len())?.contiguous()
    }

    /// Fails if the layer that runs may not exchange.
    fn may_exchange(&self) -> Result<()> {
        match &self.silent {
            None => Ok(()),
            Some(layer) => bail!(
                "layer `{layer}` has an attention, which exchanges slices with the ranks that share its sequences, and does \
                 not say so; implement `Layer::exchanges`, and let another layer be the last one"
            ),
        }
    }

    fn all_to_all(&self, input: Buffer, output: Buffer, counts: [&[usize]; 2]) -> Result<Buffer> {
        let Some(members) = &self.members else { bail!("a trace exchanges nothing") };
        match members.comm.all_to_all(input, output, counts[0], counts[1]).wait() {
            Ok(exchanged) => Ok(exchanged.output),
            Err(error) => {
                let message = error.to_string();
                let _ = members.failure.set(error);
                bail!("{message}")
            }
        }
    }
}

/// Returns this rank's slice of `[batch, time, …]` if ranks share sequences, otherwise `x` itself.
///
/// # Errors
/// As [`SequenceGroup::positions`].
pub fn own_slice(x: &Tensor) -> Result<Tensor> {
    SequenceGroup::current().map_or_else(|| Ok(x.clone()), |group| group.slice(x))
}

/// Returns the place in its sequence of the first of `time` positions that this rank has, and the length of the sequence.
pub(crate) fn place(time: usize) -> (usize, usize) {
    SequenceGroup::current().map_or((0, time), |group| (group.index * time, group.size * time))
}
