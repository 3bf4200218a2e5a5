//! Cuts a model into parts of consecutive layers.
//!
//! Each function returns one non-empty range of layers per part. The number of parts is the number of pipeline stages
//! times the chunks per stage. The weighted functions are exact dynamic programs over all cuts, not heuristics: they
//! minimize the heaviest part. Among the optimal cuts they choose the most even one (the least sum of squares). Among
//! equally even cuts they choose the one with the longest first parts, as `uniform` does with left-over layers. The
//! result is deterministic, so every rank computes the same cut.

use std::ops::Range;

use crate::ids::LayerId;
use crate::schedule::{Schedule, Size, Work};

/// Costs of a layer, measured or calculated.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerCost {
    /// Seconds of its forward per micro-batch.
    pub forward: f64,
    /// Seconds of its backward per micro-batch.
    pub backward: f64,
    /// Number of bytes of its parameters, gradients and optimizer state on one rank.
    pub state: u64,
    /// Number of bytes that its forward saves for its backward per micro-batch.
    pub activations: u64,
}

/// The reason why a model cannot be cut.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SplitError {
    /// There are fewer layers than parts.
    #[error("a model of {layers} layers cannot be split into {parts} parts with at least one layer each")]
    TooFewLayers {
        /// Number of layers of the model.
        layers: usize,
        /// Number of parts.
        parts: usize,
    },
    /// A time is negative, infinite or NaN.
    #[error("the time of layer {layer} is {seconds} seconds; it must be finite and not negative")]
    NotATime {
        /// The layer with the invalid time.
        layer: LayerId,
        /// The invalid time.
        seconds: f64,
    },
    /// Every cut has a part that exceeds the memory limit.
    #[error(
        "no split into {parts} parts keeps each part within {limit} bytes: in the best split, layers {} to {} need \
         {needed} bytes for {alive} micro-batches alive",
        layers.start, layers.end - 1
    )]
    DoesNotFit {
        /// Number of parts.
        parts: usize,
        /// Maximum bytes of a part.
        limit: u64,
        /// Number of bytes of the largest part, in the cut that minimizes this size.
        needed: u64,
        /// The layers of that part.
        layers: Range<LayerId>,
        /// Number of micro-batches alive in that part.
        alive: usize,
    },
}

/// Assigns the same number of layers to each part. If the division leaves a remainder, each of the first parts gets one
/// more layer, as in DeepSpeed's `partition_uniform`.
///
/// # Errors
/// Fails if there are fewer layers than parts.
pub fn uniform(layers: usize, parts: usize) -> Result<Vec<Range<LayerId>>, SplitError> {
    enough(layers, parts)?;
    let (each, left_over) = (layers / parts, layers % parts);
    let start = |part: usize| part * each + part.min(left_over);
    Ok((0..parts).map(|part| start(part)..start(part + 1)).collect())
}

/// Minimizes the heaviest part. With parameter counts as weights, this is DeepSpeed's method `parameters`. With weight
/// 1 for layers whose name matches and weight 0 for the others, it is DeepSpeed's `type:regex`. Sums up to 2⁵³ are
/// exact.
///
/// # Errors
/// Fails if there are fewer layers than parts.
pub fn balanced(weights: &[u64], parts: usize) -> Result<Vec<Range<LayerId>>, SplitError> {
    enough(weights.len(), parts)?;
    let sums = Sums::new(weights.iter().map(|&weight| weight as f64));
    Ok(most_even(weights.len(), parts, |_, layers| Some(sums.of(layers))).expect("there are enough layers"))
}

/// Minimizes the time of the slowest part, among the cuts whose parts need at most `limit` bytes. `alive` is the peak
/// number of micro-batches alive in each part, as the function [`alive`] returns it. A part holds the state of its
/// layers once, and the activations of its layers once per micro-batch alive.
///
/// If a stage has several chunks, each chunk is a part here, and the caller divides the stage's memory by their number.
/// This is stricter than the limit per stage, so the function may miss a cut that would fit.
///
/// # Errors
/// Fails if there are fewer layers than parts, a time is invalid, or no cut fits.
pub fn by_time(costs: &[LayerCost], alive: &[usize], limit: u64) -> Result<Vec<Range<LayerId>>, SplitError> {
    let (layers, parts) = (costs.len(), alive.len());
    enough(layers, parts)?;
    for (layer, cost) in costs.iter().enumerate() {
        if let Some(seconds) = [cost.forward, cost.backward].into_iter().find(|s| !s.is_finite() || *s < 0.0) {
            return Err(SplitError::NotATime { layer, seconds });
        }
    }
    let seconds = Sums::new(costs.iter().map(|cost| cost.forward + cost.backward));
    let state = RunningSum::new(costs.iter().map(|cost| cost.state));
    let activations = RunningSum::new(costs.iter().map(|cost| cost.activations));
    let bytes = |part: usize, layers: Range<LayerId>| {
        let of_a_micro_batch = activations.of(layers.clone());
        let all = of_a_micro_batch.saturating_mul(alive[part] as u128).saturating_add(state.of(layers));
        u64::try_from(all).unwrap_or(u64::MAX)
    };
    let fitting = |part, layers: Range<LayerId>| (bytes(part, layers.clone()) <= limit).then(|| seconds.of(layers));
    most_even(layers, parts, fitting).ok_or_else(|| {
        let smallest = best(layers, parts, |part, layers| Some(bytes(part, layers)), u64::max);
        let (_, cut) = smallest.expect("there are enough layers");
        let largest = cut.into_iter().enumerate().max_by_key(|(part, layers)| bytes(*part, layers.clone()));
        let (part, layers) = largest.expect("there are parts");
        SplitError::DoesNotFit { parts, limit, needed: bytes(part, layers.clone()), layers, alive: alive[part] }
    })
}

