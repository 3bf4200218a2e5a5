//! A flag of a thread that is up while something runs, and not after it, panics included.

use std::cell::Cell;
use std::thread::LocalKey;

pub(crate) struct Flag {
    flag: &'static LocalKey<Cell<bool>>,
    before: bool,
}

impl Flag {
    /// Raises it until this is dropped.
    #[must_use]
    pub(crate) fn raise(flag: &'static LocalKey<Cell<bool>>) -> Self {
        Self { flag, before: flag.replace(true) }
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        self.flag.set(self.before);
    }
}
