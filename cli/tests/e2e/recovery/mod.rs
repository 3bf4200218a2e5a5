//! Recovery from killed ranks, and saves under adverse conditions.

mod kills;
mod older;
mod restart;
mod saves;
