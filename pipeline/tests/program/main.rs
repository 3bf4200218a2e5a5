//! Programs, schedules, splits, simulation and validation. A file is a subject; `cargo test --test program validate` runs one.

mod grid;
mod schedules;
mod simulate;
mod split;
mod ties;
mod trace;
mod validate;
