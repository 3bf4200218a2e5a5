//! End-to-end tests of the binary with real processes, files and networks. Each file tests one subject;
//! `cargo test --test e2e recovery::restart::` runs a single one.

mod case;
#[path = "../../../engine/tests/python/mod.rs"]
mod python;

mod commands;
mod launch;
mod planning;
mod recovery;
mod stores;
mod training;
