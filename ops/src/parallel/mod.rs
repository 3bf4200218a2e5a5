//! Splits rows over threads.
//!
//! Each thread gets one contiguous range of whole rows (or whole blocks of rows) and writes nothing else, so the
//! position of the cuts does not affect the results.

pub(crate) mod team;

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

static THREADS: AtomicUsize = AtomicUsize::new(1);

/// For fewer floats than this, a second thread costs more than it saves.
const SMALL: usize = 16 * 1024;

/// Sets how many threads one operation may use in this process. 0 counts as 1.
///
/// The default is 1, which suits ranks that are threads of one process. A process with one rank should pass the number
/// of cores that it may use. The results are bit-identical for any value.
pub fn set_threads(threads: usize) {
    THREADS.store(threads.max(1), Ordering::Relaxed);
}

/// Returns how many threads one operation may use (see [`set_threads`]).
pub fn threads() -> usize {
    THREADS.load(Ordering::Relaxed)
}

/// Runs `work` for each part on the operations' threads. Returns when all parts are done.
///
/// # Panics
/// Panics if `work` panics.
pub fn in_parallel<P: Send>(parts: &mut [P], work: impl Fn(&mut P) + Sync) {
    let parts: Vec<Mutex<&mut P>> = parts.iter_mut().map(Mutex::new).collect();
    team::run(parts.len(), &|part| {
        // Each part is processed once, so its lock is always free.
        if let Ok(mut part) = parts[part].lock() {
            work(&mut part);
        }
    });
}

/// With fewer elements than this, one thread finishes the conversion before another thread could begin.
const FEW: usize = 1 << 16;

/// Converts each value of `from` to the type of `to`, on the operations' threads, since a single core does not reach
/// the full memory bandwidth.
///
/// # Panics
/// Panics if the lengths differ.
pub fn convert<T: Sync, U: Send>(from: &[T], to: &mut [U], convert: impl Fn(&[T], &mut [U]) + Sync) {
    assert_eq!(from.len(), to.len());
    let share = to.len().div_ceil(threads()).max(FEW);
    let mut parts: Vec<_> = from.chunks(share).zip(to.chunks_mut(share)).collect();
    in_parallel(&mut parts, |(from, to)| convert(from, to));
}

/// Returns a new buffer of `units` times `floats` elements, which `work` fills. `work` receives a range of units and
/// their part of the buffer, zeroed.
///
/// Parts are small, so that each part is zeroed and then written while it is in the first-level cache. Zeroing the
/// whole buffer first would take another pass over memory.
pub(crate) fn build(units: usize, floats: usize, work: impl Fn(Range<usize>, &mut [f32]) + Sync) -> Vec<f32> {
    const CACHED: usize = 4096;
    let len = units * floats;
    let mut buffer = Vec::with_capacity(len);
    let spare: &mut [MaybeUninit<f32>] = &mut buffer.spare_capacity_mut()[..len];
    let at_once = (CACHED / floats.max(1)).max(1);
    split(units, floats, [Output { data: spare, floats }], |range, [mut rest]| {
        for start in range.clone().step_by(at_once) {
            let range = start..range.end.min(start + at_once);
            let (part, later) = rest.split_at_mut(range.len() * floats);
            rest = later;
            part.fill(MaybeUninit::new(0.0));
            // SAFETY: every element of the part was written above.
            work(range, unsafe { part.assume_init_mut() });
        }
    });
    // SAFETY: the ranges of `split` cover all units, and each unit's floats were written.
    unsafe { buffer.set_len(len) };
    buffer
}

/// A buffer that is split between threads, with `floats` elements for each unit of work. The last unit may be shorter.
pub(crate) struct Output<'a, T = f32> {
    pub(crate) data: &'a mut [T],
    pub(crate) floats: usize,
}

/// Returns how many threads [`split`] uses.
pub(crate) fn parts(units: usize, cost: usize) -> usize {
    if units.saturating_mul(cost) < SMALL { 1 } else { threads().min(units).max(1) }
}

/// Runs `work` over `0..units`, one contiguous range per thread, with each output's part for that range.
///
/// `cost` is the approximate number of floats that one unit reads or writes. Small amounts of work stay on the
/// calling thread.
pub(crate) fn split<T: Send, const N: usize>(
    units: usize,
    cost: usize,
    outputs: [Output<'_, T>; N],
    work: impl Fn(Range<usize>, [&mut [T]; N]) + Sync,
) {
    let parts = parts(units, cost);
    if parts <= 1 {
        return work(0..units, outputs.map(|o| o.data));
    }
    let mut rest = outputs;
    let cut = |part: usize| {
        let range = units * part / parts..units * (part + 1) / parts;
        let mine = rest.each_mut().map(|output| {
            let data = std::mem::take(&mut output.data);
            let (mine, later) = data.split_at_mut(data.len().min(output.floats * range.len()));
            output.data = later;
            mine
        });
        Some((range, mine))
    };
    let mut shares: Vec<_> = (0..parts).map(cut).collect();
    in_parallel(&mut shares, |share| {
        if let Some((range, mine)) = share.take() {
            work(range, mine);
        }
    });
}
