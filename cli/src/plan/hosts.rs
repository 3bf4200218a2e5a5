//! `zero-train plan --hosts`: compares layouts by the bytes that hosts send to each other, and recommends one.

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
    /// Returns the mean number of bytes that a host sends to other hosts in a step.
    fn per_host(&self, layout: &OnHosts) -> Option<u64> {
        layout.bytes.map(|bytes| bytes.between / self.hosts as u64)
    }

    /// Returns the time in seconds that a host's link needs for these bytes.
    fn seconds(&self, layout: &OnHosts) -> Option<f64> {
        Some(self.per_host(layout)? as f64 / self.link?)
    }

    /// Formats the comparison for the user. `limit` is the memory that a rank may use.
    pub(super) fn text(&self, limit: Option<u64>) -> String {
        let mut rows = vec![
            ["layout", "a host sends", "within it", "link time", "memory/rank", "step", "settings"].map(String::from),
        ];
        for layout in &self.layouts {
            let fits = limit.is_none_or(|limit| layout.peak_bytes <= limit);
            rows.push([
                layout.name.clone(),
                self.per_host(layout).map_or("unknown".into(), bytes),
                layout.bytes.map_or("unknown".into(), |sent| bytes(sent.within / self.hosts as u64)),
                self.seconds(layout).map_or(String::new(), milliseconds),
                format!("{}{}", bytes(layout.peak_bytes), if fits { "" } else { ", too much" }),
                predicted(layout).map_or(String::new(), milliseconds),
                layout.settings.iter().map(|setting| format!("--set \"{setting}\"")).collect::<Vec<_>>().join(" "),
            ]);
        }
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        // Without a link's speed or a cost table, a column has only its title.
        let columns = (1..6).filter(|&column| rows[1..].iter().any(|row| !row[column].is_empty())).collect::<Vec<_>>();
        let mut text = format!(
            "\n{} × {} ranks; bytes that a host sends to other hosts in a step, and bytes sent within it:\n",
            zero_engine::counted(self.hosts, "host", "hosts"),
            self.ranks
        );
        for row in &rows {
            let cells: Vec<String> =
                columns.iter().map(|&column| format!("{:>width$}", row[column], width = width(column))).collect();
            let line = format!("{:<width$}  {}  {}", row[0], cells.join("  "), row[6], width = width(0));
            text += line.trim_end();
            text.push('\n');
        }
        text + &match self.recommended(limit) {
            None => "no recommendation: each layout exceeds the memory, sends an unknown number of bytes, or quantizes values that the configuration does not quantize".into(),
            Some((best, seconds)) => {
                let those = match (limit.is_some(), self.may_round()) {
                    (true, true) => "of the layouts that fit, ",
                    (true, false) => "of the layouts that fit and send no quantized values, ",
                    (false, true) => "",
                    (false, false) => "of the layouts that send no quantized values, ",
                };
                let reason = match seconds {
                    Some(seconds) => format!("it has the shortest predicted step, {}", milliseconds(seconds)),
                    None => "it sends the fewest bytes between hosts".into(),
                };
                let unknown = if limit.is_none() { "\n  help: give --device-memory SIZE to leave out layouts that do not fit" } else { "" };
                let is_untimed = self.link.is_some() && self.layouts.iter().all(|layout| layout.seconds.is_none());
                let untimed = if is_untimed { "\n  help: give --costs FILE to compare predicted steps; --link does not change the recommendation" } else { "" };
                format!("recommended: {}; {those}{reason}{unknown}{untimed}", best.name)
            }
        }
    }

    /// Whether the configuration itself sends quantized values.
    fn may_round(&self) -> bool {
        self.layouts.first().is_some_and(|configured| configured.rounds)
    }

    /// Returns the layout with the shortest predicted step and its seconds or, if the cost table is missing or does not
    /// predict all layouts, the layout that sends the fewest bytes. Considers only layouts that fit.
    fn recommended(&self, limit: Option<u64>) -> Option<(&OnHosts, Option<f64>)> {
        let fits = |layout: &&OnHosts| limit.is_none_or(|limit| layout.peak_bytes <= limit) && layout.bytes.is_some();
        let candidates = || self.layouts.iter().filter(fits).filter(|layout| self.may_round() || !layout.rounds);
        let timed = candidates().map(|layout| Some((layout, predicted(layout)?))).collect::<Option<Vec<_>>>();
        match timed {
            Some(timed) => {
                let fastest = timed.into_iter().min_by(|(_, a), (_, b)| a.total_cmp(b));
                fastest.map(|(layout, seconds)| (layout, Some(seconds)))
            }
            None => {
                let least = candidates().min_by_key(|layout| layout.bytes.map(|bytes| bytes.between));
                least.map(|layout| (layout, None))
            }
        }
    }

    /// Returns the comparison as JSON. `limit` is the memory that a rank may use.
    pub(super) fn value(&self, limit: Option<u64>) -> Value {
        let of = |layout: &OnHosts| {
            json!({
                "name": layout.name,
                "settings": layout.settings,
                "rounds": layout.rounds,
                "network_bytes_per_step": layout.bytes.map(|bytes| bytes.between),
                "bytes_within_hosts_per_step": layout.bytes.map(|bytes| bytes.within),
                "link_seconds": self.seconds(layout),
                "planned_peak_bytes": layout.peak_bytes,
                "step_seconds": predicted(layout),
            })
        };
        json!({
            "hosts": self.hosts,
            "ranks_per_host": self.ranks,
            "link_bytes_per_second": self.link,
            "layouts": self.layouts.iter().map(of).collect::<Vec<_>>(),
            "recommended": self.recommended(limit).map(|(layout, _)| &layout.name),
        })
    }
}

/// Returns the predicted seconds of a step; `None` without a cost table that predicts them.
fn predicted(layout: &OnHosts) -> Option<f64> {
    layout.seconds.as_ref()?.as_ref().ok().copied()
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}
