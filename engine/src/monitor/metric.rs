//! What is watched: each metric with its name in every monitor.

use std::time::{SystemTime, UNIX_EPOCH};

/// A number that a run gives again and again.
#[derive(Debug, PartialEq)]
pub(crate) struct Metric {
    /// Its name where names have slashes; DeepSpeed's where DeepSpeed has it.
    pub(crate) tag: &'static str,
}

impl Metric {
    /// The last part of a tag.
    pub(crate) fn last_part(tag: &'static str) -> &'static str {
        tag.rsplit('/').next().unwrap_or(tag)
    }
}

const fn metric(tag: &'static str) -> Metric {
    Metric { tag }
}

// Of a step.
pub(crate) static TRAIN_LOSS: Metric = metric("Train/Samples/train_loss");
pub(crate) static LR: Metric = metric("Train/Samples/lr");
pub(crate) static GRAD_NORM: Metric = metric("Train/Samples/grad_norm");
pub(crate) static LOSS_SCALE: Metric = metric("Train/Samples/loss_scale");
pub(crate) static EVAL_LOSS: Metric = metric("Train/Samples/eval_loss");
pub(crate) static STEP_TIME: Metric = metric("Train/Samples/elapsed_time_ms");
pub(crate) static TOKENS_PER_SECOND: Metric = metric("Train/Samples/tokens_per_second");
pub(crate) static PEAK_BYTES: Metric = metric("Train/Samples/peak_bytes");

/// What the phases of a step took on rank 0, in milliseconds, with `wall_clock_breakdown`: DeepSpeed's, then ours.
pub(crate) static FORWARD_TIME: Metric = metric("Train/Samples/elapsed_time_ms_forward");
pub(crate) static BACKWARD_TIME: Metric = metric("Train/Samples/elapsed_time_ms_backward");
pub(crate) static BACKWARD_INNER_TIME: Metric = metric("Train/Samples/elapsed_time_ms_backward_inner");
pub(crate) static BACKWARD_ALLREDUCE_TIME: Metric = metric("Train/Samples/elapsed_time_ms_backward_allreduce");
pub(crate) static UPDATE_TIME: Metric = metric("Train/Samples/elapsed_time_ms_step");
pub(crate) static DATA_TIME: Metric = metric("Train/Samples/elapsed_time_ms_data");
pub(crate) static GATHER_TIME: Metric = metric("Train/Samples/elapsed_time_ms_gather");
pub(crate) static MESSAGES_TIME: Metric = metric("Train/Samples/elapsed_time_ms_pipeline");
pub(crate) static DISK_TIME: Metric = metric("Train/Samples/elapsed_time_ms_disk");

/// One value of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scalar {
    pub(crate) metric: &'static Metric,
    pub(crate) value: f64,
}

/// What is known after a step.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Record {
    /// Samples seen so far: DeepSpeed's x axis.
    pub(crate) samples: u64,
    /// Seconds since 1970.
    pub(crate) time: f64,
    pub(crate) scalars: Vec<Scalar>,
}

impl Record {
    pub(crate) fn now(samples: u64, scalars: Vec<Scalar>) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        Self { samples, time, scalars }
    }
}
