//! Records when work on a device's streams started and ended. The times come from the device's own clock.

use std::time::Instant;

/// Declares an enum with a name for each variant.
macro_rules! named {
    (
        $(#[$meta:meta])*
        pub enum $enum:ident { $( $(#[$doc:meta])* $variant:ident = $name:literal, )+ }
    ) => {
        $(#[$meta])*
        pub enum $enum { $( $(#[$doc])* $variant, )+ }

        impl $enum {
            /// All values, in order of their discriminants.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$variant),+];

            /// Returns the name in traces.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }
        }
    };
}

named! {
    /// The purpose of a stream.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Track {
        /// Kernels, and the gaps between them.
        Compute = "compute",
        /// Copies from the device to the host.
        ToHost = "copies to the host",
        /// Copies from the host to the device.
        FromHost = "copies from the host",
        /// Collectives of a group of ranks.
        Collectives = "collectives",
        /// Messages to another rank.
        Sends = "sends",
        /// Messages from another rank.
        Receives = "receives",
    }
}

named! {
    /// A kind of communication between ranks.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Transfer {
        /// Every rank receives the reduction of all ranks' data.
        AllReduce = "all_reduce",
        /// A broadcast: every rank receives the data of one rank.
        Broadcast = "broadcast",
        /// Every rank receives the data of all ranks.
        AllGather = "all_gather",
        /// Each rank receives a part of the reduction.
        ReduceScatter = "reduce_scatter",
        /// A message to another rank.
        Send = "send",
        /// A message from another rank.
        Receive = "receive",
        /// Each rank sends a part of its data to each rank.
        AllToAll = "all_to_all",
    }
}

impl Transfer {
    /// Returns the track of this kind.
    #[must_use]
    pub fn track(self) -> Track {
        match self {
            Self::AllReduce | Self::Broadcast | Self::AllGather | Self::ReduceScatter | Self::AllToAll => {
                Track::Collectives
            }
            Self::Send => Track::Sends,
            Self::Receive => Track::Receives,
        }
    }
}

/// The work that a [`Span`] measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// Work that was enqueued while the recorder had this number.
    Number(usize),
    /// Communication between ranks.
    Transfer {
        /// The kind of communication.
        kind: Transfer,
        /// Size in bytes of this rank's largest buffer.
        bytes: usize,
    },
}

/// A piece of work on a stream, with its start and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The stream's track.
    pub track: Track,
    /// The work.
    pub subject: Subject,
    /// When the stream reached the work.
    pub start: Instant,
    /// When the work was done.
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

    /// Records events before and after the work on a device's streams, as long as a number for new spans is set.
    #[derive(Debug)]
    pub struct Recorder {
        device: Arc<Device>,
        /// A stream without work, on which an event completes at once.
        idle: Stream,
        state: Mutex<State>,
    }

    #[derive(Debug)]
    struct State {
        anchor: Arc<Anchor>,
        /// The number for new spans; `None` disables recording.
        number: Option<usize>,
        ended: Vec<(Begun, Event)>,
    }

    /// A moment whose time is known on both the device and the host.
    #[derive(Debug)]
    struct Anchor {
        event: Event,
        at: Instant,
    }

    /// Work whose start event has been recorded on the stream.
    #[derive(Debug)]
    pub struct Begun {
        track: Track,
        subject: Subject,
        start: Event,
        /// The reference for the times of this span. It is recent, because an f32 holds the milliseconds since then.
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
        /// Creates a recorder that records nothing until [`Recorder::set_number`] is called.
        ///
        /// # Errors
        /// Returns the driver's error.
        pub fn new(device: &Arc<Device>) -> Result<Arc<Recorder>, CudaError> {
            let idle = Stream::new(device)?;
            let state = State { anchor: Anchor::new(device, &idle)?, number: None, ended: vec![] };
            Ok(Arc::new(Recorder { device: Arc::clone(device), idle, state: Mutex::new(state) }))
        }

        fn state(&self) -> MutexGuard<'_, State> {
            self.state.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// Sets the number for spans that begin from now on; `None` disables recording.
        pub fn set_number(&self, number: Option<usize>) {
            self.state().number = number;
        }

        /// Records the start of work on a stream, or returns `None` if recording is disabled.
        ///
        /// # Errors
        /// Returns the driver's error.
        pub fn begin(&self, stream: &Stream, track: Track) -> Result<Option<Begun>, CudaError> {
            self.begin_as(stream, track, Subject::Number)
        }

        /// Does the same as [`Recorder::begin`], for communication between ranks. Communication may start on the device
        /// after the host has moved on to other work.
        ///
        /// # Errors
        /// Returns the driver's error.
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

        /// Records the end of the work.
        ///
        /// # Errors
        /// Returns the driver's error.
        pub fn end(&self, stream: &Stream, begun: Option<Begun>) -> Result<(), CudaError> {
            let Some(begun) = begun else { return Ok(()) };
            let end = Event::timed(&self.device)?;
            stream.record(&end)?;
            self.state().ended.push((begun, end));
            Ok(())
        }

        /// Waits for the recorded work and returns the spans recorded since the last call.
        ///
        /// # Errors
        /// Returns an error of a stream's work.
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
