//! Reads and writes of vectors. A vector whose first element is at a page boundary is transferred in place; some
//! allocators align large vectors this way. Other vectors are read through aligned buffers, one part at a time.

#![allow(unsafe_code)]

use bytemuck::{Pod, cast_slice};

use crate::buffer::{ALIGNMENT, AlignedBuffer, align};
use crate::error::DiskError;
use crate::file::SwapFile;
use crate::loan::filled;
use crate::queue::Pending;
use crate::schedule::Direction;

/// Size in bytes of the buffers through which an unaligned vector is read. Each buffer is freed after it is copied into
/// the vector, so at most one part is in memory twice.
const PART: usize = 16 << 20;

/// A vector that is being read or written.
#[derive(Debug)]
#[must_use = "dropping a request without waiting loses its vector and its error"]
pub struct PendingVec<T> {
    /// Number of elements of the whole vector.
    len: usize,
    way: Way<T>,
}

#[derive(Debug)]
enum Way<T> {
    /// Transferred in place: whole pages directly, and the bytes after the last whole page through one aligned page.
    Lent { direction: Direction, pages: Pending<Vec<T>>, rest: Option<Pending> },
    /// Read through buffers, which are copied on completion.
    Copied(Vec<Pending>),
}

/// Returns whether a vector's first element is at a page boundary, so that the vector is read and written in place.
#[must_use]
pub fn lies_on_pages<T>(values: &[T]) -> bool {
    (values.as_ptr() as usize).is_multiple_of(ALIGNMENT)
}

impl SwapFile {
    /// Reads `len` elements at offset `at`, a multiple of [`ALIGNMENT`], into a new vector.
    ///
    /// # Errors
    /// Returns [`DiskError::Memory`] if the system is out of memory. The [`PendingVec`] resolves to any other error.
    pub fn read_vec<T: Pod + Send>(&self, at: u64, len: usize) -> Result<PendingVec<T>, DiskError> {
        let bytes = len * size_of::<T>();
        let values = room::<T>(len)?;
        if lies_on_pages(&values) {
            return self.read_pages(at, values, len);
        }
        drop(values);
        let read = |start: usize| {
            let part = align(PART.min(bytes - start) as u64) as usize;
            Ok(self.read(at + start as u64, AlignedBuffer::zeroed(part)?, part))
        };
        let parts = (0..bytes).step_by(PART).map(read).collect::<Result<_, DiskError>>()?;
        Ok(PendingVec { len, way: Way::Copied(parts) })
    }

    /// Reads into a vector that [`lies_on_pages`], replacing its elements, from offset `at`, a multiple of
    /// [`ALIGNMENT`].
    ///
    /// # Errors
    /// Returns [`DiskError::Memory`] if the system has no memory for the vector's last page. The [`PendingVec`]
    /// resolves to any other error.
    pub fn read_over<T: Pod + Send>(&self, at: u64, values: Vec<T>) -> Result<PendingVec<T>, DiskError> {
        let len = values.len();
        self.read_pages(at, values, len)
    }

    fn read_pages<T: Pod + Send>(&self, at: u64, values: Vec<T>, len: usize) -> Result<PendingVec<T>, DiskError> {
        let bytes = len * size_of::<T>();
        let whole = bytes / ALIGNMENT * ALIGNMENT;
        let page = (whole < bytes).then(|| AlignedBuffer::zeroed(ALIGNMENT)).transpose()?;
        let pages = self.lend(Direction::Read, at, values, whole);
        let rest = page.map(|page| self.read(at + whole as u64, page, ALIGNMENT));
        Ok(PendingVec { len, way: Way::Lent { direction: Direction::Read, pages, rest } })
    }

    /// Writes a vector that [`lies_on_pages`] at offset `at`, a multiple of [`ALIGNMENT`]. Zeros pad its last page on
    /// the disk.
    ///
    /// # Errors
    /// Returns [`DiskError::Memory`] if the system has no memory for the vector's last page. The [`PendingVec`]
    /// resolves to any other error.
    pub fn write_vec<T: Pod + Send>(&self, at: u64, values: Vec<T>) -> Result<PendingVec<T>, DiskError> {
        let len = values.len();
        let bytes: &[u8] = cast_slice(&values);
        let whole = bytes.len() / ALIGNMENT * ALIGNMENT;
        let rest = &bytes[whole..];
        let page = (!rest.is_empty()).then(|| AlignedBuffer::zeroed(ALIGNMENT)).transpose()?;
        let rest = page.map(|mut page| {
            page.as_bytes_mut()[..rest.len()].copy_from_slice(rest);
            self.write(at + whole as u64, page, ALIGNMENT)
        });
        let pages = self.lend(Direction::Write, at, values, whole);
        Ok(PendingVec { len, way: Way::Lent { direction: Direction::Write, pages, rest } })
    }
}

