//! Tests of parsing, resolving and rejecting `ds.yaml`. Each file covers one subject;
//! `cargo test --test config errors` runs one.

mod activations;
mod autotuning;
mod contradictions;
mod curriculum;
mod data;
mod deepspeed_forms;
mod errors;
mod keys;
mod offload;
mod parallel;
mod parameter_groups;
mod presets;
mod pretrained;
mod program;
mod published;
mod quantization;
mod resolve;
mod rope_scaling;
mod syntax;
mod texts;
