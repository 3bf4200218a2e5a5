//! Trains two ranks with a launcher of another system, compares the results with those of our launcher, and kills a
//! rank.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::case::{Case, signal, text};

/// How to start two ranks with another launcher, and what to expect from it.
pub(super) struct Launcher {
    name: &'static str,
    /// Command that prints the version, and fails if the launcher is not installed.
    pub(super) version: Vec<String>,
    /// The launcher's command, without the program and its arguments.
    pub(super) start: Vec<String>,
    /// The command to show in the table instead of `start`.
    pub(super) shown: Option<&'static str>,
    pub(super) variables: Vec<(&'static str, String)>,
    /// The launcher's exit status when a rank was killed.
    status: i32,
    /// Texts that the launcher must print when a rank was killed, in this order, in addition to the survivor's error.
    says: &'static [&'static str],
    /// Whether the launcher kills the surviving rank before that rank can report an error.
    pub(super) kills: bool,
}

impl Launcher {
    pub(super) fn new(name: &'static str, start: &str, status: i32, says: &'static [&'static str]) -> Self {
        let start: Vec<String> = start.split_whitespace().map(String::from).collect();
        let version = start.first().into_iter().chain([&"--version".to_string()]).cloned().collect();
        Self { name, version, start, shown: None, variables: vec![], status, says, kills: false }
    }

    /// Returns the launcher's version: the first word that begins with a digit, in the first line with a digit. Prints
    /// the reason and returns `None` if the launcher is not installed.
    pub(super) fn found(&self) -> Option<String> {
        let skipped = |reason: &str| {
            println!("skipped, {}: {}", self.name, reason.trim());
            None
        };
        let output = match Command::new(&self.version[0]).args(&self.version[1..]).stdin(Stdio::null()).output() {
            Ok(output) => output,
            Err(error) => return skipped(&error.to_string()),
        };
        if !output.status.success() {
            return skipped(text(&output.stderr).lines().last().unwrap_or("it fails"));
        }
        let said = text(&[output.stdout, output.stderr].concat());
        let line = said.lines().find(|line| line.chars().any(|c| c.is_ascii_digit()));
        let version =
            line.unwrap_or_default().split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
        Some(version.unwrap_or_default().trim_end_matches(',').to_string())
    }

    fn command(&self, case: &Case, out: &Path, args: &[&str]) -> Command {
        let binary = env!("CARGO_BIN_EXE_zero-train");
        let config = case.path("ds.yaml");
        let corpus = format!("data.train={:?}", case.path("corpus.txt"));
        // All paths are absolute, because Ray runs the ranks in another folder.
        let own = ["--config", config.to_str().unwrap(), "--plain", "--set", &corpus, "--out", out.to_str().unwrap()];
        let start: Vec<&str> = self.start.iter().map(String::as_str).collect();
        let all = [&start[1..], &[binary], &own, args].concat();
        let mut command = case.command_of(Path::new(start[0]), &all);
        command.envs(self.variables.iter().cloned());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Trains, compares with our launcher, kills a rank of a second run, and prints a row of the table.
    pub(super) fn works(&self) {
        let Some(version) = self.found() else { return };
        let case = Case::new();
        case.train(&["--quiet", "-n", "2", "--out", "own"]);
        let own = (case.losses("own"), case.shards("own", 20));
        let out = case.path("theirs");
        let started = Instant::now();
        let running = self.command(&case, &out, &[]).spawn().unwrap();
        let output = running.wait_with_output().unwrap();
        let took = started.elapsed();
        assert_eq!(output.status.code(), Some(0), "{}: {}", self.name, said(&output));
        assert!((case.losses("theirs"), case.shards("theirs", 20)) == own, "{}: not bit-identical", self.name);
        let report = case.report("theirs");
        assert_eq!(
            (&report["world_size"], &report["transport"]),
            (&2.into(), &"shared memory".into()),
            "{}",
            self.name
        );
        let (code, ended) = self.ends_when_a_rank_is_killed(&case);
        let start = || self.start.iter().map(|word| short(word)).collect::<Vec<_>>().join(" ") + " zero-train …";
        println!(
            "| {} | {version} | `{}` | {:.1} s | {code} | {:.1} s |",
            self.name,
            self.shown.map_or_else(start, String::from),
            took.as_secs_f64(),
            ended.as_secs_f64(),
        );
    }

    /// Kills a rank of an endless run. Returns the launcher's exit status, and the time until it ended.
    fn ends_when_a_rank_is_killed(&self, case: &Case) -> (i32, Duration) {
        let out = case.path("killed");
        let running = self.command(case, &out, &["--max-steps", "1000000"]).spawn().unwrap();
        // Some launchers take a minute to start on a busy machine.
        let patience = Instant::now() + Duration::from_secs(300);
        while case.steps("killed") < 3 {
            assert!(Instant::now() < patience, "{}: it does not train", self.name);
            std::thread::sleep(Duration::from_millis(20));
        }
        let ranks = ranks_of(&out);
        assert_eq!(ranks.len(), 2, "{}: {ranks:?}", self.name);
        signal(ranks.iter().find(|(rank, _)| *rank == 1).expect("rank 1").1, "KILL");
        let killed = Instant::now();
        let output = running.wait_with_output().unwrap();
        let took = killed.elapsed();
        let said = said(&output);
        let code = output.status.code().unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0));
        assert_eq!(code, self.status, "{}: {said}", self.name);
        assert!(self.kills || said.contains("rank 0 lost rank 1 in "), "{}: {said}", self.name);
        let mut rest = said.as_str();
        for word in self.says {
            let found = rest.split_once(word);
            rest = found.unwrap_or_else(|| panic!("{}: `{word}`: {said}", self.name)).1;
        }
        let end = Instant::now() + Duration::from_secs(10);
        while !ranks_of(&out).is_empty() {
            assert!(Instant::now() < end, "{}: a rank is left", self.name);
            std::thread::sleep(Duration::from_millis(20));
        }
        (code, took)
    }
}

fn said(output: &Output) -> String {
    text(&[&output.stdout[..], &output.stderr].concat())
}

/// Shortens a path to its file name.
fn short(word: &str) -> String {
    Path::new(word).file_name().map_or_else(|| word.into(), |name| name.to_string_lossy().into_owned())
}

/// Returns the running ranks whose arguments contain the folder, as pairs of rank and process ID.
fn ranks_of(out: &Path) -> Vec<(usize, u32)> {
    let wanted = out.to_str().unwrap();
    let binary = fs::canonicalize(env!("CARGO_BIN_EXE_zero-train")).unwrap();
    let mut found = vec![];
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
        let is_rank = fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == binary)
            && read("cmdline").split(|&byte| byte == 0).any(|word| word == wanted.as_bytes());
        if !is_rank {
            continue;
        }
        let environment = text(&read("environ"));
        let variable = |name: &str| {
            let mut entries = environment.split('\0');
            entries.find_map(|entry| entry.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        let names = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
        if let Some(rank) = names.into_iter().find_map(variable) {
            found.push((rank, process));
        }
    }
    found
}
