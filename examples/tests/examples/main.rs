//! Tests of the example programs, and of a model of candle-transformers as a layer.

mod resnet;
mod run;
