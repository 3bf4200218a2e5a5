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

mod blame;
mod changed_config;
mod checkpoint;
mod docs;
mod models;
mod operations;
mod optimizers;
mod parity;
mod pipeline;
mod sequence_parallel;
mod sharding;
mod tensor_parallel;
mod weights;
