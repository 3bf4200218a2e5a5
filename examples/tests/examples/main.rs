//! Tests of the example programs, and of a model of candle-transformers as a layer.

#[path = "../../../comm/tests/port/mod.rs"]
mod port;
mod resnet;
mod run;
