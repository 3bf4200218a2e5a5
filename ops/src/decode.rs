//! Decoding with a key-value cache: a model runs on only the next tokens of a sequence, and attention reads the keys
//! and values of all earlier tokens from the cache.
//!
//! Inside [`decode`] each attention of this crate appends its keys and values to a [`Cache`] and attends to everything
//! in it. [`Rotary`](crate::Rotary) and [`positions`] start at the number of tokens in the cache. Attentions are
//! identified by the order in which a model calls them, so a model built of these operations needs no code of its own
//! for decoding. The results are bit-identical to a pass over the whole sequence.

use crate::attention::cached::KeysAndValues;
use crate::flag::Replaced;
use crate::sequence::own_positions;
use candle_core::{Device, Result, Tensor, bail};
use std::cell::RefCell;

/// The keys and values of one sequence, in f32: 2 · `kv_heads` · `size` · 4 bytes per token and attention. Empty when
/// created.
#[derive(Debug, Default)]
pub struct Cache {
    tokens: usize,
    attentions: Vec<KeysAndValues>,
}

impl Cache {
    /// Returns the number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// The caches of the batch that is being decoded.
struct Decoding {
    caches: Vec<Cache>,
    /// Index of the next attention that the model calls.
    attention: usize,
    /// The number of new tokens of each sequence; 0 until the first operation sets it.
    new: usize,
}

thread_local! {
    static CURRENT: RefCell<Option<Decoding>> = const { RefCell::new(None) };
}

/// Runs a model on the next tokens of several sequences. The inputs are `[batch, time]`: row i continues the sequence
/// of the i-th cache. The sequences may have different lengths. Within `run`, attention also reads the cached tokens,
/// and positions count from the beginning of each sequence.
///
/// If `run` fails, the caches can no longer be used.
pub fn decode<T>(caches: &mut [&mut Cache], run: impl FnOnce() -> Result<T>) -> Result<T> {
    let mine = caches.iter_mut().map(|cache| std::mem::take(*cache)).collect();
    let (ended, result) = Replaced::during(&CURRENT, Some(Decoding { caches: mine, attention: 0, new: 0 }), run);
    if let Some(Decoding { caches: mine, new, .. }) = ended {
        for (cache, mut mine) in caches.iter_mut().zip(mine) {
            mine.tokens += new;
            **cache = mine;
        }
    }
    result
}

/// Returns whether this thread runs inside [`decode`].
pub(crate) fn is_decoding() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

/// Returns the positions of `[batch, time]` new tokens, or `None` outside of [`decode`], where each row begins at 0.
pub(crate) fn cached_positions(op: &'static str, batch: usize, time: usize) -> Result<Option<Vec<u32>>> {
    CURRENT.with_borrow_mut(|decoding| {
        let Some(decoding) = decoding else { return Ok(None) };
        decoding.fits(op, batch, time)?;
        let of_row = |cache: &Cache| cache.tokens as u32..(cache.tokens + time) as u32;
        Ok(Some(decoding.caches.iter().flat_map(of_row).collect()))
    })
}

/// Returns the positions of tokens in their sequences, as a u32 tensor `[batch, time]`. Positions count from 0 or,
/// inside [`decode`], from the number of tokens in each row's cache. If ranks share sequences, they are the positions
/// of this rank's slice.
///
/// # Errors
/// Fails inside [`decode`] if there are more or fewer caches than rows.
pub fn positions(batch: usize, time: usize, device: &Device) -> Result<Tensor> {
    match cached_positions("positions", batch, time)? {
        Some(positions) => Tensor::from_vec(positions, (batch, time), device),
        None => match own_positions(time)? {
            None => Tensor::arange(0, time as u32, device)?.broadcast_as((batch, time)),
            Some(positions) => Tensor::from_vec(positions, (1, time), device)?.broadcast_as((batch, time)),
        },
    }
}

/// Calls `run` with the cache entries of the next attention, one per row of the batch. Each entry comes with the number
/// of tokens that it holds before the new ones.
pub(crate) fn next_attention<T>(
    op: &'static str,
    (batch, time): (usize, usize),
    run: impl FnOnce(&mut [(usize, &mut KeysAndValues)]) -> Result<T>,
) -> Result<T> {
    CURRENT.with_borrow_mut(|decoding| {
        let Some(decoding) = decoding else { bail!("{op}: nothing is being decoded") };
        decoding.fits(op, batch, time)?;
        let index = decoding.attention;
        decoding.attention += 1;
        let mut entries = Vec::with_capacity(batch);
        for cache in &mut decoding.caches {
            if cache.attentions.len() == index {
                cache.attentions.push(KeysAndValues::default());
            }
            match cache.attentions.get_mut(index) {
                Some(entry) if entry.tokens() == cache.tokens => entries.push((cache.tokens, entry)),
                _ => bail!("{op}: the cache has {} tokens, but attention {index} has another number", cache.tokens),
            }
        }
        run(&mut entries)
    })
}

impl Decoding {
    fn fits(&mut self, op: &'static str, batch: usize, time: usize) -> Result<()> {
        if batch != self.caches.len() {
            bail!("{op}: a batch of {batch} rows needs as many caches, but there are {}", self.caches.len());
        }
        if self.new != 0 && self.new != time {
            bail!("{op}: {time} new tokens, but an earlier operation of this pass had {}", self.new);
        }
        self.new = time;
        Ok(())
    }
}
