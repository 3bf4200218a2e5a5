//! `csv_monitor`: writes one file per tag, such as `Train_Samples_train_loss.csv` with the header `step,train_loss`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use super::metric::{Metric, Record};
use super::worker::{Sink, Trouble};
use crate::append::Appended;
use zero_engine::Error;
use zero_engine::files::replace;

pub(super) struct Csv {
    folder: PathBuf,
    /// The run's own folder.
    run: PathBuf,
    /// The number of samples at which the run resumes, or `None` for a new run. Lines of later samples are removed,
    /// because the run writes them again.
    resumed: Option<u64>,
    files: BTreeMap<&'static str, OneFile>,
}

/// In a folder that several runs share, this file names the last run that wrote each CSV file.
const WRITERS: &str = ".runs.json";

struct OneFile {
    file: Appended,
    /// Number of samples in the last line of this file. If writing a step to another file fails, the step is passed
    /// again, and must not be written to this file twice.
    last: Option<u64>,
}

impl Csv {
    pub(super) fn new(folder: PathBuf, run: PathBuf, resumed: Option<u64>) -> Self {
        Self { folder, run, resumed, files: BTreeMap::new() }
    }

    fn open(&self, tag: &'static str) -> Result<OneFile, Error> {
        fs::create_dir_all(&self.folder).map_err(Error::io(&self.folder))?;
        let path = self.folder.join(format!("{}.csv", tag.replace('/', "_")));
        let mut file = Appended::open(&path, u64::MAX)?;
        // Do not read device files: reading one may never end.
        let present = if path.is_file() { fs::read(&path).map_err(Error::io(&path))? } else { vec![] };
        let run = self.run.canonicalize().unwrap_or_else(|_| self.run.clone());
        let (mut writers, run) = (self.writers(), run.to_string_lossy().into_owned());
        let is_last = self.is_alone() || writers.get(tag) == Some(&run);
        let kept = kept(&present, self.resumed.filter(|_| is_last).unwrap_or(u64::MAX));
        file.truncate(kept as u64)?;
        // Without a header, the rows of a resumed run could look like a continuation of another run.
        if kept == 0 || self.resumed.is_some() && !is_last {
            file.append(format!("step,{}\n", Metric::last_part(tag)).as_bytes())?;
        }
        if !is_last {
            writers.insert(tag.into(), run);
            let (path, text) = (self.folder.join(WRITERS), serde_json::json!(writers).to_string());
            replace(&path, text).map_err(Error::io(&path))?;
        }
        Ok(OneFile { file, last: None })
    }

    /// Returns whether no other run writes to the folder.
    fn is_alone(&self) -> bool {
        self.folder.starts_with(&self.run)
    }

    /// Returns the folder of the last run that wrote each file, by tag.
    fn writers(&self) -> BTreeMap<String, String> {
        let text = fs::read(self.folder.join(WRITERS)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }
}

impl Sink for Csv {
    fn write(&mut self, records: &[Record]) -> Result<(), Trouble> {
        let mut lines: BTreeMap<&'static str, Vec<(u64, f64)>> = BTreeMap::new();
        for record in records {
            for scalar in &record.scalars {
                lines.entry(scalar.metric.tag).or_default().push((record.samples, scalar.value));
            }
        }
        for (tag, values) in lines {
            if !self.files.contains_key(tag) {
                self.files.insert(tag, self.open(tag)?);
            }
            let Some(one) = self.files.get_mut(tag) else { continue };
            let new = values.iter().filter(|(samples, _)| one.last.is_none_or(|last| *samples > last));
            let text = new.fold(String::new(), |mut text, (samples, value)| {
                let _ = writeln!(text, "{samples},{value}");
                text
            });
            one.file.append(text.as_bytes())?;
            one.last = values.last().map(|(samples, _)| *samples).or(one.last);
        }
        Ok(())
    }

    fn help(&self) -> String {
        "free some disk space, or set `csv_monitor.output_path` to another folder".into()
    }
}

/// Returns the number of bytes to keep when a run resumes after `samples` samples. Drops later lines of the last run in
/// the file, and an incomplete last line of a killed run.
fn kept(text: &[u8], samples: u64) -> usize {
    let (mut end, mut cut, mut before) = (0, None, None);
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        let start = end;
        end += line.len();
        if !line.ends_with(b"\n") {
            cut = cut.or(Some(start));
            break;
        }
        let first = line.split(|&byte| byte == b',').next().and_then(|first| std::str::from_utf8(first).ok());
        let at: Option<u64> = first.and_then(|first| first.parse().ok());
        // After a header, or if the number of samples does not increase, another run begins.
        if at.is_none() || at <= before {
            cut = None;
        }
        if cut.is_none() && at.is_some_and(|at| at > samples) {
            cut = Some(start);
        }
        before = at;
    }
    cut.unwrap_or(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_after_the_resumed_step_are_cut_off() {
        let table = [
            ("", 4, ""),
            ("step,lr\n4,1\n8,2\n12,3\n", 8, "step,lr\n4,1\n8,2\n"),
            ("step,lr\n4,1\n8,2\n", 0, "step,lr\n"),
            ("step,lr\n4,1\n8,2\n12", 100, "step,lr\n4,1\n8,2\n"),
            ("step,lr\n4,1\n8,2\n1", 4, "step,lr\n4,1\n"),
            // Earlier runs in the same file are kept, with or without a header between the runs.
            ("step,lr\n4,1\n8,2\n4,5\n8,6\n", 4, "step,lr\n4,1\n8,2\n4,5\n"),
            ("step,lr\n4,1\n8,2\nstep,lr\n9,6\n", 4, "step,lr\n4,1\n8,2\nstep,lr\n"),
        ];
        for (text, samples, expected) in table {
            assert_eq!(&text[..kept(text.as_bytes(), samples)], expected, "{text} after {samples}");
        }
        assert_eq!(kept(&[0xFF, b'\n', 0xFE], 1), 2);
    }

    #[test]
    fn a_resumed_run_keeps_the_rows_of_later_runs() {
        use crate::monitor::metric::{LR, Scalar};
        let root = tempfile::tempdir().unwrap();
        let [shared, first, second] = ["shared", "first", "second"].map(|name| root.path().join(name));
        let write = |run: &PathBuf, resumed, samples: &[u64]| {
            let scalars = vec![Scalar { metric: &LR, value: 1.0 }];
            let record = |&samples| Record { samples, scalars: scalars.clone(), ..Record::default() };
            let records: Vec<Record> = samples.iter().map(record).collect();
            assert!(Csv::new(shared.clone(), run.clone(), resumed).write(&records).is_ok());
            let lines = fs::read_to_string(shared.join("Train_Samples_lr.csv")).unwrap();
            lines.replace(",1\n", " ").replace('\n', " ")
        };
        assert_eq!(write(&first, None, &[4, 8, 12]), "step,lr 4 8 12 ");
        assert_eq!(write(&first, Some(8), &[12, 16]), "step,lr 4 8 12 16 ");
        assert_eq!(write(&second, None, &[4, 8]), "step,lr 4 8 12 16 4 8 ");
        assert_eq!(write(&first, Some(8), &[12, 16]), "step,lr 4 8 12 16 4 8 step,lr 12 16 ");
        assert_eq!(write(&first, Some(4), &[8]), "step,lr 4 8 12 16 4 8 step,lr 8 ");
    }
}
