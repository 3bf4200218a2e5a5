//! The dimensions of the search spaces in `autotuning`.

/// One dimension of a search space: a key and the values to try.
#[derive(Debug, Clone, PartialEq)]
pub struct Dimension {
    /// Path of the key under its primary name, for example `zero_optimization.stage`.
    pub path: String,
    /// Values of the type that the key expects, each written as in `--set path=VALUE`. Empty if `range` is set.
    pub values: Vec<String>,
    /// A continuous range, for [`SweepMethod::Random`](crate::SweepMethod::Random) and [`SweepMethod::Tpe`](crate::SweepMethod::Tpe).
    pub range: Option<Interval>,
}

/// A range from `low` to `high`, both included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// Lower bound.
    pub low: f64,
    /// Upper bound; greater than `low`.
    pub high: f64,
    /// Draw values log-uniformly; `low` is then positive.
    pub log: bool,
    /// Draw whole numbers only, because the key takes integers.
    pub is_integer: bool,
}
