//! The report page of training runs: one HTML file that makes no network requests.
//!
//! [`report_page`] reads the folders of one or several runs, finished or not, and returns the page. The parts of the
//! page are in files in this folder and in [`zero_planner::page`].

mod curve;
mod metrics;
mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use zero_config::Source;
use zero_engine::Error;
use zero_planner::page::{CHARTS, STYLE, TIMELINE, WORDS, assemble};

use metrics::Line;

const PAGE: &str = include_str!("page.html");
/// The shared style, and the style of this page.
const STYLES: [&str; 2] = [STYLE, include_str!("page.css")];
/// The scripts in order of dependency. `page.js` shows the data; the other scripts only define functions.
const SCRIPTS: [&str; 9] = [
    WORDS,
    CHARTS,
    TIMELINE,
    include_str!("curves.js"),
    include_str!("bars.js"),
    include_str!("tables.js"),
    include_str!("sections.js"),
    include_str!("costs.js"),
    include_str!("page.js"),
];

/// Returns the page that shows the runs in these folders, overlaid if there are several.
///
/// # Errors
/// Fails if a folder has no `metrics.jsonl`, or if a file in it cannot be read or is damaged.
pub fn report_page(folders: &[PathBuf]) -> Result<String, Error> {
    let names = names(folders);
    let runs = folders.iter().zip(names).map(|(folder, name)| run(folder, name)).collect::<Result<Vec<_>, _>>()?;
    Ok(assemble(PAGE, &STYLES, &SCRIPTS, &data(runs)))
}

/// A run: its data for the page, and its configuration by key.
type Run = (Value, Option<Leaves>);

/// The values of a configuration by key.
type Leaves = BTreeMap<String, String>;

fn data(runs: Vec<Run>) -> Value {
    let configurations: Vec<&Leaves> = runs.iter().filter_map(|(_, leaves)| leaves.as_ref()).collect();
    let keys: BTreeSet<&String> = configurations.iter().flat_map(|leaves| leaves.keys()).collect();
    let is_different = |key: &&String| configurations.windows(2).any(|pair| pair[0].get(*key) != pair[1].get(*key));
    let row = |key: &String| {
        let values = runs.iter().map(|(_, leaves)| leaves.as_ref().map(|leaves| leaves.get(key)));
        json!({ "key": key, "values": values.collect::<Vec<_>>() })
    };
    let differences: Vec<Value> = keys.into_iter().filter(is_different).map(row).collect();
    json!({
        "version": 1,
        "program": concat!("zero-train ", env!("CARGO_PKG_VERSION")),
        "differences": differences,
        "runs": runs.iter().map(|(run, _)| run).collect::<Vec<_>>(),
    })
}

/// Returns the names of the runs: the names of the folders if they differ, otherwise their paths as given.
fn names(folders: &[PathBuf]) -> Vec<String> {
    let own = |folder: &PathBuf| {
        let whole = if folder.file_name().is_some() { folder.clone() } else { folder.canonicalize().ok()? };
        whole.file_name().map(|name| name.to_string_lossy().into_owned())
    };
    let short: Vec<Option<String>> = folders.iter().map(own).collect();
    let is_unique = short.iter().collect::<BTreeSet<_>>().len() == folders.len();
    let path = |folder: &PathBuf| folder.display().to_string();
    folders
        .iter()
        .zip(short)
        .map(|(folder, short)| short.filter(|_| is_unique).unwrap_or_else(|| path(folder)))
        .collect()
}

fn run(folder: &Path, name: String) -> Result<Run, Error> {
    let lines = metrics::read(&folder.join("metrics.jsonl"))?;
    let report = json_file(&folder.join("report.json"))?;
    let (configuration, leaves) = configuration(&folder.join("resolved.yaml"))?;
    let traced = trace::read(&folder.join("trace.json"))?;
    let mut curves = metrics::curves(&lines);
    if leaves.as_ref().and_then(|leaves| leaves.get("scheduler.type")).is_some_and(|kind| kind == "LRRangeTest") {
        curves["loss_over_lr"] = metrics::loss_over_lr(&lines);
    }
    let is_current = report.as_ref().is_some_and(|report| is_of_last_part(report, &lines));
    let run = json!({
        "name": name,
        "folder": folder.display().to_string(),
        "finished": report.as_ref().filter(|_| is_current).map(|report| report["finished"].clone()),
        // While a resumed run trains, `report.json` still describes the part of the run before it resumed.
        "is_report_old": report.is_some() && !is_current,
        "report": report,
        "totals": metrics::totals(&lines),
        "curves": curves,
        "timeline": traced["timeline"],
        "overlap": traced["overlap"],
        "configuration": configuration,
    });
    Ok((run, leaves))
}

/// Returns whether `report.json` belongs to the last part of a resumed run: whether its last loss is the loss of the
/// last line. The report of a part without steps has no loss and always counts.
fn is_of_last_part(report: &Value, lines: &[Line]) -> bool {
    let last = lines.last().and_then(|line| line.loss);
    report["steps"] == 0 || report["last_loss"].as_f64() == last
}

/// Returns the text of the configuration, and its values by key if this version can resolve it.
fn configuration(path: &Path) -> Result<(Option<String>, Option<Leaves>), Error> {
    if !path.exists() {
        return Ok((None, None));
    }
    let source = Source::from_path(path)?;
    let text = source.text.clone();
    let typed = zero_config::load(source, &[])?;
    Ok((Some(text), typed.resolve(None).ok().map(|config| config.leaves().into_iter().collect())))
}

/// Reads an optional file of a run. Returns `None` if it does not exist.
fn json_file(path: &Path) -> Result<Option<Value>, Error> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(Error::io(path))?,
    };
    let help = "restore the file, or move it out of the folder; the report is then written without it";
    let parsed: Value = serde_json::from_slice(&text)
        .map_err(|error| damaged(path.display().to_string(), &format!("not JSON: {error}"), help))?;
    match parsed {
        Value::Object(_) => Ok(Some(parsed)),
        _ => Err(damaged(path.display().to_string(), "not a JSON object", help)),
    }
}

/// Returns the error for a file with invalid content.
fn damaged(place: String, message: &str, help: &str) -> Error {
    Error::Setting { key: place, message: message.to_string(), help: help.to_string() }
}

/// Returns the error for a folder whose metrics cannot be read.
fn no_run(path: &Path, source: &io::Error) -> Error {
    let help = "give a run folder: the value of `training.output_dir` or `--out`";
    damaged("<RUN>".to_string(), &format!("{}: {source}", path.display()), help)
}

#[cfg(test)]
mod tests;
