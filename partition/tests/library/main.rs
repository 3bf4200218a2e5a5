//! Tests of layouts and passes, and of what the validator accepts. One file per subject.

mod layout;
mod mutations;
mod passes;
