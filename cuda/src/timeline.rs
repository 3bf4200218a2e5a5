//! When what is on the streams of a device began and ended, by the device's own clock.

use std::time::Instant;

/// What a stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Track {
    /// Kernels, and the waits between them.
    Compute,
    /// Copies to the memory of the host.
    ToHost,
    /// Copies from there.
    FromHost,
    /// What all ranks of a group take part in.
    Collectives,
    /// Messages to another rank.
    Sends,
    /// Messages from another rank.
    Receives,
}

impl Track {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::Compute, Self::ToHost, Self::FromHost, Self::Collectives, Self::Sends, Self::Receives];

    /// Its name in traces.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::ToHost => "copies to the host",
            Self::FromHost => "copies from the host",
            Self::Collectives => "collectives",
            Self::Sends => "sends",
            Self::Receives => "receives",
        }
    }
}

/// What ranks do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// All have the reduction of what all had.
    AllReduce,
    /// All have what one had.
    Broadcast,
    /// All have what each had.
    AllGather,
    /// Each has a part of the reduction.
    ReduceScatter,
    /// To another rank.
    Send,
    /// From another rank.
    Receive,
}

impl Transfer {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 6] =
        [Self::AllReduce, Self::Broadcast, Self::AllGather, Self::ReduceScatter, Self::Send, Self::Receive];

    /// Its name in traces.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }

    /// The stream that it is on.
    #[must_use]
    pub fn track(self) -> Track {
        match self {
            Self::AllReduce | Self::Broadcast | Self::AllGather | Self::ReduceScatter => Track::Collectives,
            Self::Send => Track::Sends,
            Self::Receive => Track::Receives,
        }
    }
}

/// What it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// What was put on a stream while the host was at this.
    Number(usize),
    /// What ranks did together.
    Transfer {
        /// Which.
        kind: Transfer,
        /// Of this rank's largest buffer.
        bytes: usize,
    },
}

/// Something that took a device's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// On which stream.
    pub track: Track,
    /// What.
    pub subject: Subject,
    /// When the stream came to it.
    pub start: Instant,
    /// When it was done.
    pub end: Instant,
}

#[cfg(feature = "cuda")]
pub use recorder::{Begun, Recorder};

#[cfg(feature = "cuda")]
mod recorder {
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};

    use super::{Span, Subject, Track, Transfer};
    use crate::{CudaError, Device, Event, Stream};

    /// Puts events around what goes on a device's streams, while it is told to.
    #[derive(Debug)]
    pub struct Recorder {
        device: Arc<Device>,
        /// Has nothing to do, so that an event on it happens at once.
        idle: Stream,
        state: Mutex<State>,
    }

    #[derive(Debug)]
    struct State {
        anchor: Arc<Anchor>,
        /// What the host is at; nothing is recorded without.
        number: Option<usize>,
        ended: Vec<(Begun, Event)>,
    }

    /// A moment that both clocks know.
    #[derive(Debug)]
    struct Anchor {
        event: Event,
        at: Instant,
    }

    /// What has begun, or will.
    #[derive(Debug)]
    pub struct Begun {
        track: Track,
        subject: Subject,
        start: Event,
        /// Milliseconds from there fit a float while it is not long ago.
        anchor: Arc<Anchor>,
    }

    impl Anchor {
        fn new(device: &Arc<Device>, idle: &Stream) -> Result<Arc<Anchor>, CudaError> {
            let event = Event::timed(device)?;
            let before = Instant::now();
            idle.record(&event)?;
            event.wait()?;
            Ok(Arc::new(Anchor { event, at: before + before.elapsed() / 2 }))
        }
    }

    impl Recorder {
        /// One that records nothing yet.
        ///
        /// # Errors
        /// What the driver says.
        pub fn new(device: &Arc<Device>) -> Result<Arc<Recorder>, CudaError> {
            let idle = Stream::new(device)?;
            let state = State { anchor: Anchor::new(device, &idle)?, number: None, ended: vec![] };
            Ok(Arc::new(Recorder { device: Arc::clone(device), idle, state: Mutex::new(state) }))
        }

        fn state(&self) -> MutexGuard<'_, State> {
            self.state.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// What goes on streams from now on belongs to this number. Without one nothing is recorded.
        pub fn set_number(&self, number: Option<usize>) {
            self.state().number = number;
        }

        /// In front of something on a stream, if it is to be recorded.
        ///
        /// # Errors
        /// What the driver says.
        pub fn begin(&self, stream: &Stream, track: Track) -> Result<Option<Begun>, CudaError> {
            self.begin_as(stream, track, Subject::Number)
        }

        /// The same of what ranks do together, which may begin when the host is at something else.
        ///
        /// # Errors
        /// What the driver says.
        pub fn begin_transfer(
            &self,
            stream: &Stream,
            kind: Transfer,
            bytes: usize,
        ) -> Result<Option<Begun>, CudaError> {
            self.begin_as(stream, kind.track(), |_| Subject::Transfer { kind, bytes })
        }

        fn begin_as(
            &self,
            stream: &Stream,
            track: Track,
            subject: impl FnOnce(usize) -> Subject,
        ) -> Result<Option<Begun>, CudaError> {
            let (number, anchor) = {
                let state = self.state();
                let Some(number) = state.number else { return Ok(None) };
                (number, Arc::clone(&state.anchor))
            };
            let start = Event::timed(&self.device)?;
            stream.record(&start)?;
            Ok(Some(Begun { track, subject: subject(number), start, anchor }))
        }

        /// Behind it.
        ///
        /// # Errors
        /// What the driver says.
        pub fn end(&self, stream: &Stream, begun: Option<Begun>) -> Result<(), CudaError> {
            let Some(begun) = begun else { return Ok(()) };
            let end = Event::timed(&self.device)?;
            stream.record(&end)?;
            self.state().ended.push((begun, end));
            Ok(())
        }

        /// What has been recorded since the last time; waits until the device has done it.
        ///
        /// # Errors
        /// What went wrong on a stream.
        pub fn take(&self) -> Result<Vec<Span>, CudaError> {
            let ended = std::mem::take(&mut self.state().ended);
            let mut spans = Vec::with_capacity(ended.len());
            for (begun, end) in ended {
                end.wait()?;
                let milliseconds = |from: &Event, to: &Event| {
                    let elapsed = from.milliseconds_until(to)?;
                    Ok::<_, CudaError>(Duration::from_secs_f64(f64::from(elapsed.max(0.0)) / 1e3))
                };
                let start = begun.anchor.at + milliseconds(&begun.anchor.event, &begun.start)?;
                let end = start + milliseconds(&begun.start, &end)?;
                spans.push(Span { track: begun.track, subject: begun.subject, start, end });
            }
            let anchor = Anchor::new(&self.device, &self.idle)?;
            self.state().anchor = anchor;
            Ok(spans)
        }
    }
}
