//! Memory on loan to the disk: a buffer out of reach of everyone but those who read or write its parts.
//!
//! Lent are aligned buffers, and vectors whose elements happen to begin on a page, with which no copy is needed.
//!
//! The kernel, or another thread, uses the memory of a request while the program goes on. Rust's borrows cannot say that, so this
//! file does, with a count: every part keeps the buffer, parts do not overlap, and the buffer comes back when no part is left. It
//! does not matter who forgets what: a part that is leaked leaks its buffer.

#![allow(unsafe_code)]

use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::Arc;

use bytemuck::Pod;

use crate::buffer::AlignedBuffer;
use crate::schedule::Direction;

/// Memory that can be lent.
///
/// # Safety
/// The bytes stay where they are when their owner is moved, and nothing but the owner leads to them.
pub(crate) unsafe trait Lend: Send + 'static {
    /// The first byte.
    fn start(&mut self) -> *mut u8;
    /// Bytes from there on that the owner has room for.
    fn room(&self) -> usize;
    /// Those of them that have been written at some time.
    fn written(&self) -> usize;
    /// Whether its pages may be small.
    fn is_scattered(&self) -> bool;
}

// SAFETY: its pages are on the heap or a mapping.
unsafe impl Lend for AlignedBuffer {
    fn start(&mut self) -> *mut u8 {
        AlignedBuffer::start(self)
    }

    fn room(&self) -> usize {
        self.capacity()
    }

    fn written(&self) -> usize {
        self.capacity()
    }

    fn is_scattered(&self) -> bool {
        false
    }
}

// SAFETY: its elements are on the heap.
unsafe impl<T: Pod + Send> Lend for Vec<T> {
    fn start(&mut self) -> *mut u8 {
        self.as_mut_ptr().cast()
    }

    fn room(&self) -> usize {
        self.capacity() * size_of::<T>()
    }

    fn written(&self) -> usize {
        self.len() * size_of::<T>()
    }

    fn is_scattered(&self) -> bool {
        true
    }
}

/// Says that the first `len` elements are there, after the disk has written their bytes.
///
/// # Safety
/// It has, all of them.
pub(crate) unsafe fn filled<T: Pod>(mut values: Vec<T>, len: usize) -> Vec<T> {
    debug_assert!(len <= values.capacity());
    // SAFETY: they are written, by the caller's promise, and any bytes are a `T`.
    unsafe { values.set_len(len) };
    values
}

/// A buffer whose parts are given out, each once, from its start.
pub(crate) struct Loan {
    /// Not touched until `end` has found it without any part.
    owner: Arc<Box<dyn Any + Send>>,
    start: *mut u8,
    /// Bytes that may be given out, and that were.
    room: usize,
    cut: usize,
    direction: Direction,
    scattered: bool,
}

// SAFETY: `start` points into the memory of `owner`, which may be used and freed on any thread.
unsafe impl Send for Loan {}

impl Loan {
    /// To be read into, or written out of.
    pub(crate) fn new<B: Lend>(mut buffer: B, direction: Direction) -> Loan {
        let room = match direction {
            Direction::Read => buffer.room(),
            Direction::Write => buffer.written(),
        };
        let (start, scattered) = (buffer.start(), buffer.is_scattered());
        Loan { owner: Arc::new(Box::new(buffer)), start, room, cut: 0, direction, scattered }
    }

    /// The next `len` bytes, or as many as are left.
    pub(crate) fn cut(&mut self, len: usize) -> Part {
        let len = len.min(self.room - self.cut);
        // `cut` never exceeds the capacity, so this points into the buffer or to its end.
        let start = self.start.wrapping_add(self.cut);
        self.cut += len;
        Part { _owner: Arc::clone(&self.owner), start, len, direction: self.direction, scattered: self.scattered }
    }

    /// What was lent, if no part of it is left.
    pub(crate) fn end(self) -> Option<Box<dyn Any + Send>> {
        Arc::into_inner(self.owner)
    }
}

/// Some bytes of a buffer on loan, which nobody else has.
pub(crate) struct Part {
    /// Keeps the memory.
    _owner: Arc<Box<dyn Any + Send>>,
    start: *mut u8,
    len: usize,
    direction: Direction,
    scattered: bool,
}

// SAFETY: as for `Loan`; parts of one buffer do not overlap.
unsafe impl Send for Part {}

impl Part {
    /// Whether its pages may be small.
    pub(crate) fn is_scattered(&self) -> bool {
        self.scattered
    }

    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// For the kernel, which may read and write `len` bytes there for as long as this part lives.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start
    }

    /// The bytes that are to be written out; none of what is to be read into, which may never have been written.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self.direction {
            Direction::Read => &[],
            // SAFETY: the bytes are in memory that this part keeps, and were written before it was lent; nobody else has them.
            Direction::Write => unsafe { std::slice::from_raw_parts(self.start, self.len) },
        }
    }

    /// Room for bytes that are read.
    pub(crate) fn as_room(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: as in `as_bytes`, `&mut self` is the only way to them, and they need not have been written.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.len) }
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

    fn fill(part: &mut Part, byte: u8) {
        part.as_room().fill(MaybeUninit::new(byte));
    }

    #[test]
    fn parts_are_apart_and_the_buffer_comes_back_without_any() {
        let mut loan = Loan::new(AlignedBuffer::zeroed(8192).expect("memory"), Direction::Write);
        let (mut first, mut second, rest) = (loan.cut(4096), loan.cut(5000), loan.cut(1));
        assert_eq!((first.len(), second.len(), rest.len()), (4096, 4096, 0));
        std::thread::scope(|scope| {
            scope.spawn(|| fill(&mut first, 1));
            second.skip(96);
            fill(&mut second, 2);
        });
        assert!(first.as_bytes().iter().all(|&byte| byte == 1));
        drop((first, second, rest));
        let buffer = loan.end().expect("all parts are gone").downcast::<AlignedBuffer>().expect("what was lent");
        assert_eq!([buffer.as_bytes()[4095], buffer.as_bytes()[4096], buffer.as_bytes()[4192]], [1, 0, 2]);
    }

    #[test]
    fn a_part_keeps_the_memory() {
        let mut loan = Loan::new(AlignedBuffer::zeroed(4096).expect("memory"), Direction::Write);
        let mut part = loan.cut(4096);
        assert!(loan.end().is_none());
        fill(&mut part, 3);
        part.skip(5000);
        assert!(part.as_bytes().is_empty());
    }

    #[test]
    fn of_a_vector_what_was_written_can_be_written_out_and_all_of_it_read_into() {
        let values = || {
            let mut values: Vec<f32> = Vec::with_capacity(10);
            values.push(1.0);
            values
        };
        let mut out = Loan::new(values(), Direction::Write);
        assert_eq!(out.cut(100).as_bytes(), 1f32.to_ne_bytes());
        let mut room = Loan::new(values(), Direction::Read);
        let mut part = room.cut(40);
        assert_eq!((part.len(), part.as_bytes().len()), (40, 0));
        fill(&mut part, 0);
        drop(part);
        let values = *room.end().expect("no part is left").downcast::<Vec<f32>>().expect("what was lent");
        // SAFETY: all forty bytes were filled.
        assert_eq!(unsafe { filled(values, 10) }, [0.0; 10]);
    }
}
