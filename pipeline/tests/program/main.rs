//! Tests of programs, schedules, splits, simulation and validation, one file per subject. `cargo test --test program
//! validate` runs one file.

mod grid;
mod schedules;
mod shapes;
mod simulate;
mod split;
mod ties;
mod trace;
mod validate;
