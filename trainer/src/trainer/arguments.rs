//! The command line of a program that uses a [`Trainer`](super::Trainer).

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use lexopt::prelude::{Long, Short, ValueExt};
use zero_config::{Source, Typed};

use crate::train::{Output, Resume, read_addresses};
use zero_engine::Error;

const OPTIONS: &str = "Options:
  -c, --config FILE     ds.yaml or ds_config.json; may be repeated: keys of later files override earlier ones
  -n, --num-processes N start N ranks on this machine, each a process of this program
                        [default: launcher.num_processes; if unset, one per GPU; without GPUs, the smallest number that the other keys allow]
      --set KEY=VALUE   override a value, for example zero_optimization.stage=2; may be repeated
      --max-steps N     stop after N optimizer steps
      --out DIR         run folder [default: training.output_dir]
      --resume auto|DIR resume from the newest checkpoint of the run (auto), or from the checkpoint or run in DIR
      --evaluate        evaluate the initial weights or the checkpoint of --resume, and train nothing
      --force           start even if the plan exceeds the memory limit
      --plain           print plain lines instead of a progress bar, even on a terminal
      --quiet           print only errors
  -h, --help            print this help

To run on several hosts, use a launcher: zero-train launch --nnodes M PROGRAM [OPTIONS], or torchrun.";

/// The parsed command line.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Arguments {
    files: Vec<PathBuf>,
    set: Vec<String>,
    max_steps: Option<u64>,
    out: Option<PathBuf>,
    pub(super) ranks: Option<usize>,
    pub(super) resume: Option<Resume>,
    pub(super) evaluate: bool,
    pub(super) force: bool,
    pub(super) output: Output,
    pub(super) help: bool,
}

impl Arguments {
    /// Parses the arguments after the program's name.
    ///
    /// # Errors
    /// Fails on an unknown option, and on an option whose value is missing or not a number.
    pub(super) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, Error> {
        let help = "run the program with --help for its options; a program must remove its own arguments before it calls `Trainer::from_arguments`";
        Self::read(arguments).map_err(|error| Error::setting("the command line", error.to_string(), help))
    }

    fn read(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, lexopt::Error> {
        let mut read = Self::default();
        let mut parser = lexopt::Parser::from_args(arguments);
        while let Some(argument) = parser.next()? {
            match argument {
                Short('c') | Long("config" | "deepspeed_config") => read.files.push(parser.value()?.into()),
                Long("set") => read.set.push(parser.value()?.string()?),
                Long("max-steps") => read.max_steps = Some(parser.value()?.parse()?),
                Long("out") => read.out = Some(parser.value()?.into()),
                Short('n') | Long("num-processes") => read.ranks = Some(parser.value()?.parse()?),
                Long("resume") => {
                    let from = parser.value()?;
                    read.resume = Some(if from == "auto" { Resume::Auto } else { Resume::From(from.into()) });
                }
                Long("evaluate") => read.evaluate = true,
                Long("force") => read.force = true,
                Long("plain") => read.output = Output::Plain,
                Long("quiet") => read.output = Output::Quiet,
                Short('h') | Long("help") => read.help = true,
                other => return Err(other.unexpected()),
            }
        }
        Ok(read)
    }

    /// Returns the text that `--help` prints.
    pub(super) fn help() -> String {
        let program = std::env::args().next().unwrap_or_default();
        format!("Usage: {program} --config FILE [OPTIONS]\n\n{OPTIONS}")
    }

    /// Returns the files given with `--config`.
    pub(super) fn files(&self) -> impl DoubleEndedIterator<Item = &Path> {
        self.files.iter().map(PathBuf::as_path)
    }

    /// Reads the configuration: the program's configuration `own`, and the files of `--config`, which override it.
    ///
    /// # Errors
    /// Fails without any configuration, and on files that cannot be read.
    pub(super) fn sources(&self, own: Option<Source>) -> Result<Vec<Source>, Error> {
        let mut sources: Vec<Source> = own.into_iter().collect();
        for file in &self.files {
            sources.push(Source::from_path(file)?);
        }
        if sources.is_empty() {
            return Err(Error::setting(
                "--config",
                "--config FILE is missing",
                "give the configuration file, such as ds.yaml",
            ));
        }
        Ok(sources)
    }

    /// Parses the configuration. `more` has overrides that are applied after the overrides on the command line.
    ///
    /// # Errors
    /// Fails if the configuration contains mistakes.
    pub(super) fn load(&self, sources: Vec<Source>, more: &[String]) -> Result<Typed, Error> {
        read_addresses();
        Ok(zero_config::load_files(sources, &[&*self.overrides(), more].concat())?)
    }

    fn overrides(&self) -> Vec<String> {
        let mut overrides = self.set.clone();
        if let Some(steps) = self.max_steps {
            overrides.push("training.epochs=".into());
            overrides.push(format!("training.max_steps={steps}"));
        }
        overrides.extend(self.out.iter().map(|out| format!("training.output_dir={:?}", out.display().to_string())));
        overrides
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Arguments, String> {
        Arguments::parse(words.iter().map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn options_become_a_configuration() {
        let own = Source { name: "own.yaml".into(), text: "train_batch_size: 4\ntraining: {epochs: 2}".into() };
        let words = "--set train_batch_size=8 --max-steps=3 --resume runs/x --quiet --evaluate".split(' ');
        let read = parse(&words.chain(["--out", "a b"]).collect::<Vec<_>>()).unwrap();
        let resume = Some(Resume::From("runs/x".into()));
        assert_eq!((&read.resume, read.output, read.evaluate), (&resume, Output::Quiet, true));
        let config = read.load(vec![own], &[]).unwrap().resolve(Some(1)).unwrap();
        assert_eq!((config.train_batch_size, config.training.max_steps, config.training.epochs), (8, Some(3), None));
        assert_eq!(config.training.output_dir, "a b");
    }

    #[test]
    fn wrong_arguments_are_reported() {
        for (words, expected) in [
            (&["--frob"][..], "invalid option '--frob'"),
            (&["--max-steps", "x"], "cannot parse argument \"x\""),
            (&["--set"], "missing argument for option '--set'"),
            (&["data.txt"], "unexpected argument \"data.txt\""),
        ] {
            let error = parse(words).unwrap_err();
            assert!(error.contains(expected) && error.contains("--help"), "{error}");
        }
        let error = parse(&[]).unwrap().sources(None).unwrap_err().to_string();
        assert!(error.contains("--config FILE is missing"), "{error}");
    }
}
