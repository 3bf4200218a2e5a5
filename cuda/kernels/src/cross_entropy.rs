//! Softmax cross-entropy over rows of logits, and its gradient.

use crate::launch::{Address, Dtype, Launch, SUMS_BYTES, Source, THREADS};

/// Matches `CrossEntropyArgs` of `cu/cross_entropy.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Args {
    logits: Address,
    targets: Address,
    statistics: Address,
    out: Address,
    classes: u64,
    stride: u64,
    upstream: Address,
    counted: Address,
    gradient: f32,
    rows: f32,
    z_loss: f32,
    unused: u32,
}

/// Matches `JoinArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JoinArgs {
    parts: Address,
    targets: Address,
    statistics: Address,
    ranks: u64,
    rows: u64,
}

/// Matches `MeanLossArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeanArgs {
    statistics: Address,
    loss: Address,
    z: Address,
    rows: u64,
    counted: Address,
    z_loss: f32,
    unused: u32,
}

/// Matches `RescaleArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RescaleArgs {
    x: Address,
    y: Address,
    upstream: Address,
    count: u64,
    gradient: f32,
    add: u32,
}

/// Matches `ForeseenArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForeseenArgs {
    upstream: Address,
    fault: Address,
    what: u64,
    gradient: f32,
    unused: u32,
}

/// Logits of `[rows, classes]` and targets, u32 of `[rows]`. A target not below `classes` makes the loss and the
/// gradient of its row NaN, with two exceptions: [`NO_TARGET`](crate::indices::NO_TARGET) makes them 0, and
/// [`ELSEWHERE`](crate::indices::ELSEWHERE) means that another rank has the target's logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logits {
    /// Number of rows, at least 1.
    pub rows: u32,
    /// Number of classes; 0 on a rank without classes.
    pub classes: u32,
    /// Row stride in elements.
    pub stride: u64,
    /// Type of the logits.
    pub dtype: Dtype,
    /// Device address of the logits.
    pub logits: Address,
    /// Device address of the targets.
    pub targets: Address,
    /// Coefficient of ln²Z in each row's loss, where Z is Σ e^x; only the backward reads it.
    pub z_loss: f32,
}

/// The gradient of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Upstream {
    /// A value known to the host.
    Known(f32),
    /// An f32 in device memory.
    At(Address),
}

/// The number of rows that a mean counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Counted {
    /// A number known to the host.
    Known(u32),
    /// A u32 in device memory. 0 makes the mean 0.
    At(Address),
}

impl Counted {
    /// Returns the number and the address. If the number is known, the address is 0; otherwise the number is 0.
    fn parts(self) -> (u32, Address) {
        match self {
            Self::Known(rows) => (rows, 0),
            Self::At(address) => (0, address),
        }
    }
}

/// Returns the number of threads per row, the same for all types. Rows are usually long, because the classes are a
/// vocabulary.
fn threads(classes: u32) -> u32 {
    classes.div_ceil(4).min(512).next_power_of_two().max(32)
}

fn of_rows(logits: &Logits, kernel: &str, dtype: Dtype, rest: Args) -> Launch<Args> {
    let &Logits { rows, classes, stride, logits, targets, z_loss, .. } = logits;
    let args = Args { logits, targets, classes: classes.into(), stride, z_loss, ..rest };
    let launch = Launch::new(Source::CrossEntropy, kernel, dtype, [rows, 1, 1], args);
    Launch { threads: threads(classes), shared_bytes: SUMS_BYTES, ..launch }
}

const NOTHING: Args = Args {
    logits: 0,
    targets: 0,
    statistics: 0,
    out: 0,
    classes: 0,
    stride: 0,
    upstream: 0,
    counted: 0,
    gradient: 0.0,
    rows: 0.0,
    z_loss: 0.0,
    unused: 0,
};

