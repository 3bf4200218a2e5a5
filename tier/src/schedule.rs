//! What the disk does next: cuts requests into blocks, and lets one that overlaps an earlier one wait for it.
//!
//! Order: of two requests that overlap, unless both read, the later begins when the earlier is done. So a read sees what was
//! written before it was asked for, and nothing of what was written after. Requests that do not overlap go in the order in which
//! they came, several at a time, past those that wait. This is found when a request comes: it counts the unfinished ones that it
//! must wait for, of which there are a few, so a list is the plainest structure and fast enough.
//!
//! No disk and no thread: the same for all that carry out blocks.

use std::collections::VecDeque;
use std::ops::Range;

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// A part of a request, in the order of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Of the request.
    pub(crate) id: u64,
    pub(crate) direction: Direction,
    /// Offset in the file.
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// Requests that are not done, each with a `T` that comes back when it is.
pub(crate) struct Schedule<T> {
    block_size: u64,
    requests: VecDeque<Request<T>>,
    next_id: u64,
}

struct Request<T> {
    id: u64,
    direction: Direction,
    range: Range<u64>,
    /// Where its next piece begins.
    next: u64,
    /// Pieces that were given out and are not done.
    out: usize,
    /// Earlier requests that must be done before it begins.
    behind: usize,
    payload: T,
}

impl<T> Request<T> {
    fn conflicts(&self, direction: Direction, range: &Range<u64>) -> bool {
        let overlap = self.range.start < range.end && range.start < self.range.end;
        overlap && (self.direction == Direction::Write || direction == Direction::Write)
    }
}

impl<T> Schedule<T> {
    /// Pieces are of `block_size` bytes; the last of a request may be shorter.
    pub(crate) fn new(block_size: u64) -> Schedule<T> {
        Schedule { block_size: block_size.max(1), requests: VecDeque::new(), next_id: 0 }
    }

    /// Adds a request behind all others. The range is not empty.
    pub(crate) fn add(&mut self, direction: Direction, range: Range<u64>, payload: T) {
        debug_assert!(!range.is_empty());
        let behind = self.requests.iter().filter(|earlier| earlier.conflicts(direction, &range)).count();
        let (id, next) = (self.next_id, range.start);
        self.requests.push_back(Request { id, direction, range, next, out: 0, behind, payload });
        self.next_id += 1;
    }

    /// The next piece that may be carried out, if there is one, and what its request carries.
    pub(crate) fn next(&mut self) -> Option<(Piece, &mut T)> {
        let request =
            self.requests.iter_mut().find(|request| request.behind == 0 && request.next < request.range.end)?;
        let (at, len) = (request.next, self.block_size.min(request.range.end - request.next));
        request.next += len;
        request.out += 1;
        Some((Piece { id: request.id, direction: request.direction, at, len }, &mut request.payload))
    }

    /// What the request of a piece carries, unless it is done.
    pub(crate) fn payload(&mut self, id: u64) -> Option<&mut T> {
        self.requests.iter_mut().find(|request| request.id == id).map(|request| &mut request.payload)
    }

    /// Gives out no more pieces of a request: it is done with those that are out.
    pub(crate) fn stop(&mut self, id: u64) {
        if let Some(request) = self.requests.iter_mut().find(|request| request.id == id) {
            request.next = request.range.end;
        }
    }

    /// A piece is done. If its request is, it is gone from here, and others may begin.
    pub(crate) fn done(&mut self, id: u64) -> Option<T> {
        let place = self.requests.iter().position(|request| request.id == id)?;
        let request = &mut self.requests[place];
        request.out -= 1;
        if request.out > 0 || request.next < request.range.end {
            return None;
        }
        let request = self.requests.remove(place)?;
        for later in self.requests.iter_mut().skip(place) {
            later.behind -= usize::from(request.conflicts(later.direction, &later.range));
        }
        Some(request.payload)
    }

