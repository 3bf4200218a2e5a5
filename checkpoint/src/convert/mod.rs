//! Conversions between checkpoints and the files of other programs.

pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod merge;
pub(crate) mod pretrained;