/// Computes for each row the largest logit, Σ e^(x − largest) and the target's logit: f32 of `[rows, 3]`.
pub fn forward(logits: &Logits, statistics: Address) -> Launch<Args> {
    of_rows(logits, "cross_entropy", logits.dtype, Args { statistics, ..NOTHING })
}

/// Joins the statistics of `rows` rows, f32 of `[ranks, rows, 3]`. [`forward`] computed them on each of `ranks` ranks
/// from its part of the classes. Writes the statistics of all classes, f32 of `[rows, 3]`. `rows` is at least 1.
pub fn join([ranks, rows]: [u32; 2], parts: Address, targets: Address, statistics: Address) -> Launch<JoinArgs> {
    let args = JoinArgs { parts, targets, statistics, ranks: ranks.into(), rows: rows.into() };
    let grid = [rows.div_ceil(THREADS), 1, 1];
    Launch { source: Source::CrossEntropy, entry: "join".into(), grid, threads: THREADS, shared_bytes: 0, args }
}

/// Adds the losses of `rows` rows and divides the sum by `counted`. The result is an f32. `rows` is at least 1. If
/// `z_loss` is not 0, adds `z_loss` times the mean of ln²Z, and also writes this part to the address `z`, unless `z` is
/// 0.
pub fn mean_loss(
    rows: u32,
    counted: Counted,
    statistics: Address,
    z_loss: f32,
    [loss, z]: [Address; 2],
) -> Launch<MeanArgs> {
    let (known, counted) = counted.parts();
    debug_assert!(counted != 0 || known == rows, "the host knows the number only if all rows count");
    let args = MeanArgs { statistics, loss, z, rows: rows.into(), counted, z_loss, unused: 0 };
    let (source, entry) = (Source::CrossEntropy, "mean_loss".into());
    Launch { source, entry, grid: [1, 1, 1], threads: THREADS, shared_bytes: 8 * THREADS, args }
}

/// Computes (softmax·(1 + 2·z_loss·ln Z) − one-hot(target))·gradient/`counted`, the gradient of a mean over `counted`
/// rows. The logits may be only some of these rows.
///
/// `out` has type `dtype`: the type of the logits or, for f32 logits, any type. It may overwrite the logits; its row
/// stride in bytes is that of the logits.
pub fn backward(
    logits: &Logits,
    statistics: Address,
    (upstream, counted): (Upstream, Counted),
    (dtype, out): (Dtype, Address),
) -> Launch<Args> {
    let kernel = if dtype == logits.dtype { "cross_entropy_backward" } else { "cross_entropy_backward_to" };
    let (upstream, gradient) = match upstream {
        Upstream::Known(gradient) => (0, gradient),
        Upstream::At(address) => (address, 0.0),
    };
    let (rows, counted) = counted.parts();
    let rows = rows as f32;
    of_rows(logits, kernel, dtype, Args { statistics, out, upstream, counted, gradient, rows, ..NOTHING })
}

/// Computes y = x·upstream/`gradient`, or y = x if upstream equals `gradient`. With `add`, adds the result to y
/// instead. Returns `None` if there are no elements.
pub fn rescale(
    dtype: Dtype,
    count: u64,
    [x, y]: [Address; 2],
    (gradient, upstream): (f32, Address),
    add: bool,
) -> Option<Launch<RescaleArgs>> {
    let args = RescaleArgs { x, y, upstream, count, gradient, add: add.into() };
    Launch::over_packs(Source::CrossEntropy, "rescale", dtype, count, args)
}

/// Checks that upstream equals `gradient`. If not, and if no fault is recorded yet, records `what` (not 0) and the bits
/// of both values in the [`Fault`](crate::indices::Fault) at `fault`.
pub fn foreseen((gradient, upstream): (f32, Address), fault: Address, what: u64) -> Launch<ForeseenArgs> {
    let args = ForeseenArgs { upstream, fault, what, gradient, unused: 0 };
    let (source, entry) = (Source::CrossEntropy, "foreseen".into());
    Launch { source, entry, grid: [1, 1, 1], threads: 32, shared_bytes: 0, args }
}
