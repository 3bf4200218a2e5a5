//! The metrics of a run, with their names in every monitor.

use std::time::{SystemTime, UNIX_EPOCH};

/// A value that a run reports repeatedly.
#[derive(Debug, PartialEq)]
pub(crate) struct Metric {
    /// The name in monitors that allow slashes in names. It is DeepSpeed's name if DeepSpeed reports the metric.
    pub(crate) tag: &'static str,
    /// The name in Prometheus without the prefix `zero_train_`, and the key and value of a label.
    pub(crate) name: &'static str,
    pub(crate) label: Option<(&'static str, &'static str)>,
    pub(crate) kind: Kind,
    /// The factor that converts the value to Prometheus's units: seconds, bytes and ratios.
    pub(crate) scale: f64,
    pub(crate) help: &'static str,
}

/// How Prometheus aggregates the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The newest value.
    Gauge,
    /// The sum of all values.
    Counter,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
        }
    }
}

impl Metric {
    /// Returns the last part of a tag.
    pub(crate) fn last_part(tag: &'static str) -> &'static str {
        tag.rsplit('/').next().unwrap_or(tag)
    }
}

const fn gauge(tag: &'static str, name: &'static str, scale: f64, help: &'static str) -> Metric {
    Metric { tag, name, label: None, kind: Kind::Gauge, scale, help }
}

const fn counter(tag: &'static str, name: &'static str, help: &'static str) -> Metric {
    Metric { tag, name, label: None, kind: Kind::Counter, scale: 1.0, help }
}

const fn phase(tag: &'static str, of: &'static str) -> Metric {
    let help = "Time of one phase of the last step on rank 0; backward is backward_inner plus backward_allreduce.";
    Metric { tag, name: "phase_seconds", label: Some(("phase", of)), kind: Kind::Gauge, scale: 1e-3, help }
}

macro_rules! metrics {
    ($($(#[$doc:meta])* $name:ident = $metric:expr;)*) => {
        $($(#[$doc])* pub(crate) static $name: Metric = $metric;)*
        /// All metrics, for the test that compares them with the documentation.
        #[cfg(test)]
        pub(crate) static ALL: &[&Metric] = &[$(&$name),*];
    };
}

// The metrics of a step. `wall_clock_breakdown` adds the phases on rank 0 in milliseconds: DeepSpeed's phases first,
// then the phases that only this project has. `machine_monitor` adds the metrics of rank 0's machine and process.
metrics! {
    TRAIN_LOSS = gauge("Train/Samples/train_loss", "loss", 1.0, "Mean loss of the last step, before its update.");
    Z_LOSS = gauge("Train/Samples/z_loss", "z_loss", 1.0, "Amount that training.z_loss added to the loss of the last step.");
    NOISE_SCALE = gauge("Train/Samples/gradient_noise_scale", "gradient_noise_scale_samples", 1.0, "Gradient noise scale in samples, averaged over steps.");
    LR = gauge("Train/Samples/lr", "learning_rate", 1.0, "Learning rate of the last update.");
    LOSS_SCALE = gauge("Train/Samples/loss_scale", "loss_scale", 1.0, "Loss scale: the factor by which the loss of the last step was multiplied.");
    EVAL_LOSS = gauge("Train/Samples/eval_loss", "evaluation_loss", 1.0, "Mean loss of the last evaluation.");
    GRAD_NORM = gauge("Train/Samples/grad_norm", "gradient_norm", 1.0, "L2 norm of the last gradient, before clipping.");
    STEP_TIME = gauge("Train/Samples/elapsed_time_ms", "step_seconds", 1e-3, "Time of the last step on the slowest rank.");
    DATA_WAIT = gauge("Train/Samples/data_wait_ms", "data_wait_seconds", 1e-3, "Longest time that a rank waited for data in the last step.");
    TOKENS_PER_SECOND = gauge("Train/Samples/tokens_per_second", "tokens_per_second", 1.0, "Tokens per second in the last step.");
    SEQLEN = gauge("Train/Samples/seqlen", "sequence_length_tokens", 1.0, "Tokens per sample in the last step. Reported only with a curriculum.");
    PEAK_BYTES = gauge("Train/Samples/peak_bytes", "tracked_peak_bytes", 1.0, "Tracked peak memory of the rank with the largest peak.");
    SENT_BYTES = counter("Train/Samples/sent_bytes", "sent_bytes_total", "Bytes sent by all ranks since this process started.");
    SKIPPED = counter("Train/Samples/skipped", "skipped_steps_total", "Skipped updates since this process started.");
    FORWARD_TIME = phase("Train/Samples/elapsed_time_ms_forward", "forward");
    BACKWARD_TIME = phase("Train/Samples/elapsed_time_ms_backward", "backward");
    BACKWARD_INNER_TIME = phase("Train/Samples/elapsed_time_ms_backward_inner", "backward_inner");
    BACKWARD_ALLREDUCE_TIME = phase("Train/Samples/elapsed_time_ms_backward_allreduce", "backward_allreduce");
    UPDATE_TIME = phase("Train/Samples/elapsed_time_ms_step", "step");
    DATA_TIME = phase("Train/Samples/elapsed_time_ms_data", "data");
    GATHER_TIME = phase("Train/Samples/elapsed_time_ms_gather", "gather");
    MESSAGES_TIME = phase("Train/Samples/elapsed_time_ms_pipeline", "pipeline");
    DISK_TIME = phase("Train/Samples/elapsed_time_ms_disk", "disk");
    CPU = gauge("Machine/cpu_percent", "machine_cpu_ratio", 0.01, "CPU utilization of rank 0's machine, averaged over its cores.");
    PROCESS_CPU = gauge("Machine/process_cpu_percent", "process_cpu_ratio", 0.01, "Number of cores that rank 0's process keeps busy.");
    RESIDENT = gauge("Machine/process_resident_bytes", "process_resident_bytes", 1.0, "Resident memory of rank 0's process.");
    AVAILABLE = gauge("Machine/memory_available_bytes", "machine_memory_available_bytes", 1.0, "Available memory of rank 0's machine.");
    DISK_READ = gauge("Machine/disk_read_bytes_per_second", "process_disk_read_bytes_per_second", 1.0, "Bytes per second that rank 0's process reads from disks.");
    DISK_WRITTEN = gauge("Machine/disk_written_bytes_per_second", "process_disk_written_bytes_per_second", 1.0, "Bytes per second that rank 0's process writes to disks.");
    RECEIVED = gauge("Machine/network_received_bytes_per_second", "machine_network_received_bytes_per_second", 1.0, "Bytes per second that rank 0's machine receives.");
    SENT = gauge("Machine/network_sent_bytes_per_second", "machine_network_sent_bytes_per_second", 1.0, "Bytes per second that rank 0's machine sends.");
}

/// Creates the metrics of the GPU `index`: utilization, memory, power and temperature. Leaks some hundred bytes,
/// because metrics live as long as the process.
pub(crate) fn gpu_metrics(index: u32) -> [&'static Metric; 4] {
    let table = [
        ("utilization_percent", "utilization_ratio", 0.01, "Share of the time during which a kernel ran on the GPU."),
        ("memory_used_bytes", "memory_used_bytes", 1.0, "Used memory of the GPU, by all processes."),
        ("power_watts", "power_watts", 1.0, "Power draw of the GPU."),
        ("temperature_celsius", "temperature_celsius", 1.0, "Temperature of the GPU."),
    ];
    table.map(|(tag, name, scale, help)| {
        let tag = format!("Machine/gpu_{index}_{tag}").leak();
        let label = Some(("gpu", &*index.to_string().leak()));
        let name = format!("machine_gpu_{name}").leak();
        &*Box::leak(Box::new(Metric { tag, name, label, kind: Kind::Gauge, scale, help }))
    })
}

/// Creates the metric that a program reports in its evaluations. Leaks some hundred bytes, because metrics live as long
/// as the process.
pub(crate) fn evaluated(name: &str) -> &'static Metric {
    let (tag, help) = (format!("Train/Samples/eval_{name}").leak(), format!("{name} of the last evaluation.").leak());
    let name = format!("evaluation_{name}").leak();
    Box::leak(Box::new(Metric { tag, name, label: None, kind: Kind::Gauge, scale: 1.0, help }))
}

/// One value of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Scalar {
    pub(crate) metric: &'static Metric,
    pub(crate) value: f64,
}

/// The results of a step.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Record {
    /// The number of the step, counted from 1.
    pub(crate) step: u64,
    /// Number of samples trained on so far. DeepSpeed uses it as the x axis.
    pub(crate) samples: u64,
    /// Seconds since 1970.
    pub(crate) time: f64,
    pub(crate) scalars: Vec<Scalar>,
    /// Milliseconds of each rank's own work, by rank. Empty if the ranks have not exchanged these times after this
    /// step.
    pub(crate) rank_ms: Vec<f64>,
}

/// Returns the seconds since 1970.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_documented() {
        let page =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/monitors.md")).expect("the page");
        let all: Vec<&Metric> = ALL.iter().copied().chain(gpu_metrics(0)).chain(gpu_metrics(1)).collect();
        for (index, one) in all.iter().enumerate() {
            let same = |other: &&&Metric| other.tag == one.tag || (other.name, other.label) == (one.name, one.label);
            assert_eq!(all[index..].iter().filter(same).count(), 1, "{}", one.tag);
            for name in [one.tag.replace("gpu_1", "gpu_0"), format!("zero_train_{}", one.name)] {
                assert!(
                    page.contains(&format!("`{name}`")) || page.contains(&format!("`{name}{{")),
                    "{name} is not in docs/monitors.md"
                );
            }
        }
    }
}
