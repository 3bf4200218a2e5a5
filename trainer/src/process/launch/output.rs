//! Routes the output of the ranks to the terminal, with or without a rank prefix, and to log files. Keeps the last
//! lines of each rank for error reports.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use zero_engine::Error;

/// Maximum number of lines of a failed rank that are shown.
const LAST: usize = 40;
/// Maximum length of a line in bytes. Longer lines are split.
const LONGEST: u64 = 64 << 10;
/// Maximum wait for the end of a rank's output. A child process of the rank may keep the pipe open.
const PATIENCE: Duration = Duration::from_secs(1);

/// Selects the streams to show, as torchrun's `--tee` does. Bit 0 selects standard output, bit 1 standard error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tee {
    /// Shows the same streams of all ranks.
    All(u8),
    /// Shows the listed streams of the listed local ranks, and nothing of the other ranks.
    Ranks(Vec<(usize, u8)>),
}

impl Tee {
    fn of(&self, local_rank: usize) -> u8 {
        match self {
            Self::All(streams) => *streams,
            Self::Ranks(ranks) => ranks.iter().find(|(rank, _)| *rank == local_rank).map_or(0, |(_, streams)| *streams),
        }
    }
}

impl FromStr for Tee {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let streams = |text: &str| match text {
            "0" | "1" | "2" | "3" => Ok(text.as_bytes()[0] - b'0'),
            _ => Err("use 0, 1, 2 or 3, or one number per local rank: 0:3,1:2".to_string()),
        };
        if !text.contains(':') {
            return streams(text).map(Self::All);
        }
        let rank = |part: &str| {
            let (rank, shown) = part.split_once(':').ok_or_else(|| format!("`{part}` is not RANK:STREAMS"))?;
            let rank = rank.parse().map_err(|_| format!("`{rank}` is not a rank"))?;
            Ok((rank, streams(shown)?))
        };
        text.split(',').map(rank).collect::<Result<_, String>>().map(Self::Ranks)
    }
}

/// Where the output of the ranks goes.
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// Folder for log files, which receive all output of all ranks.
    pub log_dir: Option<PathBuf>,
    /// Streams to show with a rank prefix on each line. If this is `None`, the standard output of all ranks and the
    /// standard error of local rank 0 are shown unchanged. If another rank fails first, the last lines of its standard
    /// error are shown too.
    pub tee: Option<Tee>,
    /// Whether to show the output of all ranks unchanged. Ignored if `tee` is set.
    pub all: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Out,
    Errors,
}

/// How a stream is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Shown {
    AsItIs,
    After(String),
    Nothing,
}

/// The destinations of both streams of one rank.
pub(super) struct Plan {
    shown: [Shown; 2],
    files: [Option<File>; 2],
}

impl Output {
    /// Creates the plan for a rank of an attempt, and opens its log files.
    pub(super) fn plan(&self, attempt: usize, rank: usize, local_rank: usize) -> Result<Plan, Error> {
        let shown = |stream: Stream| match &self.tee {
            Some(tee) if tee.of(local_rank) >> (stream as u8) & 1 == 1 => Shown::After(format!("[rank {rank}]: ")),
            Some(_) => Shown::Nothing,
            // The other ranks of a training run print only errors, usually the same errors as rank 0.
            None if self.all || local_rank == 0 => Shown::AsItIs,
            None if stream == Stream::Out => Shown::AsItIs,
            None => Shown::Nothing,
        };
        let file = |name: &str| match &self.log_dir {
            None => Ok(None),
            Some(folder) => open(&folder.join(format!("attempt_{attempt}/{rank}")), name).map(Some),
        };
        Ok(Plan {
            shown: [shown(Stream::Out), shown(Stream::Errors)],
            files: [file("stdout.log")?, file("stderr.log")?],
        })
    }
}

fn open(folder: &Path, name: &str) -> Result<File, Error> {
    let path = folder.join(name);
    let file = fs::create_dir_all(folder).and_then(|()| File::create(&path));
    file.map_err(|error| {
        let help = "choose a writable folder";
        Error::Launch(format!("{}: {error}\n  in: --log-dir\n  help: {help}", path.display()))
    })
}

impl Plan {
    /// Returns whether the launcher must read a stream. It reads standard error if the error report may need the last
    /// lines.
    fn is_read(&self, stream: Stream, keeps_errors: bool) -> bool {
        let index = stream as usize;
        self.files[index].is_some() || self.shown[index] != Shown::AsItIs || stream == Stream::Errors && keeps_errors
    }

