//! Tests of swap files: random requests against a model, and faults. Tests of process limits run in child processes.

mod faults;
mod model;
mod place;
