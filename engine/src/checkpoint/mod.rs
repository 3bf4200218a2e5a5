//! Checkpoints of an engine, the weights that it begins with, and what goes to and comes from Hugging Face's libraries.

pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod saving;
pub mod start;