/// Returns, for each part in forward order, the peak number of micro-batches whose forward has run and whose backward
/// has not finished: `min(stages − stage, micro_batches)` with 1F1B.
#[must_use]
pub fn alive(schedule: Schedule, size: Size) -> Vec<usize> {
    let mut most = vec![0; size.stages * size.chunks];
    for stage in 0..size.stages {
        let mut now = vec![0usize; size.chunks];
        for slot in schedule.slots(size, stage) {
            match slot.work {
                Work::Forward => now[slot.chunk] += 1,
                Work::BackwardInput => {}
                Work::Backward | Work::BackwardWeight => now[slot.chunk] -= 1,
            }
            let part = &mut most[slot.chunk * size.stages + stage];
            *part = now[slot.chunk].max(*part);
        }
    }
    most
}

fn enough(layers: usize, parts: usize) -> Result<(), SplitError> {
    let is_enough = 0 < parts && parts <= layers;
    if is_enough { Ok(()) } else { Err(SplitError::TooFewLayers { layers, parts }) }
}

/// The sum of every range, added up from the first element of the range. Ranges with equal weights therefore have equal
/// sums. With differences of a floating-point prefix sum, they might differ.
struct Sums(Vec<Vec<f64>>);

impl Sums {
    fn new(weights: impl Iterator<Item = f64>) -> Self {
        let weights: Vec<f64> = weights.collect();
        let from = |start: usize| {
            let add = |sum: &mut f64, weight: &f64| {
                *sum += weight;
                Some(*sum)
            };
            weights[start..].iter().scan(0.0, add).collect()
        };
        Self((0..weights.len()).map(from).collect())
    }

    fn of(&self, layers: Range<LayerId>) -> f64 {
        self.0[layers.start][layers.len() - 1]
    }
}

/// Sums of ranges as differences of a prefix sum. For integers, these are exact.
struct RunningSum(Vec<u128>);

impl RunningSum {
    fn new(values: impl Iterator<Item = u64>) -> Self {
        let add = |sum: &mut u128, value: u64| {
            *sum += u128::from(value);
            Some(*sum)
        };
        Self(std::iter::once(0).chain(values.scan(0, add)).collect())
    }

    fn of(&self, layers: Range<LayerId>) -> u128 {
        self.0[layers.end] - self.0[layers.start]
    }
}

/// Returns the cut whose heaviest part is lightest, and among such cuts the one with the least sum of squares.
fn most_even(
    layers: usize,
    parts: usize,
    weight: impl Fn(usize, Range<LayerId>) -> Option<f64>,
) -> Option<Vec<Range<LayerId>>> {
    let (lightest, _) = best(layers, parts, &weight, f64::max)?;
    let square = |part, layers| weight(part, layers).filter(|&weight| weight <= lightest).map(|weight| weight * weight);
    best(layers, parts, square, |sum, square| sum + square).map(|(_, cut)| cut)
}

/// Returns the cut that minimizes `combine` over the weights of its parts, with the minimum. Among equal cuts, returns
/// the one with longer first parts. `weight` returns `None` for a part that is not allowed.
///
/// Dynamic programming over (part, its first layer), from the last part to the first. The optimal cut of the remaining
/// layers does not depend on the earlier parts, because `combine` is monotonic in both arguments.
fn best<W: Copy + PartialOrd>(
    layers: usize,
    parts: usize,
    weight: impl Fn(usize, Range<LayerId>) -> Option<W>,
    combine: impl Fn(W, W) -> W,
) -> Option<(W, Vec<Range<LayerId>>)> {
    // By part and its first layer: the combined value of this part and all later parts, and the end of this part.
    let mut table: Vec<Vec<Option<(W, usize)>>> = vec![vec![None; layers]; parts];
    for part in (0..parts).rev() {
        let behind = parts - 1 - part;
        for start in part..layers - behind {
            let value = |end: usize| {
                let own = weight(part, start..end)?;
                match behind {
                    0 => (end == layers).then_some((own, end)),
                    _ => table[part + 1][end].map(|(rest, _)| (combine(rest, own), end)),
                }
            };
            let values = (start + 1..=layers - behind).rev().filter_map(value);
            let least = values.reduce(|best, next| if next.0 < best.0 { next } else { best });
            table[part][start] = least;
        }
    }
    let (value, _) = table[0][0]?;
    let mut start = 0;
    let part = |part: usize| {
        let (_, end) = table[part][start].expect("the remaining parts have a cut");
        std::mem::replace(&mut start, end)..end
    };
    Some((value, (0..parts).map(part).collect()))
}
