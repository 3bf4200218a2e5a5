//! Memory of whole pages, huge ones where there is enough of it.
//!
//! The kernel pins every page of a direct transfer and gives the disk a list of them. With pages of 2 MiB instead of 4 KiB the same
//! disk moved half as much again in the same time: 1.7 -> 2.5 GB/s read, 3.1 -> 4.7 GB/s written. So large memory is a mapping of
//! its own that asks for huge pages before it is first touched, and that the system has back as soon as it is dropped: an
//! allocator would keep it. An allocator that counts does not see it, so it is counted here.

use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytemuck::{Pod, Zeroable};
use memmap2::{Advice, MmapMut, MmapOptions};

use crate::buffer::ALIGNMENT;

/// A huge page of x86-64, and of aarch64 with pages of 4 KiB.
const HUGE: usize = 2 << 20;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

static OBSERVER: OnceLock<fn(usize)> = OnceLock::new();

/// Has `observer` called with what [`mapped`] will be in a moment, whenever it changes: for an allocator that keeps memory which had
/// better be used here. The first observer stays.
pub fn observe_mapped(observer: fn(usize)) {
    let _ = OBSERVER.set(observer);
}

fn tell(bytes: usize) {
    if let Some(observer) = OBSERVER.get() {
        observer(bytes);
    }
}

/// Bytes of all mappings of this process's buffers.
#[must_use]
pub fn mapped() -> usize {
    NOW.load(Relaxed)
}

/// The most that [`mapped`] was since [`reset_mapped_peak`].
#[must_use]
pub fn mapped_peak() -> usize {
    PEAK.load(Relaxed)
}

/// Begins a new peak, from what is mapped now.
pub fn reset_mapped_peak() {
    PEAK.store(mapped(), Relaxed);
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(4096))]
pub(crate) struct Page([u8; ALIGNMENT]);

/// Owned bytes that begin on a page.
pub(crate) enum Pages {
    /// From the program's allocator.
    Small(Vec<Page>),
    /// A mapping of its own.
    Large(MmapMut),
}

impl Pages {
    /// Zeros, `bytes` or as many more as fill the last page; none where the system has not as many.
    pub(crate) fn zeroed(bytes: usize) -> Option<Pages> {
        let size = bytes.max(1).checked_next_multiple_of(ALIGNMENT)?;
        if size < HUGE {
            let mut pages = vec![];
            pages.try_reserve_exact(size / ALIGNMENT).ok()?;
            pages.resize(size / ALIGNMENT, Page::zeroed());
            return Some(Pages::Small(pages));
        }
        let pages = MmapOptions::new().len(size).map_anon().ok()?;
        // A kernel that has no huge pages refuses, and everything works, slower.
        let _ = pages.advise(Advice::HugePage);
        let now = NOW.fetch_add(size, Relaxed) + size;
        PEAK.fetch_max(now, Relaxed);
        tell(now);
        Some(Pages::Large(pages))
    }

    /// For those who share the memory with the kernel; valid for as long as this is not dropped.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Pages::Small(pages) => pages.as_mut_ptr().cast(),
            Pages::Large(pages) => pages.as_mut_ptr(),
        }
    }
}

impl Deref for Pages {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Pages::Small(pages) => bytemuck::cast_slice(pages),
            Pages::Large(pages) => pages,
        }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Pages::Small(pages) => bytemuck::cast_slice_mut(pages),
            Pages::Large(pages) => pages,
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Pages::Large(pages) = self {
            tell(NOW.fetch_sub(pages.len(), Relaxed) - pages.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_whole_pages_of_zeros() {
        for (bytes, size) in [(0, 4096), (4097, 8192), (HUGE, HUGE), (3 * HUGE + 1, 3 * HUGE + 4096)] {
            let mut pages = Pages::zeroed(bytes).expect("memory");
            assert_eq!(pages.len(), size);
            assert!(pages.as_mut_ptr().addr().is_multiple_of(ALIGNMENT));
            assert!(pages.iter().all(|&byte| byte == 0));
            assert!(mapped() >= if size < HUGE { 0 } else { size });
            pages.fill(1);
            assert_eq!(pages[size - 1], 1);
        }
    }
}
