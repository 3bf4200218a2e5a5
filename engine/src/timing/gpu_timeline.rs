//! Timeline of this rank's GPU. The host runs ahead of the GPU's streams, so the host's clock does not show when the
//! GPU works. Traces, `wall_clock_breakdown` and `flops_profiler` therefore take times from events on the streams.

use std::time::{Duration, Instant};

use zero_comm::{Communicator, from_each_rank};
use zero_cuda::{Span, Subject, Track, Transfer};
use zero_pipeline::Program;
use zero_pipeline::trace::{Process, Slice};

use crate::error::Error;

#[cfg(feature = "cuda")]
pub(crate) use zero_model::device::Timeline as GpuTimeline;

/// A type without values, because this program was built without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
pub(crate) enum GpuTimeline {}

#[cfg(not(feature = "cuda"))]
impl GpuTimeline {
    pub(crate) fn enter(&mut self, _: usize) -> candle_core::Result<()> {
        match *self {}
    }

    pub(crate) fn leave(&mut self) -> candle_core::Result<()> {
        match *self {}
    }

    pub(crate) fn take(&mut self) -> candle_core::Result<Vec<Span>> {
        match *self {}
    }
}

/// A span of a GPU's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuSpan {
    /// The stream.
    pub track: Track,
    /// For a transfer between ranks, its kind and size. For other work, the position, in the step's program, of the
    /// instruction that queued it.
    pub subject: Subject,
    /// Start, as time since the timeline's origin (see [`Span`](crate::timing::Span)).
    pub start: Duration,
    /// End, as time since the same origin.
    pub end: Duration,
}

impl GpuSpan {
    pub(crate) fn new(span: &Span, origin: Instant) -> Self {
        let since = |at: Instant| at.saturating_duration_since(origin);
        Self { track: span.track, subject: span.subject, start: since(span.start), end: since(span.end) }
    }
}

/// Number of integers that encode a span.
const NUMBERS: usize = 5;

fn numbers(span: &GpuSpan) -> [i64; NUMBERS] {
    let nanoseconds = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    let (kind, value) = match span.subject {
        Subject::Number(index) => (-1, index),
        Subject::Transfer { kind, bytes } => (kind as i64, bytes),
    };
    [span.track as i64, kind, value as i64, nanoseconds(span.start), nanoseconds(span.end)]
}

fn slice(numbers: &[i64], program: &Program) -> Option<Slice> {
    let [_, kind, value, start, end] = *numbers else { return None };
    let (name, category) = match usize::try_from(kind) {
        Err(_) => {
            let instruction = program.instructions.get(value as usize)?;
            (instruction.to_string(), instruction.kind())
        }
        Ok(kind) => {
            let kind = Transfer::ALL.get(kind)?.name();
            (format!("{kind} of {value} bytes"), kind)
        }
    };
    Some(Slice { name, category, start: start as f64 / 1e9, end: end as f64 / 1e9 })
}

/// Gathers the GPU timelines of all ranks, encoded for [`processes`]. Collective.
pub fn gathered(comm: &dyn Communicator, spans: &[GpuSpan]) -> Result<Vec<Vec<i64>>, Error> {
    Ok(from_each_rank(comm, spans.iter().flat_map(numbers).collect())?)
}

/// Converts the GPU timelines of all ranks to processes of a trace.
pub fn processes(gathered: &[Vec<i64>], programs: &[Program]) -> Vec<Process> {
    let of_rank = |(rank, (own, program)): (usize, (&Vec<i64>, &Program))| {
        let threads = Track::ALL.into_iter().filter_map(|track| {
            let of_track = own.chunks_exact(NUMBERS).filter(|numbers| numbers[0] == track as i64);
            let mut slices: Vec<Slice> = of_track.filter_map(|numbers| slice(numbers, program)).collect();
            slices.sort_by(|a, b| a.start.total_cmp(&b.start));
            (!slices.is_empty()).then(|| (track.name().to_string(), slices))
        });
        let threads: Vec<_> = threads.collect();
        (!threads.is_empty()).then(|| Process { name: format!("rank {rank}, its GPU"), rank, threads })
    };
    gathered.iter().zip(programs).enumerate().filter_map(of_rank).collect()
}

/// Seconds that this rank's GPU was busy, by kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Busy {
    /// Seconds in kernels.
    pub compute: f64,
    /// Seconds of copies between host and GPU.
    pub copies: f64,
    /// Seconds of transfers between GPUs.
    pub transfers: f64,
    /// Seconds of copies and transfers that overlapped with compute.
    pub hidden: f64,
}