    /// Gives out nothing more. Requests of which no piece is out come back; of the others, `cut_off` is told of those that had
    /// pieces left, and they are done when what is out is.
    pub(crate) fn close(&mut self, mut cut_off: impl FnMut(&mut T)) -> Vec<T> {
        let (out, idle): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.requests).into_iter().partition(|request| request.out > 0);
        self.requests = out.into();
        for request in &mut self.requests {
            if request.next < request.range.end {
                request.next = request.range.end;
                cut_off(&mut request.payload);
            }
        }
        idle.into_iter().map(|request| request.payload).collect()
    }

    /// All requests, also those of which pieces are out: nobody will say that these are done.
    pub(crate) fn abandon(&mut self) -> Vec<T> {
        std::mem::take(&mut self.requests).into_iter().map(|request| request.payload).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Direction::{Read, Write};

    /// The ids of all pieces that may be carried out now.
    fn out(schedule: &mut Schedule<char>) -> String {
        std::iter::from_fn(|| schedule.next().map(|(_, &mut name)| name)).collect()
    }

    #[test]
    fn requests_are_cut_in_order_and_done_with_their_last_piece() {
        let mut schedule = Schedule::new(10);
        schedule.add(Read, 5..28, 'a');
        let pieces: Vec<(u64, u64)> =
            std::iter::from_fn(|| schedule.next().map(|(piece, _)| (piece.at, piece.len))).collect();
        assert_eq!(pieces, [(5, 10), (15, 10), (25, 3)]);
        assert_eq!([schedule.done(0), schedule.done(0), schedule.done(0)], [None, None, Some('a')]);
        assert_eq!((schedule.done(0), schedule.payload(0)), (None, None));
    }

    #[test]
    fn what_overlaps_a_write_waits_and_the_rest_goes_past() {
        let mut schedule = Schedule::new(100);
        schedule.add(Write, 0..100, 'a');
        schedule.add(Read, 99..150, 'b'); // behind a
        schedule.add(Write, 140..160, 'c'); // behind b
        schedule.add(Read, 100..140, 'd'); // overlaps the read b, which is no conflict
        schedule.add(Read, 150..170, 'e'); // behind c
        assert_eq!(out(&mut schedule), "ad");
        assert_eq!((schedule.done(3), out(&mut schedule).as_str()), (Some('d'), ""));
        assert_eq!((schedule.done(0), out(&mut schedule).as_str()), (Some('a'), "b"));
        assert_eq!((schedule.done(1), out(&mut schedule).as_str()), (Some('b'), "c"));
        assert_eq!((schedule.done(2), out(&mut schedule).as_str()), (Some('c'), "e"));
    }

    #[test]
    fn a_stopped_request_is_done_with_what_is_out() {
        let mut schedule = Schedule::new(10);
        schedule.add(Write, 0..100, 'a');
        schedule.add(Read, 0..10, 'b');
        for _ in 0..2 {
            schedule.next().expect("a piece of a");
        }
        schedule.stop(0);
        assert!(schedule.next().is_none());
        assert_eq!([schedule.done(0), schedule.done(0)], [None, Some('a')]);
        assert_eq!(out(&mut schedule), "b");
    }

    #[test]
    fn closing_gives_back_what_has_not_begun() {
        let mut schedule = Schedule::new(10);
        for (at, name) in [(0, 'a'), (100, 'b'), (200, 'c')] {
            schedule.add(Read, at..at + 15, name);
        }
        for _ in 0..3 {
            schedule.next().expect("two pieces of a, one of b");
        }
        let mut cut_off = vec![];
        assert_eq!(schedule.close(|&mut name| cut_off.push(name)), ['c']);
        assert_eq!((cut_off, schedule.next()), (vec!['b'], None));
        assert_eq!((schedule.done(1), schedule.done(0)), (Some('b'), None));
        assert_eq!((schedule.abandon(), schedule.done(0)), (vec!['a'], None));
    }
}
