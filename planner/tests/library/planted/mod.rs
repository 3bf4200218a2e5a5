//! A folder with a configuration and a program that stands in for `zero-train`, shared by the tests of both searches.
#![allow(dead_code, unreachable_pub)] // each test file uses a part

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use tempfile::TempDir;
use zero_config::Config;
use zero_planner::Planner;
use zero_planner::autotune::Request;

/// The folder of a test.
pub struct Planted {
    folder: TempDir,
    pub text: String,
    pub stop: AtomicBool,
}

impl Planted {
    /// Creates the folder. The program runs `script` with the variables `$ranks`, `$out` and `$set` (all overrides in
    /// one line).
    pub fn new(data: &str, more: &str, before: &str, script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let corpus = folder.path().join("corpus.txt");
        fs::write(&corpus, "a line of a corpus that repeats itself\n".repeat(200)).unwrap();
        let text = format!(
            "# a comment that stays\nmodel: {{type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2}}\n\
             data: {{train: {}{data}}}\n{more}",
            corpus.display()
        );
        let program = format!(
            "#!/bin/sh\n{before}\necho run >> {}/runs\nset=\" \"\n\
             while [ $# -gt 0 ]; do case \"$1\" in -n) ranks=$2;; --out) out=$2;; --set) set=\"$set$2 \";; esac; shift; done\n{script}\n",
            folder.path().display()
        );
        let planted = Self { folder, text, stop: AtomicBool::new(false) };
        fs::write(planted.program(), program).unwrap();
        fs::set_permissions(planted.program(), fs::Permissions::from_mode(0o755)).unwrap();
        planted
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    fn program(&self) -> PathBuf {
        self.path().join("program")
    }

    pub fn results(&self) -> PathBuf {
        self.path().join("results")
    }

    pub fn request(&self, ranks: usize, resume: bool) -> Request<'_> {
        Request {
            source: zero_config::Source { name: "ds.yaml".into(), text: self.text.clone() },
            overrides: vec![],
            ranks: Some(ranks),
            program: self.program(),
            threads: &|_: &Config| 1,
            planner: &|_: &Config| Ok(Planner::new(None)),
            results_dir: Some(self.results()),
            resume,
            stop: &self.stop,
        }
    }

    /// Returns how many times the program was started for a run.
    pub fn runs(&self) -> usize {
        fs::read_to_string(self.path().join("runs")).map_or(0, |text| text.lines().count())
    }
}
