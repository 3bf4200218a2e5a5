//! Tests of parsing, resolving and rejecting `ds.yaml`. Each file covers one subject;
//! `cargo test --test config errors` runs one.

mod activations;
mod autotuning;
mod codes;
mod contradictions;
mod curriculum;
mod data;
mod deepspeed_forms;
mod edit;
mod errors;
mod files;
mod fuzz;
mod hostile;
mod keys;
mod local_steps;
mod mesh;
mod offload;
mod parameter_groups;
mod pipeline;
mod presets;
mod pretrained;
mod program;
mod published;
mod quantization;
mod resolve;
mod rope_scaling;
mod secondary;
