//! The order of requests: cuts them into blocks, and delays a request that overlaps an earlier one.
//!
//! When two requests overlap and at least one writes, the later one starts after the earlier one completes. A read
//! therefore sees every write requested before it and none requested after. Other requests start in arrival order,
//! several at a time, and overtake requests that wait. Dependencies are found on arrival: a new request counts the
//! unfinished requests that it must wait for. Only a few are unfinished at a time, so a list is fast enough.
//!
//! This module knows no disk and no thread; both backends use it.

use std::collections::VecDeque;
use std::ops::Range;

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// A piece of a request. Pieces are handed out in the order of their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Id of the request.
    pub(crate) id: u64,
    pub(crate) direction: Direction,
    /// Offset in the file.
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// Unfinished requests, each with a payload that is returned when the request completes.
pub(crate) struct Schedule<T> {
    block_size: u64,
    requests: VecDeque<Request<T>>,
    next_id: u64,
}

struct Request<T> {
    id: u64,
    direction: Direction,
    range: Range<u64>,
    /// Offset at which the next piece begins.
    next: u64,
    /// Number of pieces in flight.
    out: usize,
    /// Number of earlier requests that must complete before this one starts.
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
    /// Creates an empty schedule with pieces of `block_size` bytes; the last piece of a request may be shorter.
    pub(crate) fn new(block_size: u64) -> Schedule<T> {
        Schedule { block_size: block_size.max(1), requests: VecDeque::new(), next_id: 0 }
    }

    /// Adds a request behind all others. The range must not be empty.
    pub(crate) fn add(&mut self, direction: Direction, range: Range<u64>, payload: T) {
        debug_assert!(!range.is_empty());
        let behind = self.requests.iter().filter(|earlier| earlier.conflicts(direction, &range)).count();
        let (id, next) = (self.next_id, range.start);
        self.requests.push_back(Request { id, direction, range, next, out: 0, behind, payload });
        self.next_id += 1;
    }

    /// Returns the next piece that may run, if any, and the payload of its request.
    pub(crate) fn next(&mut self) -> Option<(Piece, &mut T)> {
        let request =
            self.requests.iter_mut().find(|request| request.behind == 0 && request.next < request.range.end)?;
        let (at, len) = (request.next, self.block_size.min(request.range.end - request.next));
        request.next += len;
        request.out += 1;
        Some((Piece { id: request.id, direction: request.direction, at, len }, &mut request.payload))
    }

    /// Returns the payload of a request, unless it has completed.
    pub(crate) fn payload(&mut self, id: u64) -> Option<&mut T> {
        self.requests.iter_mut().find(|request| request.id == id).map(|request| &mut request.payload)
    }

    /// Stops a request: hands out no more of its pieces. The request completes once its pieces in flight have
    /// completed.
    pub(crate) fn stop(&mut self, id: u64) {
        if let Some(request) = self.requests.iter_mut().find(|request| request.id == id) {
            request.next = request.range.end;
        }
    }

    /// Records that a piece has completed. If it was the last of its request, removes the request, unblocks later ones
    /// and returns the payload.
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

    /// Hands out no more pieces and returns the payloads of requests without a piece in flight. The other requests
    /// complete once their pieces in flight have completed. Calls `cut_off` for each of these other requests that had
    /// more pieces left.
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

    /// Returns the payloads of all requests, including those with pieces in flight, whose completion nobody will
    /// report.
    pub(crate) fn abandon(&mut self) -> Vec<T> {
        std::mem::take(&mut self.requests).into_iter().map(|request| request.payload).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Direction::{Read, Write};

    /// Takes all pieces that may run now, and returns the names of their requests.
    fn out(schedule: &mut Schedule<char>) -> String {
        std::iter::from_fn(|| schedule.next().map(|(_, &mut name)| name)).collect()
    }

    #[test]
    fn requests_are_cut_in_order_and_complete_with_their_last_piece() {
        let mut schedule = Schedule::new(10);
        schedule.add(Read, 5..28, 'a');
        let pieces: Vec<(u64, u64)> =
            std::iter::from_fn(|| schedule.next().map(|(piece, _)| (piece.at, piece.len))).collect();
        assert_eq!(pieces, [(5, 10), (15, 10), (25, 3)]);
        assert_eq!([schedule.done(0), schedule.done(0), schedule.done(0)], [None, None, Some('a')]);
        assert_eq!((schedule.done(0), schedule.payload(0)), (None, None));
    }

    #[test]
    fn overlapping_writes_wait_and_other_requests_pass() {
        let mut schedule = Schedule::new(100);
        schedule.add(Write, 0..100, 'a');
        schedule.add(Read, 99..150, 'b'); // behind a
        schedule.add(Write, 140..160, 'c'); // behind b
        schedule.add(Read, 100..140, 'd'); // overlaps only the read b, so it does not wait
        schedule.add(Read, 150..170, 'e'); // behind c
        assert_eq!(out(&mut schedule), "ad");
        assert_eq!((schedule.done(3), out(&mut schedule).as_str()), (Some('d'), ""));
        assert_eq!((schedule.done(0), out(&mut schedule).as_str()), (Some('a'), "b"));
        assert_eq!((schedule.done(1), out(&mut schedule).as_str()), (Some('b'), "c"));
        assert_eq!((schedule.done(2), out(&mut schedule).as_str()), (Some('c'), "e"));
    }

    #[test]
    fn a_stopped_request_completes_with_its_pieces_in_flight() {
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
    fn closing_returns_requests_that_have_not_started() {
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
