//! Thread-local values that are set while a scope runs, and reset when it ends, even by a panic.

use std::cell::{Cell, RefCell};
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

/// Replaces a thread-local value until this guard is dropped, which restores the previous one.
pub(crate) struct Replaced<T: 'static> {
    value: &'static LocalKey<RefCell<Option<T>>>,
    before: Option<T>,
}

impl<T> Replaced<T> {
    #[must_use]
    pub(crate) fn with(value: &'static LocalKey<RefCell<Option<T>>>, by: Option<T>) -> Self {
        Self { value, before: value.replace(by) }
    }

    /// Calls `run` with a replaced value. Returns the value after `run`, and the result of `run`.
    pub(crate) fn during<R>(
        value: &'static LocalKey<RefCell<Option<T>>>,
        by: Option<T>,
        run: impl FnOnce() -> R,
    ) -> (Option<T>, R) {
        let _replaced = Self::with(value, by);
        let result = run();
        (value.take(), result)
    }
}

impl<T> Drop for Replaced<T> {
    fn drop(&mut self) {
        drop(self.value.replace(self.before.take()));
    }
}