impl<T: Pod + Send> PendingVec<T> {
    /// Blocks until the request completes or fails.
    ///
    /// # Errors
    /// See [`Pending::wait`].
    pub fn wait(self) -> Result<Vec<T>, DiskError> {
        match self.way {
            Way::Lent { direction, pages, rest } => {
                let values = pages.wait()?;
                let rest = rest.map(Pending::wait).transpose()?;
                match direction {
                    Direction::Write => Ok(values),
                    Direction::Read => Ok(complete(values, self.len, rest)),
                }
            }
            Way::Copied(parts) => {
                let mut values = room::<T>(self.len)?;
                for pending in parts {
                    let part = pending.wait()?;
                    let left = (self.len - values.len()).min(PART / size_of::<T>());
                    values.extend_from_slice(&cast_slice(part.as_bytes())[..left]);
                }
                Ok(values)
            }
        }
    }
}

/// Sets the vector's length to the whole pages that were read, and appends the elements of the last page.
fn complete<T: Pod>(values: Vec<T>, len: usize, rest: Option<AlignedBuffer>) -> Vec<T> {
    let whole = len * size_of::<T>() / ALIGNMENT * ALIGNMENT;
    // SAFETY: the read of these pages has succeeded, and a page holds a whole number of elements.
    let mut values = unsafe { filled(values, whole / size_of::<T>()) };
    if let Some(rest) = rest {
        values.extend_from_slice(&cast_slice(rest.as_bytes())[..len - values.len()]);
    }
    values
}

fn room<T>(len: usize) -> Result<Vec<T>, DiskError> {
    let mut values = vec![];
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    values.try_reserve_exact(len).map_err(|_| DiskError::Memory { bytes })?;
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;

    /// Three vectors, whose alignment depends on the allocator.
    fn vectors(len: usize) -> Vec<Vec<f32>> {
        (0..3).map(|seed| (0..len).map(|i| (i * 7 + seed) as f32).collect()).collect()
    }

    #[test]
    fn vectors_read_back_what_was_written() {
        let folder = tempfile::tempdir().expect("a folder");
        for (io_uring, bounce) in [(true, false), (true, true), (false, false)] {
            let options = Options { io_uring, bounce, block_size: 8192, queue_depth: 3, ..Options::default() };
            for len in [0, 1, 1023, 1024, 5000, (PART / 4) + 3] {
                let room = align(len as u64 * 4);
                let file = SwapFile::create(folder.path(), room + 4096, &options).expect("a file");
                for values in vectors(len) {
                    let mut page = AlignedBuffer::zeroed(room as usize).expect("memory");
                    page.as_f32_mut()[..len].copy_from_slice(&values);
                    page.set_len(room as usize);
                    file.write(4096, page, room as usize).wait().expect("written");
                    assert!(file.read_vec::<f32>(4096, len).expect("memory").wait().expect("read") == values);
                }
            }
        }
    }

    /// Allocates vectors until one begins on a page, whatever the allocator.
    fn on_pages(len: usize) -> Option<Vec<f32>> {
        // Common allocators place large vectors 16 bytes behind a page boundary and small ones anywhere, so one of 4096
        // small vectors begins on a page.
        (0..4096).map(|_| vec![0.0; len]).collect::<Vec<_>>().into_iter().find(|values| lies_on_pages(values))
    }

    #[test]
    fn page_aligned_vectors_are_transferred_in_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut tried = 0;
        let lens = [1024, 1030, 2048, 3001, 10_000];
        for (len, bounce) in lens.into_iter().flat_map(|len| [(len, false), (len, true)]) {
            let options = Options { bounce, block_size: 8192, queue_depth: 2, ..Options::default() };
            let file = SwapFile::create(folder.path(), 1 << 20, &options).expect("a file");
            assert_eq!(
                file.bounce_bytes(),
                if bounce && file.backend() == crate::Backend::IoUring { 2 * 8192 } else { 0 }
            );
            let Some(mut values) = on_pages(len) else { continue };
            tried += 1;
            values.iter_mut().enumerate().for_each(|(i, value)| *value = i as f32);
            let (at, expected) = (values.as_ptr(), values.clone());
            let mut values = file.write_vec(8192, values).expect("memory").wait().expect("written");
            assert!(values.as_ptr() == at && values == expected);
            values.fill(7.0);
            let values = file.read_over(8192, values).expect("memory").wait().expect("read");
            assert!(values.as_ptr() == at && values == expected);
        }
        assert!(tried > 0, "no vector began on a page");
    }

    #[test]
    fn errors_are_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = SwapFile::create(folder.path(), 8192, &Options::default()).expect("a file");
        let beyond = file.read_vec::<f32>(4096, 3000).expect("memory").wait().expect_err("beyond the end").to_string();
        assert!(beyond.contains("beyond the end of the file at 8192"), "{beyond}");
        assert!(file.read_vec::<u8>(0, usize::MAX).is_err());
    }
}
