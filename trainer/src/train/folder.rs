//! The run folder.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;
use zero_comm::{Communicator, from_each_rank};

use super::restart::Restarts;
use crate::append::Appended;
use zero_engine::Error;
use zero_engine::files::replace;

/// The configuration of the run, with all defaults.
const RESOLVED: &str = "resolved.yaml";
/// The job file: the launcher's name for its job, and the restarts so far.
const JOB: &str = ".job";
const REPORT: &str = "report.json";

/// The files of a run, which rank 0 writes.
pub(super) struct Folder {
    path: PathBuf,
    metrics: Appended,
}

impl Folder {
    /// Opens the folder of a new run. Moves the files of an earlier run aside, and returns their new location.
    pub(super) fn new(path: &Path) -> Result<(Self, Option<PathBuf>), Error> {
        let moved = if holds_a_run(path) { Some(set_aside(path)?) } else { None };
        fs::create_dir_all(path).map_err(Error::io(path))?;
        let metrics = Appended::open(&path.join("metrics.jsonl"), 0)?;
        Ok((Self { path: path.to_path_buf(), metrics }, moved))
    }

    /// Opens the folder of a run that resumes after `step`. Drops the metrics of steps after `step`.
    pub(super) fn resume(path: &Path, step: u64) -> Result<Self, Error> {
        fs::create_dir_all(path).map_err(Error::io(path))?;
        let file = path.join("metrics.jsonl");
        let kept = kept_lines(&file, step)?;
        replace(&file, &kept).map_err(Error::io(&file))?;
        let metrics = Appended::open(&file, kept.len() as u64)?;
        Ok(Self { path: path.to_path_buf(), metrics })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a line to `metrics.jsonl`, completely or not at all.
    pub(super) fn metrics(&mut self, line: &Value) -> Result<(), Error> {
        self.metrics.append(format!("{line}\n").as_bytes())
    }

    pub(super) fn resolved(&self, config: &zero_config::Config) -> Result<(), Error> {
        self.write(RESOLVED, config.to_yaml().as_bytes())
    }

    pub(super) fn has_report(&self) -> bool {
        self.path.join(REPORT).exists()
    }

    pub(super) fn report(&self, report: &Value) -> Result<(), Error> {
        self.write(REPORT, format!("{report:#}\n").as_bytes())
    }

    /// Writes `trace.json` in Chrome's format, with one process per rank and one thread per lane.
    pub(super) fn trace(&self, trace: &str) -> Result<(), Error> {
        self.write("trace.json", trace.as_bytes())
    }

    /// Writes the launcher's job and the restarts so far to the job file. Without a job, removes this file.
    pub(super) fn mark(&self, job: Option<&str>, restarts: &Restarts) -> Result<(), Error> {
        match job {
            Some(job) => self.write(JOB, format!("{job}\n{}", restarts.to_json()).as_bytes()),
            None => {
                let _ = fs::remove_file(self.path.join(JOB));
                Ok(())
            }
        }
    }

    fn write(&self, name: &str, content: &[u8]) -> Result<(), Error> {
        let path = self.path.join(name);
        replace(&path, content).map_err(Error::io(&path))
    }
}

/// Returns the lowest rank that does not see the run folder that rank 0 has opened. A collective.
pub(super) fn unseen(path: &Path, comm: &dyn Communicator) -> Result<Option<usize>, Error> {
    if comm.size() == 1 {
        return Ok(None);
    }
    comm.barrier().wait()?;
    let all = from_each_rank(comm, vec![i64::from(path.join(RESOLVED).exists())])?;
    Ok(all.iter().position(|sees| *sees == [0]))
}

/// Reads the launcher's job and the restarts from a folder's job file.
pub(super) fn job_of(path: &Path) -> Option<(String, Restarts)> {
    let text = fs::read_to_string(path.join(JOB)).ok()?;
    let (job, restarts) = text.split_once('\n')?;
    Some((job.to_string(), Restarts::from_json(restarts).ok()?))
}

/// Returns whether the folder contains the files of a run. The next run moves them aside, unless it resumes in the
/// folder.
#[must_use]
pub fn holds_a_run(path: &Path) -> bool {
    ["metrics.jsonl", "checkpoints", REPORT].iter().any(|name| path.join(name).exists())
}

fn set_aside(path: &Path) -> Result<PathBuf, Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let free = (1..).map(|n| path.with_file_name(format!("{name}.{n}"))).find(|candidate| !candidate.exists());
    let aside = free.unwrap_or_else(|| path.with_file_name(format!("{name}.old")));
    fs::rename(path, &aside).map_err(Error::io(path))?;
    Ok(aside)
}

fn kept_lines(file: &Path, step: u64) -> Result<String, Error> {
    let opened = match File::open(file) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(String::new()),
        other => other.map_err(Error::io(file))?,
    };
    let mut kept = String::new();
    for line in BufReader::new(opened).split(b'\n') {
        let line = line.map_err(Error::io(file))?;
        // Drops a line that a killed run left incomplete, and other unreadable lines.
        let Ok(line) = String::from_utf8(line) else { continue };
        let Ok(value) = serde_json::from_str::<Value>(&line) else { continue };
        if value["step"].as_u64().is_some_and(|s| s <= step) {
            kept.push_str(&line);
            kept.push('\n');
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_run_drops_later_and_unreadable_lines() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("metrics.jsonl");
        fs::write(&file, b"{\"step\":1}\n\0\xff\n\n{\"step\":2}\n{\"step\":3}\n{\"st").unwrap();
        assert_eq!(kept_lines(&file, 2).unwrap(), "{\"step\":1}\n{\"step\":2}\n");
    }
}
