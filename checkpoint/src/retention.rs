//! Decides which checkpoints of a run are kept.

/// Decides which checkpoints are removed when a newer one is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Retention {
    /// Number of newest checkpoints to keep; 0 keeps all.
    pub keep_last: usize,
    /// Always keeps checkpoints whose step is a multiple of this; 0 disables the rule.
    pub keep_every: u64,
    /// Always keeps the checkpoint of this step.
    pub keep_step: Option<u64>,
}

impl Retention {
    /// Returns the steps of the checkpoints to remove after the checkpoint of `step` was written. `all` lists the steps
    /// of all checkpoints, oldest first. Checkpoints of steps after `step` stay.
    #[must_use]
    pub fn superfluous(&self, all: &[u64], step: u64) -> Vec<u64> {
        let is_kept =
            |other: u64| self.keep_step == Some(other) || self.keep_every > 0 && other.is_multiple_of(self.keep_every);
        let mut old: Vec<u64> = all.iter().copied().filter(|&other| other < step && !is_kept(other)).collect();
        let kept = if self.keep_last == 0 { old.len() } else { self.keep_last - 1 };
        old.truncate(old.len().saturating_sub(kept));
        old
    }
}
