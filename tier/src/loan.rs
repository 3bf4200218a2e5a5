//! Memory on loan to the disk: a buffer out of reach of everyone but those who read or write its parts.
//!
//! The kernel, or another thread, uses the memory of a request while the program goes on. Rust's borrows cannot say that, so this
//! file does, with a count: every part keeps the buffer, parts do not overlap, and the buffer comes back when no part is left. It
//! does not matter who forgets what: a part that is leaked leaks its buffer.

#![allow(unsafe_code)]

use std::sync::Arc;

use crate::buffer::AlignedBuffer;

/// A buffer whose parts are given out, each once, from its start.
pub(crate) struct Loan {
    /// Not touched until `end` has found it without any part.
    buffer: Arc<AlignedBuffer>,
    start: *mut u8,
    /// Bytes that were given out.
    cut: usize,
}

// SAFETY: `start` points into the memory of `buffer`, which may be used and freed on any thread.
unsafe impl Send for Loan {}

impl Loan {
    pub(crate) fn new(mut buffer: AlignedBuffer) -> Loan {
        let start = buffer.start();
        Loan { buffer: Arc::new(buffer), start, cut: 0 }
    }

    /// The next `len` bytes, or as many as are left.
    pub(crate) fn cut(&mut self, len: usize) -> Part {
        let len = len.min(self.buffer.capacity() - self.cut);
        // `cut` never exceeds the capacity, so this points into the buffer or to its end.
        let start = self.start.wrapping_add(self.cut);
        self.cut += len;
        Part { _buffer: Arc::clone(&self.buffer), start, len }
    }

    /// The buffer, if no part of it is left.
    pub(crate) fn end(self) -> Option<AlignedBuffer> {
        Arc::into_inner(self.buffer)
    }
}

/// Some bytes of a buffer on loan, which nobody else has.
pub(crate) struct Part {
    /// Keeps the memory.
    _buffer: Arc<AlignedBuffer>,
    start: *mut u8,
    len: usize,
}

// SAFETY: as for `Loan`; parts of one buffer do not overlap.
unsafe impl Send for Part {}

impl Part {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// For the kernel, which may read and write `len` bytes there for as long as this part lives.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: the bytes are in a buffer that this part keeps, and were written when it was made; nobody else has them.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_bytes`, and `&mut self` is the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// Leaves the first `bytes` out, or all.
    pub(crate) fn skip(&mut self, bytes: usize) {
        let bytes = bytes.min(self.len);
        self.start = self.start.wrapping_add(bytes);
        self.len -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_the_buffer_comes_back_without_any() {
        let mut loan = Loan::new(AlignedBuffer::zeroed(8192).expect("memory"));
        let (mut first, mut second, rest) = (loan.cut(4096), loan.cut(5000), loan.cut(1));
        assert_eq!((first.len(), second.len(), rest.len()), (4096, 4096, 0));
        std::thread::scope(|scope| {
            scope.spawn(|| first.as_bytes_mut().fill(1));
            second.skip(96);
            second.as_bytes_mut().fill(2);
        });
        assert!(first.as_bytes().iter().all(|&byte| byte == 1));
        drop((first, second, rest));
        let buffer = loan.end().expect("all parts are gone");
        assert_eq!([buffer.as_bytes()[4095], buffer.as_bytes()[4096], buffer.as_bytes()[4192]], [1, 0, 2]);
    }

    #[test]
    fn a_part_keeps_the_memory() {
        let mut loan = Loan::new(AlignedBuffer::zeroed(4096).expect("memory"));
        let mut part = loan.cut(4096);
        assert!(loan.end().is_none());
        part.as_bytes_mut().fill(3);
        part.skip(5000);
        assert!(part.as_bytes().is_empty());
    }
}
