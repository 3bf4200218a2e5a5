//! The text of a configuration: several files, edits, and input that is not a configuration.

pub(super) mod edit;
pub(super) mod files;
pub(super) mod fuzz;
pub(super) mod hostile;
