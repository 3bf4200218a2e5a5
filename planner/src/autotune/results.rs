//! Writes the results of a search: `best.yaml`, `report.html`, the metric's file, and the last line of `results.jsonl`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};
use zero_config::{Autotuning, Config};
use zero_pipeline::Timeline;

use super::correction::Setting;
use super::journal::Journal;
use super::objective::{is_better_higher, unit, value};
use super::outlook::Outlook;
use super::report;
use super::request::{Request, Tuned, of_metric_path};
use super::row::{Row, State};
use super::search::{End, best, gain};
use super::tables::Tables;
use crate::memory::Limit;
use zero_engine::Error;

/// The search that the results belong to.
pub(super) struct Found<'a> {
    pub(super) request: &'a Request<'a>,
    pub(super) base: &'a Config,
    pub(super) outlook: &'a Outlook<'a>,
    pub(super) tables: &'a Tables,
    pub(super) folder: &'a Path,
}

/// Writes all files.
pub(super) fn finish(
    found: &Found<'_>,
    rows: Vec<Row>,
    tuning: Autotuning,
    mut journal: Journal,
    end: End,
    began: Instant,
) -> Result<Tuned, Error> {
    let metric = tuning.metric;
    let best = best(&rows, metric);
    let gain = best.and_then(|best| gain(&rows, best, metric));
    let mut files = vec![];
    let mut write = |path: PathBuf, text: &str| -> Result<(), Error> {
        std::fs::write(&path, text).map_err(|source| Error::Io { path: path.clone(), source })?;
        files.push(path);
        Ok(())
    };
    if let Some(best) = best {
        write(found.folder.join("best.yaml"), &best_yaml(found, &rows[best])?)?;
    }
    let measured = best.and_then(|best| {
        let (path, seconds) = (tuning.metric_path.clone()?, rows[best].seconds()?);
        let value = value(metric, &rows[best].planned.as_ref()?.work, seconds.mean);
        Some((path, format!("{:#}\n", json!({ "metric": metric.to_string(), "value": value }))))
    });
    let tuned = Tuned { best, gain, interrupted: end == End::Interrupted, tuning, files: vec![], rows };
    let data = data(found, &tuned, began);
    write(found.folder.join("report.html"), &report::page(&data))?;
    journal.write(&json!({
        "event": "end",
        "best": best,
        "interrupted": tuned.interrupted,
        "gain": data["gain"],
        "rows": data["rows"],
    }))?;
    // Write this file last, because it may be outside the results folder. If it cannot be written, the results folder
    // is complete.
    if let Some((path, text)) = measured {
        write(path, &text).map_err(of_metric_path)?;
    }
    files.push(found.folder.join("results.jsonl"));
    Ok(Tuned { files, ..tuned })
}

/// Returns the user's file with the settings of a row.
fn best_yaml(found: &Found<'_>, row: &Row) -> Result<String, Error> {
    edited(found.request, found.request.ranks.map(|_| row.candidate.ranks), &row.candidate.settings)
}

/// Returns the user's file with these settings, and with the number of ranks if `ranks` is given.
pub(super) fn edited(request: &Request<'_>, ranks: Option<usize>, settings: &[Setting]) -> Result<String, Error> {
    // The file must contain the overrides of the command line in addition to the settings that the search found.
    let typed = request.overrides.iter().filter_map(|change| change.split_once('='));
    let typed = typed.map(|(path, value)| (path.trim().to_string(), value.to_string()));
    let mut changes: BTreeMap<String, String> = typed.collect();
    changes.extend(ranks.map(|ranks| ("launcher.num_processes".into(), ranks.to_string())));
    changes.extend(settings.iter().cloned());
    let value = |value: String| if value.trim().is_empty() { None } else { Some(value) };
    let changes: Vec<(String, Option<String>)> = changes.into_iter().map(|(path, text)| (path, value(text))).collect();
    Ok(zero_config::edit(&request.source, &changes)?)
}

/// Returns the data of the report.
fn data(found: &Found<'_>, tuned: &Tuned, began: Instant) -> Value {
    let (rows, metric) = (&tuned.rows, tuned.tuning.metric);
    let count = |states: &[State]| rows.iter().filter(|row| states.contains(&row.state)).count();
    let work = rows.iter().find_map(|row| row.planned.as_ref()).map(|planned| planned.work);
    let mut off: Vec<f64> =
        rows.iter().filter_map(|row| Some((row.predicted? / row.seconds()?.mean - 1.0).abs())).collect();
    off.sort_by(f64::total_cmp);
    let timeline = tuned.best.and_then(|best| found.outlook.timeline(&rows[best], found.tables).ok());
    json!({
        "version": 1,
        "configuration": found.request.source.name,
        "machine": machine(),
        "program": concat!("zero-train ", env!("CARGO_PKG_VERSION")),
        "seconds": began.elapsed().as_secs_f64(),
        "metric": {
            "name": metric.to_string(),
            "unit": work.as_ref().map(|work| unit(metric, work)),
            "higher_is_better": is_better_higher(metric),
        },
        "limit_bytes": Limit::of_rank(found.base, found.base.world_size).map(|limit| limit.bytes),
        "base": 0,
        "best": tuned.best,
        "gain": tuned.gain.map(|of| json!({ "ratio": of.mean, "low": of.low, "high": finite(of.high) })),
        "counts": {
            "candidates": rows.len(),
            "refused": count(&[State::Refused]),
            "too_large": count(&[State::TooLarge]),
            "predicted": rows.iter().filter(|row| row.predicted.is_some()).count(),
            "measured": count(&[State::Measured]),
            "failed": rows.iter().filter(|row| row.state.has_fallen()).count(),
        },
        "median_error": off.get(off.len() / 2),
        "rows": rows.iter().map(|row| row.value(metric)).collect::<Vec<_>>(),
        "timeline": timeline.as_ref().map(spans),
    })
}

/// Returns `None` for non-finite values, which JSON cannot represent.
fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

/// Returns the spans of a timeline, grouped by rank and lane.
fn spans(timeline: &Timeline) -> Value {
    let mut lanes: BTreeMap<(usize, zero_pipeline::Lane), Vec<Value>> = BTreeMap::new();
    for event in timeline.events.iter().filter(|event| event.end > event.start) {
        lanes.entry((event.rank, event.lane)).or_default().push(json!({
            "name": event.instruction.to_string(),
            "kind": event.instruction.kind(),
            "start": event.start,
            "end": event.end,
        }));
    }
    let rows = lanes
        .into_iter()
        .map(|((rank, lane), spans)| json!({ "rank": rank, "lane": lane.to_string(), "spans": spans }));
    json!({ "seconds": timeline.makespan(), "rows": rows.collect::<Vec<_>>() })
}

/// Describes the machine's cores and memory, as far as the system reports them.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut words = zero_engine::format::counted(cores, "core", "cores");
    if let Some(name) = crate::processor::name() {
        words += &format!(" of {name}");
    }
    if let Some(limit) = Limit::of_machine() {
        words += &format!(", {}", zero_engine::bytes(limit.bytes));
    }
    words
}
