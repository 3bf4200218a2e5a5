//! Locks the mutexes of this crate.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, even if a thread has panicked while it held the lock. The values behind these mutexes are consistent
/// in any case: counters and maps, and the endpoint of a lane, which no job uses after a panic.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
