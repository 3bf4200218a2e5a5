//! Recovery from killed ranks, and saves under adverse conditions.

mod kills;
mod restart;
mod saves;
