//! The binary as a user runs it: real processes, real files, real networks. A file is a subject; `cargo test --test e2e restart` runs one.

#[path = "../case/mod.rs"]
mod case;
#[path = "../../../engine/tests/python/mod.rs"]
mod python;

mod commands;
mod launch;
mod planning;
mod recovery;
mod training;
