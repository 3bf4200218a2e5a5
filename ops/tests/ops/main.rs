//! Each operation against finite differences and against the plain candle expression in f64, with its gradients.

mod against_candle;
mod check;
mod device;
mod edges;
mod golden;
#[cfg(feature = "cuda")]
mod gpu;
mod head;
mod invariance;
mod sink;
mod tiled;
