//! Summarizes a simulated step.

use serde::Serialize;
use zero_pipeline::{Lane, Timeline};

/// Predicted times of a training step, in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// Time from the first instruction to the last.
    pub step_seconds: f64,
    /// Throughput over all ranks; `None` if the tokens per sample depend on the data.
    pub tokens_per_second: Option<f64>,
    /// Times by rank.
    pub ranks: Vec<RankTimes>,
}

/// Times of one rank in a step. If activities overlap, the time is counted in the field of each activity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankTimes {
    /// Time of compute.
    pub computing: f64,
    /// The rest of the step.
    pub idle: f64,
    /// Time with a collective in flight.
    pub collectives: f64,
    /// Time of sends to other stages.
    pub sending: f64,
    /// Time of disk reads and writes.
    pub disk: f64,
}

impl Prediction {
    /// Summarizes a timeline. `tokens` is the number of tokens in a global batch.
    #[must_use]
    pub fn of(timeline: &Timeline, tokens: Option<usize>) -> Self {
        let step_seconds = timeline.makespan();
        let mut ranks = vec![
            RankTimes { computing: 0.0, idle: step_seconds, collectives: 0.0, sending: 0.0, disk: 0.0 };
            timeline.ranks
        ];
        for event in &timeline.events {
            let of = &mut ranks[event.rank];
            match event.lane {
                Lane::Compute if event.is_compute() => of.computing += event.seconds(),
                Lane::Compute => {}
                Lane::Collectives => of.collectives += event.seconds(),
                Lane::Channel(_) => of.sending += event.seconds(),
                Lane::Disk => of.disk += event.seconds(),
            }
        }
        ranks.iter_mut().for_each(|rank| rank.idle -= rank.computing);
        Self { step_seconds, tokens_per_second: None, ranks }.with_tokens(tokens)
    }

    /// Sets the throughput from the number of tokens in a global batch.
    #[must_use]
    pub fn with_tokens(self, tokens: Option<usize>) -> Self {
        let seconds = self.step_seconds;
        let tokens_per_second = tokens.filter(|_| seconds > 0.0).map(|tokens| tokens as f64 / seconds);
        Self { tokens_per_second, ..self }
    }
}