/// Sums a timeline into busy seconds.
pub fn busy(spans: &[GpuSpan], program: &Program) -> Busy {
    let seconds = |span: &&GpuSpan| (span.start.as_secs_f64(), span.end.as_secs_f64());
    let computes = |span: &&GpuSpan| match span.subject {
        Subject::Number(index) if span.track == Track::Compute => {
            program.instructions.get(index).is_some_and(|instruction| !instruction.is_wait())
        }
        _ => false,
    };
    let of = |tracks: &[Track]| united(spans.iter().filter(|span| tracks.contains(&span.track)).map(|s| seconds(&s)));
    let compute = united(spans.iter().filter(computes).map(|span| seconds(&span)));
    let copies = of(&[Track::ToHost, Track::FromHost]);
    let transfers = of(&[Track::Collectives, Track::Sends, Track::Receives]);
    let beside = united(copies.iter().chain(&transfers).copied());
    Busy {
        compute: length(&compute),
        copies: length(&copies),
        transfers: length(&transfers),
        hidden: length(&common(&compute, &beside)),
    }
}

/// Merges overlapping and touching intervals. The result is sorted.
pub fn united(intervals: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut all: Vec<(f64, f64)> = intervals.collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut united: Vec<(f64, f64)> = vec![];
    for (start, end) in all {
        match united.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => united.push((start, end)),
        }
    }
    united
}

/// Intersects two sorted lists of disjoint intervals.
pub fn common(a: &[(f64, f64)], b: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let (mut i, mut j, mut both) = (0, 0, vec![]);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        let (start, end) = (x.0.max(y.0), x.1.min(y.1));
        if start < end {
            both.push((start, end));
        }
        if x.1 < y.1 { i += 1 } else { j += 1 }
    }
    both
}

/// Returns the total length of disjoint intervals.
pub fn length(intervals: &[(f64, f64)]) -> f64 {
    // The `sum` of an empty iterator of floats is −0.0.
    intervals.iter().fold(0.0, |sum, (start, end)| sum + end - start)
}

#[cfg(test)]
mod tests {
    use zero_pipeline::Instruction;

    use super::*;

    fn span(track: Track, subject: Subject, start: u64, end: u64) -> GpuSpan {
        GpuSpan { track, subject, start: Duration::from_secs(start), end: Duration::from_secs(end) }
    }

    fn program() -> Program {
        let instructions =
            vec![Instruction::Forward { layer: 0, micro_batch: 0 }, Instruction::AwaitGather { segments: vec![1] }];
        Program { instructions, micro_batches: 1 }
    }

    #[test]
    fn overlap_is_counted_once() {
        let gather = Subject::Transfer { kind: Transfer::AllGather, bytes: 64 };
        let spans = [
            span(Track::Compute, Subject::Number(0), 0, 10),
            // A wait is not compute, so nothing overlaps with it.
            span(Track::Compute, Subject::Number(1), 10, 14),
            span(Track::Compute, Subject::Number(0), 14, 20),
            span(Track::ToHost, Subject::Number(0), 4, 8),
            span(Track::Collectives, gather, 6, 14),
            span(Track::FromHost, Subject::Number(1), 19, 22),
        ];
        let found = busy(&spans, &program());
        assert_eq!(found, Busy { compute: 16.0, copies: 7.0, transfers: 8.0, hidden: 7.0 });
        assert_eq!(busy(&[], &program()), Busy::default());
    }

    #[test]
    fn spans_round_trip_with_their_names() {
        let spans = [
            span(Track::FromHost, Subject::Number(1), 2, 3),
            span(Track::Receives, Subject::Transfer { kind: Transfer::Receive, bytes: 12 }, 1, 2),
        ];
        let names: Vec<_> = spans.iter().map(|span| slice(&numbers(span), &program()).unwrap()).collect();
        assert_eq!(names[0].name, Instruction::AwaitGather { segments: vec![1] }.to_string());
        assert_eq!((names[1].name.as_str(), names[1].start, names[1].end), ("receive of 12 bytes", 1.0, 2.0));
        for kind in Transfer::ALL {
            let transfer = numbers(&span(kind.track(), Subject::Transfer { kind, bytes: 1 }, 0, 1));
            assert_eq!(slice(&transfer, &program()).unwrap().category, kind.name());
            assert_eq!(Track::ALL[transfer[0] as usize], kind.track());
        }
        // An index outside the program has no name.
        let odd = span(Track::Compute, Subject::Number(7), 0, 1);
        assert_eq!(slice(&numbers(&odd), &program()), None);
    }
}
