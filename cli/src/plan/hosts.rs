//! `zero-train plan --hosts`: compares layouts by the bytes that hosts send to each other.

use serde_json::{Value, json};
use zero_config::{Config, Source};
use zero_engine::bytes;
use zero_planner::{OnHosts, Planner, layouts_on_hosts};

use crate::arguments::PlanArgs;
use crate::input::load_sources;

/// Layouts of a job on several hosts.
pub(super) struct Comparison {
    hosts: usize,
    /// Number of ranks per host.
    ranks: usize,
    /// Bytes per second of a host's link.
    link: Option<f64>,
    layouts: Vec<OnHosts>,
}

/// Returns the number of ranks per host.
///
/// # Errors
/// Fails if the ranks do not divide evenly among the hosts.
pub(super) fn ranks_of_each(hosts: usize, world: usize) -> anyhow::Result<usize> {
    anyhow::ensure!(
        world.is_multiple_of(hosts),
        "{world} ranks cannot be divided evenly among {hosts} hosts\n  in: --hosts\n  help: use a divisor of {world}, or set the number of ranks with --world-size"
    );
    Ok(world / hosts)
}

/// Plans the configuration and alternative layouts on this number of hosts.
///
/// # Errors
/// Fails if the ranks do not divide evenly among the hosts.
pub(super) fn compare(
    args: &PlanArgs,
    hosts: usize,
    (sources, overrides): (&[Source], &[String]),
    config: &Config,
    planner: &Planner,
) -> anyhow::Result<Comparison> {
    let (world, ranks) = (config.world_size, ranks_of_each(hosts, config.world_size)?);
    let change = |settings: &[String]| {
        let typed = load_sources(&args.config, sources.to_vec(), &[overrides, settings].concat());
        let typed = typed.map_err(|e| zero_train::Error::Batch(e.to_string()))?;
        Ok(typed.on_hosts(ranks).resolve(Some(world))?)
    };
    let layouts = layouts_on_hosts(config, ranks, change, |config| planner.memory_plan(config))?;
    Ok(Comparison { hosts, ranks, link: args.link, layouts })
}

impl Comparison {
    /// Returns the mean number of bytes that a host sends in a step.
    fn per_host(&self, layout: &OnHosts) -> Option<u64> {
        layout.network_bytes.map(|bytes| bytes / self.hosts as u64)
    }

    /// Returns the time in seconds that a host's link needs for these bytes.
    fn seconds(&self, layout: &OnHosts) -> Option<f64> {
        Some(self.per_host(layout)? as f64 / self.link?)
    }

    /// Formats the comparison for the user. `limit` is the memory that a rank may use.
    pub(super) fn text(&self, limit: Option<u64>) -> String {
        let mut rows = vec![["layout", "a host sends", "link time", "memory/rank", "settings"].map(String::from)];
        for layout in &self.layouts {
            let fits = limit.is_none_or(|limit| layout.peak_bytes <= limit);
            rows.push([
                layout.name.clone(),
                self.per_host(layout).map_or("unknown".into(), bytes),
                self.seconds(layout).map_or(String::new(), |seconds| format!("{:.1} ms", seconds * 1e3)),
                format!("{}{}", bytes(layout.peak_bytes), if fits { "" } else { ", too much" }),
                layout.settings.iter().map(|setting| format!("--set \"{setting}\"")).collect::<Vec<_>>().join(" "),
            ]);
        }
        let widths: Vec<usize> =
            (0..4).map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)).collect();
        let mut text = format!(
            "\n{} × {} ranks; bytes that a host sends to other hosts in a step:\n",
            zero_engine::counted(self.hosts, "host", "hosts"),
            self.ranks
        );
        for row in &rows {
            let cells: Vec<String> =
                row[1..4].iter().zip(&widths[1..]).map(|(cell, &width)| format!("{cell:>width$}")).collect();
            let line = format!("{:<width$}  {}  {}", row[0], cells.join("  "), row[4], width = widths[0]);
            text += line.trim_end();
            text.push('\n');
        }
        text + &self.advice(limit)
    }

    /// Recommends the layout that sends the fewest bytes among the layouts that fit.
    fn advice(&self, limit: Option<u64>) -> String {
        let Some(limit) = limit else {
            return "help: give --device-memory SIZE to see which of the layouts that fit sends the fewest bytes"
                .into();
        };
        let rounds = self.layouts.first().is_some_and(|configured| configured.rounds);
        let is_same = |layout: &&OnHosts| rounds || !layout.rounds;
        let fits = |layout: &&OnHosts| layout.peak_bytes <= limit && layout.network_bytes.is_some();
        match self.layouts.iter().filter(fits).filter(is_same).min_by_key(|layout| layout.network_bytes) {
            None => "no recommendation: each layout exceeds the memory, sends an unknown number of bytes, or quantizes values that the configuration does not quantize".into(),
            Some(least) => {
                let exact = if rounds { "" } else { " and send no quantized values" };
                format!("recommended: {}; of the layouts that fit{exact}, it sends the fewest bytes", least.name)
            }
        }
    }

    /// Returns the comparison as JSON.
    pub(super) fn value(&self) -> Value {
        let of = |layout: &OnHosts| {
            json!({
                "name": layout.name,
                "settings": layout.settings,
                "rounds": layout.rounds,
                "network_bytes_per_step": layout.network_bytes,
                "link_seconds": self.seconds(layout),
                "planned_peak_bytes": layout.peak_bytes,
                "step_seconds": layout.seconds.as_ref().and_then(|time| time.as_ref().ok()),
            })
        };
        json!({
            "hosts": self.hosts,
            "ranks_per_host": self.ranks,
            "link_bytes_per_second": self.link,
            "layouts": self.layouts.iter().map(of).collect::<Vec<_>>(),
        })
    }
}
