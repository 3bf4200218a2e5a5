//! The binary as a user runs it: real processes, real files, real networks. A file is a subject; `cargo test --test e2e restart` runs one.

#[path = "../case/mod.rs"]
mod case;
#[path = "../../../engine/tests/python/mod.rs"]
mod python;

mod alike;
mod autotune;
mod checkpoint;
mod command_line;
mod costs;
mod deepspeed;
mod doctor;
mod hosts;
mod instructions;
mod kills;
mod launch;
mod launchers;
mod loss_scale;
mod memory;
mod monitors;
mod namespaces;
mod network;
mod notice;
mod nvml;
mod offload;
mod paths;
mod pipeline;
mod plan;
mod pretrained;
mod profiles;
mod ranks;
mod resident;
mod restart;
mod saves;
mod sweep;
mod watch;
