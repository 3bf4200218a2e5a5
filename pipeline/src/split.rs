//! Where a model is cut into parts: which consecutive layers go together.
//!
//! Each function gives as many ranges of layers as there are parts (pipeline stages times chunks), none of them empty. The
//! weighted ones are dynamic programs over all cuts, not heuristics: the heaviest part is as light as it can be. Of the cuts
//! that are equally good in that, the most even one is taken (the least sum of squares), and of those that are equally even the
//! one whose first parts are the longest, as the even cut has the layers that are left over in front. So every rank finds the
//! same cut by itself.

use std::ops::Range;

use crate::instruction::LayerId;
use crate::schedule::{Schedule, Size, Work};

/// What a layer costs, measured or calculated.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerCost {
    /// Seconds of its forward, for a micro-batch.
    pub forward: f64,
    /// Seconds of its backward, for a micro-batch.
    pub backward: f64,
    /// Bytes of its parameters, their gradients and their optimizer state on a rank.
    pub state: u64,
    /// Bytes that its forward keeps for its backward, for a micro-batch.
    pub activations: u64,
}

/// A model that cannot be cut.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SplitError {
    /// Some part would have no layer.
    #[error("a model of {layers} layers cannot be cut into {parts} parts with at least one layer each")]
    TooFewLayers {
        /// Number of layers of the model.
        layers: usize,
        /// Number of parts.
        parts: usize,
    },
    /// A time that is none.
    #[error("layer {layer} takes {seconds} seconds: not a time")]
    NotATime {
        /// Whose.
        layer: LayerId,
        /// What was given.
        seconds: f64,
    },
    /// Wherever the model is cut, some part is too large.
    #[error(
        "no cut into {parts} parts fits {limit} bytes: at best layers {} to {} need {needed}, for {alive} micro-batches alive",
        layers.start, layers.end - 1
    )]
    DoesNotFit {
        /// Number of parts.
        parts: usize,
        /// Bytes that a part may have.
        limit: u64,
        /// Bytes of the largest part of the cut whose largest part is the smallest.
        needed: u64,
        /// The layers of that part.
        layers: Range<LayerId>,
        /// How many micro-batches are alive in it.
        alive: usize,
    },
}

/// Equally many layers in each part; the first parts have one more where they do not come out even, as DeepSpeed's
/// `partition_uniform`.
///
/// # Errors
/// If there are fewer layers than parts.
pub fn uniform(layers: usize, parts: usize) -> Result<Vec<Range<LayerId>>, SplitError> {
    enough(layers, parts)?;
    let (each, left_over) = (layers / parts, layers % parts);
    let start = |part: usize| part * each + part.min(left_over);
    Ok((0..parts).map(|part| start(part)..start(part + 1)).collect())
}

/// The heaviest part as light as possible: DeepSpeed's `parameters`, with the number of parameters of each layer as weights,
/// and its `type:regex`, with 1 for layers whose name matches and 0 for the others. Sums up to 2⁵³ are exact.
///
/// # Errors
/// If there are fewer layers than parts.
pub fn balanced(weights: &[u64], parts: usize) -> Result<Vec<Range<LayerId>>, SplitError> {
    enough(weights.len(), parts)?;
    let sums = Sums::new(weights.iter().map(|&weight| weight as f64));
    Ok(most_even(weights.len(), parts, |_, layers| Some(sums.of(layers))).expect("there are enough layers"))
}

/// The slowest part as fast as possible, of the cuts whose parts have `limit` bytes at most. `alive` says for each part how many
/// micro-batches are alive in it at the same time ([`alive`]); a part has its layers' state once, and their activations for each
/// of these.
///
/// Where a stage has several chunks, each of them is a part here: what a stage may have is to be divided by their number. That
/// is more than needed, so there can be cuts that fit and are not found.
///
/// # Errors
/// If there are fewer layers than parts, or a time is none, or no cut fits.
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

/// For each part, in the order of the forward pass, the most micro-batches whose forward has run there and whose backward has
/// not finished: `min(stages − stage, micro_batches)` with 1F1B.
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

/// The sum of every range, added up from its front: so ranges of equal weights have equal sums, which differences of one
/// running sum have not.
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

/// Sums of ranges as differences of one running sum, which is exact for bytes.
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

/// The cut whose heaviest part is the lightest, and of these the one with the least sum of squares.
fn most_even(
    layers: usize,
    parts: usize,
    weight: impl Fn(usize, Range<LayerId>) -> Option<f64>,
) -> Option<Vec<Range<LayerId>>> {
    let (lightest, _) = best(layers, parts, &weight, f64::max)?;
    let square = |part, layers| weight(part, layers).filter(|&weight| weight <= lightest).map(|weight| weight * weight);
    best(layers, parts, square, |sum, square| sum + square).map(|(_, cut)| cut)
}

/// The cut for which what `combine` makes of all its parts' weights is the least, and that value; the first parts as long as
/// possible. `weight` is `None` for a part that must not be.
///
/// Dynamic programming over (part, first layer of it), from the last part to the first: the layers behind it are cut in the best
/// way, whatever is in front of them, because `combine` grows with both of its arguments.
fn best<W: Copy + PartialOrd>(
    layers: usize,
    parts: usize,
    weight: impl Fn(usize, Range<LayerId>) -> Option<W>,
    combine: impl Fn(W, W) -> W,
) -> Option<(W, Vec<Range<LayerId>>)> {
    // By part and its first layer: the value of the parts from there on, and where this one ends.
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
        let (_, end) = table[part][start].expect("the parts from here on were cut");
        std::mem::replace(&mut start, end)..end
    };
    Some((value, (0..parts).map(part).collect()))
}
