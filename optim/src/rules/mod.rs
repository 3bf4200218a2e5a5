//! The update rule of each optimizer.

pub(crate) mod adafactor;
pub(crate) mod adagrad;
pub(crate) mod adamw;
pub(crate) mod lamb;
pub(crate) mod lion;
pub(crate) mod muon;
pub(crate) mod nadam;
pub(crate) mod radam;
pub(crate) mod rmsprop;
pub(crate) mod rule;
pub(crate) mod schedule_free;
pub(crate) mod sgd;
