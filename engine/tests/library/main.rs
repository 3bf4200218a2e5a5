//! Tests of the library, with ranks as threads. Each module has one subject: `cargo test --test library parity` runs
//! the module `parity`.

// Programs use the engine under this name.
extern crate zero_engine as zero_train;

#[path = "../../../comm/tests/delegate/mod.rs"]
mod delegate;
#[path = "../python/mod.rs"]
mod python;
#[path = "../world/mod.rs"]
mod world;

mod adafactor;
mod adapter;
mod averages;
mod bf16_state;
mod blame;
mod bytes;
mod changed_config;
mod checkpoint;
mod clipping;
mod custom;
mod docs;
mod dropout;
mod eight_bit;
mod export;
mod families;
mod family_layouts;
mod frozen;
mod gradients;
mod group_optimizers;
mod groups;
mod hpz;
mod hsdp;
mod ignored_targets;
mod initial_weights;
mod lamb;
mod local_steps;
mod loss_scale;
mod lr_lambda;
mod module_buffers;
mod muon;
mod mup;
mod mup_base;
mod named;
mod noise;
mod offload;
mod on_disk;
mod operations;
mod packing;
mod parity;
mod peft;
mod pipeline;
mod plain_candle;
mod pretrained;
mod quantized;
mod quantized_collectives;
mod rampup;
mod recomputation;
mod replicas;
mod sequence_parallel;
mod tensor_parallel;
mod tiles;
mod torch;
mod transformers;
mod uneven_micro_batches;
mod whole_parameters;
mod z_loss;
