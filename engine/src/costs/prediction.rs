//! What a simulated step says of a real one.

use serde::Serialize;
use zero_pipeline::{Lane, Timeline};

/// A step as it should go. Times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    /// From its first instruction to its last.
    pub step_seconds: f64,
    /// Over all ranks; `None` where the data alone says how many tokens a sample has.
    pub tokens_per_second: Option<f64>,
    /// By rank.
    pub ranks: Vec<RankTimes>,
}

/// What a rank does in a step. What overlaps counts in each of them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankTimes {
    /// Computes.
    pub computing: f64,
    /// Waits: the rest of the step.
    pub idle: f64,
    /// Has collectives on their way.
    pub collectives: f64,
    /// Sends to other stages.
    pub sending: f64,
    /// Reads and writes.
    pub disk: f64,
}

impl Prediction {
    /// What a simulated step says; `tokens` are those of a global batch.
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
        let tokens_per_second = tokens.filter(|_| step_seconds > 0.0).map(|tokens| tokens as f64 / step_seconds);
        Self { step_seconds, tokens_per_second, ranks }
    }
}
