//! Checkpoints of an engine, its initial weights, and exchange with Hugging Face's libraries.

pub(crate) mod export;
pub(crate) mod import;
mod llama;
pub(crate) mod saving;
pub mod start;
pub(crate) mod stored;
