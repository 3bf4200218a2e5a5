//! Softmax cross-entropy of rows of logits, and its gradient.

use crate::launch::{Address, Dtype, Launch, SUMS_BYTES, Source, THREADS};

/// `CrossEntropyArgs` of `cu/cross_entropy.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Args {
    logits: Address,
    targets: Address,
    statistics: Address,
    out: Address,
    classes: u64,
    factor: f32,
    unused: u32,
}

/// `LossSumArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumArgs {
    statistics: Address,
    sum: Address,
    rows: u64,
    add: u64,
}

/// Logits of `[rows, classes]`, and their targets: u32 of `[rows]`, each below `classes`, which nothing checks any more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logits {
    /// At least 1.
    pub rows: u32,
    /// At least 1.
    pub classes: u32,
    /// Of the logits and their gradient.
    pub dtype: Dtype,
    /// Where they are.
    pub logits: Address,
    /// Where those are.
    pub targets: Address,
}

/// Rows are long: a vocabulary each.
const LONG_ROW: u32 = 512;

fn of_rows(logits: &Logits, kernel: &str, statistics: Address, out: Address, factor: f32) -> Launch<Args> {
    let &Logits { rows, classes, dtype, logits, targets } = logits;
    let args = Args { logits, targets, statistics, out, classes: classes.into(), factor, unused: 0 };
    let launch = Launch::new(Source::CrossEntropy, kernel, dtype, [rows, 1, 1], args);
    Launch { threads: LONG_ROW, shared_bytes: SUMS_BYTES, ..launch }
}

/// Of each row its largest logit, Σ e^(x − largest) and its target's logit: f32 of `[rows, 3]`.
pub fn forward(logits: &Logits, statistics: Address) -> Launch<Args> {
    of_rows(logits, "cross_entropy", statistics, 0, 0.0)
}

/// The sum of the rows' losses, one f64; with `add` onto what is there.
pub fn loss_sum(rows: u32, statistics: Address, sum: Address, add: bool) -> Launch<SumArgs> {
    let args = SumArgs { statistics, sum, rows: rows.into(), add: add.into() };
    let (source, entry) = (Source::CrossEntropy, "loss_sum".into());
    Launch { source, entry, grid: [1, 1, 1], threads: THREADS, shared_bytes: 8 * THREADS, args }
}

/// (softmax − one at the target)·`factor`, which is the upstream gradient over the rows of the mean. `out` may be the logits.
pub fn backward(logits: &Logits, statistics: Address, factor: f32, out: Address) -> Launch<Args> {
    of_rows(logits, "cross_entropy_backward", statistics, out, factor)
}
