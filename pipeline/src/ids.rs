//! Numbers that identify layers and segments in instructions.

/// Index of a layer in the model.
pub type LayerId = usize;
/// Index of a segment. A segment is a flat parameter that concatenates parameters of one layer. These parameters are
/// placed, gathered and reduced together.
pub type SegmentId = usize;
