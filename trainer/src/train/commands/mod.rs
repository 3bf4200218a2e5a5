//! Commands that use a configuration's model or data without a training run.

pub(super) mod data_commands;
pub(super) mod evaluate_only;
pub(super) mod show;
pub(super) mod steps;
pub(super) mod verify;
