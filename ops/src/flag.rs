//! A thread-local flag that is set while a scope runs, and reset when it ends, even by a panic.

use std::cell::Cell;
use std::thread::LocalKey;

pub(crate) struct Flag {
    flag: &'static LocalKey<Cell<bool>>,
    before: bool,
}

impl Flag {
    /// Sets the flag until the returned value is dropped.
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
