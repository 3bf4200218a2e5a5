//! Compares each operation and its gradients with finite differences and with the plain candle expression in f64.

mod against_candle;
mod attention_dropout;
mod check;
#[path = "../../../comm/tests/delegate/mod.rs"]
mod delegate;
mod device;
mod edges;
mod family_operations;
mod golden;
#[cfg(feature = "cuda")]
mod gpu;
mod head;
mod ignored;
mod invariance;
mod overlap;
mod preference;
mod ring;
mod sink;
mod tensor;
mod tiled;
mod z_loss;
