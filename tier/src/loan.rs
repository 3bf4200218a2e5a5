//! Buffers on loan to the disk. While a buffer is lent, its memory is accessible only through its parts, which the disk
//! reads or writes.
//!
//! A loan takes an aligned buffer, or a vector whose first element happens to be at a page boundary. Such a vector
//! needs no copy into an aligned buffer.
//!
//! The kernel or another thread uses the memory of a request while the program continues. Rust's borrows cannot express
//! that, so this file uses a reference count: every part keeps the buffer alive, parts do not overlap, and the buffer
//! returns to its owner only when no part is left. Leaking is safe: a leaked part leaks its buffer.

#![allow(unsafe_code)]

use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::Arc;

use bytemuck::Pod;

use crate::buffer::AlignedBuffer;
use crate::schedule::Direction;

/// Memory that can be lent to the disk.
///
/// # Safety
/// The bytes must keep their address when the owner moves, and must be reachable only through the owner.
pub(crate) unsafe trait Lend: Send + 'static {
    /// Returns a pointer to the first byte.
    fn start(&mut self) -> *mut u8;
    /// Returns the number of bytes allocated from the first byte on.
    fn room(&self) -> usize;
    /// Returns how many of these bytes are initialized.
    fn written(&self) -> usize;
    /// Returns whether even a large buffer of this type may have small pages.
    fn is_scattered(&self) -> bool;
}

// SAFETY: the pages are on the heap or in a mapping, so moving the buffer does not move them.
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

// SAFETY: the elements are on the heap, so moving the vector does not move them.
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

/// Sets the length to `len` after the disk has written the elements' bytes.
///
/// # Safety
/// All bytes of the first `len` elements must be initialized.
pub(crate) unsafe fn filled<T: Pod>(mut values: Vec<T>, len: usize) -> Vec<T> {
    debug_assert!(len <= values.capacity());
    // SAFETY: the caller promises that the elements are initialized, and any bytes are a valid `T`.
    unsafe { values.set_len(len) };
    values
}

/// A lent buffer, which hands out each of its parts once, from the start.
pub(crate) struct Loan {
    /// The buffer. Not accessed until `end` has found that no part is left.
    owner: Arc<Box<dyn Any + Send>>,
    start: *mut u8,
    /// Number of bytes that may be handed out; `cut` is the number of bytes already handed out.
    room: usize,
    cut: usize,
    direction: Direction,
    scattered: bool,
}

// SAFETY: `start` points into the memory of `owner`, which is `Send`: any thread may use and free it.
unsafe impl Send for Loan {}

impl Loan {
    /// Lends `buffer` for a transfer in `direction`. Reads may use its whole capacity, writes only initialized bytes.
    pub(crate) fn new<B: Lend>(mut buffer: B, direction: Direction) -> Loan {
        let room = match direction {
            Direction::Read => buffer.room(),
            Direction::Write => buffer.written(),
        };
        let (start, scattered) = (buffer.start(), buffer.is_scattered());
        Loan { owner: Arc::new(Box::new(buffer)), start, room, cut: 0, direction, scattered }
    }

    /// Hands out the next `len` bytes, or the rest if fewer remain.
    pub(crate) fn cut(&mut self, len: usize) -> Part {
        let len = len.min(self.room - self.cut);
        // `cut` never exceeds `room`, so the pointer is inside the buffer or at its end.
        let start = self.start.wrapping_add(self.cut);
        self.cut += len;
        Part { _owner: Arc::clone(&self.owner), start, len, direction: self.direction, scattered: self.scattered }
    }

    /// Returns the buffer if no part of it is left.
    pub(crate) fn end(self) -> Option<Box<dyn Any + Send>> {
        Arc::into_inner(self.owner)
    }
}

/// A range of a lent buffer that no other part overlaps.
pub(crate) struct Part {
    /// Keeps the memory alive.
    _owner: Arc<Box<dyn Any + Send>>,
    start: *mut u8,
    len: usize,
    direction: Direction,
    scattered: bool,
}

// SAFETY: as for `Loan`; in addition, parts of one buffer do not overlap.
unsafe impl Send for Part {}

impl Part {
    /// Returns whether the lent buffer [is scattered](Lend::is_scattered).
    pub(crate) fn is_scattered(&self) -> bool {
        self.scattered
    }

    pub(crate) fn direction(&self) -> Direction {
        self.direction
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns a pointer for the kernel, which may read and write `len` bytes there while this part is alive.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start
    }

    /// Returns the bytes to write to the disk. Empty for a read, whose memory may be uninitialized.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self.direction {
            Direction::Read => &[],
            // SAFETY: this part keeps the memory alive, the bytes were initialized before the loan, and no other part
            // overlaps them.
            Direction::Write => unsafe { std::slice::from_raw_parts(self.start, self.len) },
        }
    }

    /// Returns the memory to read into.
    pub(crate) fn as_room(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: as in `as_bytes`; `&mut self` is the only access, and `MaybeUninit` needs no initialized bytes.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.len) }
    }

    /// Drops the first `bytes` bytes of the part, or the whole part if it is shorter.
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
    fn parts_do_not_overlap_and_the_buffer_returns_after_the_last() {
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
    fn a_part_keeps_the_memory_alive() {
        let mut loan = Loan::new(AlignedBuffer::zeroed(4096).expect("memory"), Direction::Write);
        let mut part = loan.cut(4096);
        assert!(loan.end().is_none());
        fill(&mut part, 3);
        part.skip(5000);
        assert!(part.as_bytes().is_empty());
    }

    #[test]
    fn writes_use_the_length_of_a_vector_and_reads_its_capacity() {
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
