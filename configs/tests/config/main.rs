//! What `ds.yaml` means and what is refused. A file is a subject; `cargo test --test config errors` runs one.

mod activations;
mod autotuning;
mod deepspeed_forms;
mod edit;
mod errors;
mod files;
mod fuzz;
mod hostile;
mod offload;
mod pipeline;
mod presets;
mod pretrained;
mod published;
mod resolve;
mod rope_scaling;
