//! Adds operations to candle's graph and runs their backward.

pub(crate) mod addend;
pub(crate) mod apply;
pub(crate) mod backward;
pub(crate) mod fused_block;
pub(crate) mod gradient;
pub(crate) mod many_inputs;
pub(crate) mod op;
pub(crate) mod operand;
pub(crate) mod output;
pub(crate) mod remade;
pub mod storage;

pub use apply::{reshape, sum, untracked};
pub use backward::backward_from;
pub use fused_block::{fused_block, take_values};
