//! What a run prints: the lines at its start, a progress bar, and the progress of data preparation.

pub(super) mod autos;
pub(super) mod bar;
pub(super) mod disk;
pub(super) mod intro;
pub(super) mod preparing;
pub(super) mod progress;
