//! Tests of models: the zoo, golden results, and the planned memory of layers. One file per subject.

mod decoding;
mod golden;
mod memory;
mod sliding_window;
mod zoo;
