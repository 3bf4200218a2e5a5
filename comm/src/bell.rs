//! Waits for another thread or process: spins for a bounded time, then sleeps on a futex.
//!
//! A sleeping thread wakes up 50 to 150 µs after the ring; a spinning thread notices it in well under 1 µs. But
//! spinning ranks that share a core slow each other down. The spin is therefore short and yields to other threads, of
//! which one may be about to ring. Ranks that share cores do not spin at all.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::futex;

/// A counter that threads sleep on. It may be placed in memory that processes share. Zeroed memory is a valid bell.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(crate) struct Bell {
    rings: AtomicU32,
    sleepers: AtomicU32,
}

impl Bell {
    /// Wakes all sleepers. Before calling this, write the data that the sleepers wait for.
    pub(crate) fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        // Both sides access both words with SeqCst: either the ringer sees the sleeper, or the sleeper sees the new
        // count.
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            let _ = futex::wake(&self.rings, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Returns the current count. Call this before checking the awaited condition: `wait` then notices a ring that
    /// comes after the check.
    pub(crate) fn mark(&self) -> u32 {
        self.rings.load(Ordering::SeqCst)
    }

    /// Waits until the count differs from `mark`, for at most about `limit`. Spins for at most `spin`, then sleeps.
    pub(crate) fn wait(&self, mark: u32, spin: Duration, limit: Duration) {
        if !spin.is_zero() {
            let until = Instant::now() + spin;
            loop {
                for _ in 0..64 {
                    if self.mark() != mark {
                        return;
                    }
                    std::hint::spin_loop();
                }
                if Instant::now() >= until {
                    break;
                }
                std::thread::yield_now();
            }
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if self.mark() == mark {
            let timeout = futex::Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
            // Returns early on a signal or a changed count; the caller checks its condition again anyway.
            let _ = futex::wait(&self.rings, futex::Flags::empty(), mark, Some(&timeout));
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns how long a rank may spin if the job has `ranks` ranks on this host, whatever their groups. Returns zero if
/// the host has fewer cores than ranks.
pub(crate) fn spin_time(ranks: usize) -> Duration {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    if ranks <= cores { Duration::from_micros(50) } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn no_wakeup_is_missed() {
        let bells: Arc<[Bell; 2]> = Arc::default();
        let theirs = Arc::clone(&bells);
        let spin = Duration::from_micros(5);
        let echo = std::thread::spawn(move || {
            for round in 0..2000 {
                while theirs[0].mark() == round {
                    theirs[0].wait(round, spin, Duration::from_secs(10));
                }
                theirs[1].ring();
            }
        });
        for round in 0..2000 {
            bells[0].ring();
            while bells[1].mark() == round {
                bells[1].wait(round, spin, Duration::from_secs(10));
            }
        }
        echo.join().expect("the echo ends");
    }

    #[test]
    fn a_wait_times_out_without_a_wakeup() {
        let bell = Bell::default();
        bell.wait(bell.mark(), Duration::ZERO, Duration::from_millis(1));
        assert_eq!(bell.mark(), 0);
    }
}