    /// Redirects the streams of a rank that is about to start. `keeps_errors` is set if the error report may need the
    /// last lines of standard error.
    pub(super) fn prepare(&self, command: &mut Command, keeps_errors: bool) {
        if self.is_read(Stream::Out, keeps_errors) {
            command.stdout(Stdio::piped());
        }
        if self.is_read(Stream::Errors, keeps_errors) {
            command.stderr(Stdio::piped());
        }
    }

    /// Starts threads that forward the output of the rank.
    pub(super) fn follow(self, child: &mut Child) -> Printed {
        let [out, errors] = self.shown;
        let [out_file, errors_file] = self.files;
        let hidden = errors == Shown::Nothing;
        let out = child.stdout.take().map(|pipe| Follower::start(pipe, Stream::Out, out, out_file));
        let errors = child.stderr.take().map(|pipe| Follower::start(pipe, Stream::Errors, errors, errors_file));
        Printed { out, errors, hidden }
    }
}

/// The output of a running rank.
pub(super) struct Printed {
    out: Option<Follower>,
    errors: Option<Follower>,
    hidden: bool,
}

impl Printed {
    /// Waits until all output has been forwarded. Returns the last lines of standard error, and whether they were
    /// hidden from the terminal. The text is empty if standard error goes straight to the terminal.
    pub(super) fn last_lines(&self) -> (String, bool) {
        let end = Instant::now() + PATIENCE;
        for follower in self.out.iter().chain(&self.errors) {
            while !follower.thread.is_finished() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        let Some(errors) = &self.errors else { return (String::new(), false) };
        let lines = errors.last.lock().unwrap_or_else(PoisonError::into_inner);
        (lines.iter().map(|line| String::from_utf8_lossy(line)).collect(), self.hidden)
    }
}

/// A thread that forwards the data from a pipe, and the last lines that it read.
struct Follower {
    thread: JoinHandle<()>,
    last: Arc<Mutex<VecDeque<Vec<u8>>>>,
}

impl Follower {
    fn start(pipe: impl Read + Send + 'static, stream: Stream, shown: Shown, mut file: Option<File>) -> Self {
        let last = Arc::new(Mutex::new(VecDeque::new()));
        let kept = Arc::clone(&last);
        let thread = std::thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while pipe.by_ref().take(LONGEST).read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                // A full disk or a closed terminal must not disturb the rank.
                let _ = show(stream, &shown, &line);
                let _ = file.as_mut().map(|file| file.write_all(&line));
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.push_back(std::mem::take(&mut line));
                if kept.len() > LAST {
                    kept.pop_front();
                }
            }
        });
        Self { thread, last }
    }
}

fn show(stream: Stream, shown: &Shown, line: &[u8]) -> io::Result<()> {
    let text = match shown {
        Shown::Nothing => return Ok(()),
        Shown::AsItIs => line.to_vec(),
        Shown::After(prefix) => {
            let end: &[u8] = if line.ends_with(b"\n") { b"" } else { b"\n" };
            [prefix.as_bytes(), line, end].concat()
        }
    };
    // Each line is written in one piece, because other ranks print at the same time.
    match stream {
        Stream::Out => {
            let mut out = io::stdout().lock();
            out.write_all(&text)?;
            out.flush()
        }
        Stream::Errors => io::stderr().lock().write_all(&text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tee_has_the_syntax_of_torchrun() {
        assert_eq!("3".parse(), Ok(Tee::All(3)));
        assert_eq!("0:3,2:1".parse(), Ok(Tee::Ranks(vec![(0, 3), (2, 1)])));
        let tee: Tee = "0:3,2:1".parse().expect("a valid selection");
        assert_eq!([tee.of(0), tee.of(1), tee.of(2)], [3, 0, 1]);
        for wrong in ["4", "", "0:4", "x:1", "0:1,2", "-1"] {
            assert!(wrong.parse::<Tee>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn output_goes_to_log_files_and_the_last_lines_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let output = Output { log_dir: Some(folder.path().into()), tee: Some(Tee::All(0)), all: false };
        let plan = output.plan(1, 5, 1).expect("a file");
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; for i in $(seq 100); do echo line $i >&2; done; printf end >&2"]);
        plan.prepare(&mut command, true);
        let mut child = command.spawn().expect("a shell");
        let printed = plan.follow(&mut child);
        child.wait().expect("the shell ends");
        let (last, hidden) = printed.last_lines();
        assert!(hidden && last.starts_with("line 62\n") && last.ends_with("line 100\nend"), "{last}");
        let read = |name: &str| fs::read_to_string(folder.path().join("attempt_1/5").join(name)).expect("a file");
        assert_eq!(read("stdout.log"), "out\n");
        assert_eq!(read("stderr.log").lines().count(), 101);
    }
}
