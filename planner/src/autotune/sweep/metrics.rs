//! Reads a trial's `metrics.jsonl` while it is written.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use serde_json::Value;

use super::trial::Evaluation;

/// The file and the read position.
pub(super) struct Metrics {
    path: PathBuf,
    /// Number of bytes of the complete lines read so far.
    read: u64,
    /// Number of steps between evaluations.
    every: u64,
}

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Evaluated {
    Loss(Evaluation),
    /// The loss is infinite or NaN.
    NotFinite {
        step: u64,
    },
}

impl Metrics {
    pub(super) fn new(path: PathBuf, every: u64) -> Self {
        Self { path, read: 0, every }
    }

    /// Returns the evaluations added since the last call.
    pub(super) fn new_ones(&mut self) -> Vec<Evaluated> {
        // The file does not exist before the first step, and a read that fails now may succeed later. Neither is an
        // error.
        let Ok(mut file) = File::open(&self.path) else { return vec![] };
        let mut bytes = vec![];
        if file.seek(SeekFrom::Start(self.read)).and_then(|_| file.read_to_end(&mut bytes)).is_err() {
            return vec![];
        }
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        self.read += whole as u64;
        let lines = bytes[..whole].split(|&byte| byte == b'\n');
        lines.filter_map(|line| self.evaluation(&serde_json::from_slice(line).ok()?)).collect()
    }

    fn evaluation(&self, line: &Value) -> Option<Evaluated> {
        let step = line["step"].as_u64()?;
        match line["eval_loss"].as_f64().map(|loss| loss as f32) {
            Some(loss) if loss.is_finite() => Some(Evaluated::Loss(Evaluation { step, loss })),
            // `eval_loss` is null if the loss is not finite, and also if the step has no evaluation.
            _ => (self.every > 0 && step.is_multiple_of(self.every)).then_some(Evaluated::NotFinite { step }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_read_once_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut metrics = Metrics::new(path.clone(), 2);
        assert_eq!(metrics.new_ones(), []);
        let mut file = File::create(&path).unwrap();
        file.write_all(b"{\"step\": 1, \"eval_loss\": null}\n{\"step\": 2, \"eval_loss\": 1.5}\n{\"step\": 3, \"eva")
            .unwrap();
        assert_eq!(metrics.new_ones(), [Evaluated::Loss(Evaluation { step: 2, loss: 1.5 })]);
        assert_eq!(metrics.new_ones(), []);
        file.write_all(b"l_loss\": null}\n{\"step\": 4, \"eval_loss\": null}\n").unwrap();
        assert_eq!(metrics.new_ones(), [Evaluated::NotFinite { step: 4 }]);
    }
}
