//! `csv_monitor`: writes one file per tag, such as `Train_Samples_train_loss.csv` with the header `step,train_loss`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use super::metric::{Metric, Record};
use super::worker::{Sink, Trouble};
use crate::append::Appended;
use zero_engine::Error;

pub(super) struct Csv {
    folder: PathBuf,
    /// The number of samples at which the run resumes, or `None` for a new run. Lines of later samples are removed,
    /// because the run writes them again.
    resumed: Option<u64>,
    files: BTreeMap<&'static str, OneFile>,
}

struct OneFile {
    file: Appended,
    /// Number of samples in the last line of this file. If writing a step to another file fails, the step is passed
    /// again, and must not be written to this file twice.
    last: Option<u64>,
}

impl Csv {
    pub(super) fn new(folder: PathBuf, resumed: Option<u64>) -> Self {
        Self { folder, resumed, files: BTreeMap::new() }
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
            let one = match self.files.entry(tag) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(open(&self.folder, tag, self.resumed)?),
            };
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

fn open(folder: &Path, tag: &'static str, resumed: Option<u64>) -> Result<OneFile, Error> {
    fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let path = folder.join(format!("{}.csv", tag.replace('/', "_")));
    let mut file = Appended::open(&path, u64::MAX)?;
    // Do not read device files: reading one may never end.
    let present = if path.is_file() { fs::read(&path).map_err(Error::io(&path))? } else { vec![] };
    let kept = kept(&present, resumed.unwrap_or(u64::MAX));
    file.truncate(kept as u64)?;
    if kept == 0 {
        file.append(format!("step,{}\n", Metric::last_part(tag)).as_bytes())?;
    }
    Ok(OneFile { file, last: None })
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
}
