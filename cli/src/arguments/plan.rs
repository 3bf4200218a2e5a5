//! Options of `plan`.

use std::path::PathBuf;

use clap::Args;

use super::checkpoint::size;
use super::config::ConfigArgs;

/// Options of `plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Options that select the configuration.
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Draw the schedule of a step: one row per pipeline stage, one column per time slot
    #[arg(long, conflicts_with = "json")]
    pub(crate) grid: bool,
    /// Plan for N ranks, which may run on other machines
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) world_size: Option<u32>,
    /// Memory that a rank may use, for example 80GiB [default: training.memory_limit, else its share of this machine]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) device_memory: Option<u64>,
    /// Print the bytes of state per rank at each ZeRO stage on 1 to 1024 ranks
    #[arg(long, conflicts_with = "json")]
    pub(crate) stages: bool,
    /// Compare layouts by the bytes that H hosts with equal numbers of ranks send to each other
    #[arg(long, value_name = "H", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) hosts: Option<u32>,
    /// Speed of a host's link, such as 100Gb or 12.5GB (per second), to print the time that the bytes take
    #[arg(long, value_name = "RATE", value_parser = rate, requires = "hosts")]
    pub(crate) link: Option<f64>,
    /// Cost table written by `bench costs`, to predict the step time [default: training.cost_table]
    #[arg(long, value_name = "FILE")]
    pub(crate) costs: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses the speed of a link. Returns bytes per second.
fn rate(text: &str) -> Result<f64, String> {
    const UNITS: [(&str, f64); 5] =
        [("Mb", 1e6 / 8.0), ("Gb", 1e9 / 8.0), ("Tb", 1e12 / 8.0), ("MB", 1e6), ("GB", 1e9)];
    let text = text.strip_suffix("/s").or_else(|| text.strip_suffix("ps")).unwrap_or(text).trim();
    let found = UNITS.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?.trim(), bytes)));
    let parsed = found.and_then(|(number, bytes)| Some(number.parse::<f64>().ok()? * bytes));
    parsed
        .filter(|rate| rate.is_finite() && *rate > 0.0)
        .ok_or_else(|| "give bits per second as 100Gb or 400Mb, or bytes per second as 12.5GB".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_rates_are_in_bits_or_bytes() {
        for (text, bytes) in
            [("100Gb", 12.5e9), ("1 Gb/s", 125e6), ("12.5GB", 12.5e9), ("400Mbps", 50e6), ("1Tb", 125e9)]
        {
            assert_eq!(rate(text), Ok(bytes), "{text}");
        }
        for text in ["", "100", "Gb", "-1Gb", "0Gb", "NaNGb", "1e999Gb", "10gigabit"] {
            assert!(rate(text).unwrap_err().contains("100Gb"), "{text}");
        }
    }
}
