//! Training runs on various layouts, and the files that they write.

mod evaluate;
mod fine_tuning;
mod gradients;
mod local_steps;
mod loss_scale;
mod monitors;
mod nvml;
mod offload;
mod pipeline;
mod preference;
mod profiles;
mod token_batches;
mod wandb;
