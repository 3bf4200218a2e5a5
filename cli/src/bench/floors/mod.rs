//! Floors: the simplest programs that move the same bytes as the subjects of benchmarks.

pub(super) mod collective;
pub(super) mod disk;
