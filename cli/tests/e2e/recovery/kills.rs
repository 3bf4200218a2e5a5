//! Kills ranks at random moments of long runs. Every restart must succeed at the first attempt, and the result must be
//! bit-identical to an undisturbed run.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::case::{Case, text};
use crate::launch::ranks;

/// Maximum number of kills per run.
const KILLS_OF_A_RUN: usize = 20;
/// Number of steps of a run. If a run finishes before its last kill, another run follows.
const STEPS: u64 = 600;
/// Number of steps between two checkpoints.
const SAVE_EVERY: u64 = 10;
/// Maximum time from the start of an attempt to its kill.
const LATEST: Duration = Duration::from_millis(600);

/// Kills `kills` ranks, one at a time, in runs of two ranks, and prints a table of the results.
pub(crate) fn sweep(kills: usize) {
    let case = Case::new();
    let mut random = Random::new();
    println!("seed {}", random.0);
    let whole = start(&case, "whole", 0, false);
    assert!(whole.wait_with_output().unwrap().status.success());
    let expected = (case.losses("whole"), case.shards("whole", STEPS));
    let (mut killed, mut runs, mut until_ended) = (0, 0, Vec::new());
    while killed < kills {
        let out = format!("run-{runs}");
        let mut run = start(&case, &out, KILLS_OF_A_RUN + 1, runs % 2 == 1);
        let mut done = 0;
        while done < KILLS_OF_A_RUN.min(kills - killed) {
            let Some(took) = kill_one(&mut run, done, &mut random) else { break };
            until_ended.push(took);
            done += 1;
        }
        let output = run.wait_with_output().unwrap();
        let (told, errors) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "after {done} kills: {told}\n{errors}");
        // One restart per kill: no attempt failed without a kill.
        let restarts = errors.lines().filter(|line| line.starts_with("restart ")).count();
        assert_eq!(restarts, done, "{errors}");
        assert!((case.losses(&out), case.shards(&out, STEPS)) == expected, "{out} is not bit-identical: {errors}");
        fs::remove_dir_all(case.path(&out)).unwrap();
        (killed, runs) = (killed + done, runs + 1);
    }
    until_ended.sort_unstable();
    let at = |share: f64| until_ended[((until_ended.len() - 1) as f64 * share).ceil() as usize];
    println!("| killed | runs | recovered on the first try | until the survivor had ended: median | p99 | longest |");
    println!("|---|---|---|---|---|---|");
    println!("| {killed} | {runs} | {killed} | {:.0?} | {:.0?} | {:.0?} |", at(0.5), at(0.99), at(1.0));
}

/// Kills all processes of a run at `kills` random steps. Each time, the run continues on a different number of ranks.
/// Its losses and its last checkpoint must be bit-identical to those of an undisturbed run. Prints a summary.
pub(crate) fn sweep_over_ranks(kills: usize) {
    /// Number of steps of a run, and maximum number of kills.
    const OF_A_RUN: (u64, usize) = (200, 10);
    let case = Case::new();
    let mut random = Random::new();
    println!("seed {}", random.0);
    let start = |out: &str, ranks: usize| {
        let (steps, ranks) = (OF_A_RUN.0.to_string(), ranks.to_string());
        let args = ["--config", "ds.yaml", "--plain", "-n", &ranks, "--out", out, "--max-steps", &steps];
        let mut command = case.command(&args);
        // A micro-batch has two samples on any number of ranks.
        for set in ["train_batch_size=8", "training.reproducible=true", "training.save_every=7", "steps_per_print=0"] {
            command.args(["--set", set]);
        }
        command.args(["--resume", "auto"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let end = |run: Child| {
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    end(start("whole", 1));
    let expected = (case.losses("whole"), case.shards("whole", OF_A_RUN.0));
    let (mut killed, mut runs, mut pairs) = (0, 0, BTreeMap::new());
    while killed < kills {
        let out = format!("run-{runs}");
        let (mut ranks, mut done) = ([1, 2, 4][random.below(3)], 0);
        let mut at: Vec<usize> = (0..OF_A_RUN.1.min(kills - killed)).map(|_| random.below(OF_A_RUN.0 - 5)).collect();
        at.sort_unstable();
        for step in at {
            let mut run = start(&out, ranks);
            // If processes are slow, the previous kill came late, and the run may already have passed this step.
            while case.steps(&out) < step && run.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            let of_run = [vec![run.id()], ranks::of(run.id())].concat();
            if run.try_wait().unwrap().is_some() {
                break;
            }
            kill_all(&of_run);
            run.wait().unwrap();
            let others: Vec<usize> = [1, 2, 4].into_iter().filter(|&other| other != ranks).collect();
            let next = others[random.below(2)];
            *pairs.entry((ranks, next)).or_insert(0) += 1;
            (ranks, done) = (next, done + 1);
        }
        // The last part runs on one rank like the undisturbed run, so that both checkpoints have the same shards.
        end(start(&out, 1));
        assert_eq!(case.losses(&out), expected.0, "{out}");
        assert_eq!(case.shards(&out, OF_A_RUN.0), expected.1, "{out}");
        fs::remove_dir_all(case.path(&out)).unwrap();
        (killed, runs) = (killed + done, runs + 1);
    }
    println!("{killed} kills in {runs} runs, all bit-identical; ranks before and after a kill: {pairs:?}");
}

/// Kills the launcher, then its ranks. Waits until the ranks have ended.
fn kill_all(processes: &[u32]) {
    for &process in processes {
        let process = rustix::process::Pid::from_raw(process.cast_signed()).unwrap();
        // A rank may have ended with its launcher.
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
    }
    let killed = Instant::now();
    while !processes[1..].iter().all(|&process| has_ended(process)) {
        assert!(killed.elapsed() < Duration::from_secs(60), "a killed rank does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Starts a run of two ranks, with synchronous or background saves.
fn start(case: &Case, out: &str, restarts: usize, background: bool) -> Child {
    let (steps, restarts) = (STEPS.to_string(), restarts.to_string());
    let saves = format!("training.save_every={SAVE_EVERY}");
    let args = ["--config", "ds.yaml", "--plain", "-n", "2", "--out", out, "--max-steps", &steps, "--set", &saves];
    let mut command = case.command(&args);
    command.args(["--max-restarts", &restarts, "--set", "steps_per_print=0"]);
    command.args(["--set", &format!("training.save_async={background}")]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Kills a rank of an attempt at a random moment, and waits until the other rank has ended. Returns the time that this
/// took; `None` if the run had finished before.
fn kill_one(run: &mut Child, attempt: usize, random: &mut Random) -> Option<Duration> {
    let (victim, after) = (random.below(2), LATEST.mul_f64(random.below(1000) as f64 / 1000.0));
    let begun = Instant::now();
    let mut started = None;
    loop {
        assert!(begun.elapsed() < Duration::from_secs(120), "attempt {attempt} does not start");
        if run.try_wait().unwrap().is_some() {
            return None;
        }
        let ranks = ranks::of_attempt(run.id(), attempt);
        if !ranks.is_empty() {
            let started = *started.get_or_insert_with(Instant::now);
            if started.elapsed() >= after && ranks.len() == 2 {
                return end_of_both(&ranks, victim);
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn end_of_both(ranks: &[u32], victim: usize) -> Option<Duration> {
    let process = |rank: usize| rustix::process::Pid::from_raw(ranks[rank].cast_signed()).unwrap();
    // If the rank has already ended and the launcher has not reaped it yet, the run is over.
    if has_ended(ranks[victim])
        || rustix::process::kill_process(process(victim), rustix::process::Signal::KILL).is_err()
    {
        return None;
    }
    let killed = Instant::now();
    while !has_ended(ranks[1 - victim]) {
        assert!(killed.elapsed() < Duration::from_secs(60), "the survivor does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(killed.elapsed())
}

/// Returns whether a process has ended. It may still be a zombie.
fn has_ended(process: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name before the state may itself contain parentheses and spaces.
    status.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// A random number generator (SplitMix64), seeded with `ZERO_TRAIN_KILLS_SEED` or the current time.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let seed = std::env::var("ZERO_TRAIN_KILLS_SEED").ok().and_then(|seed| seed.parse().ok());
        Self(seed.unwrap_or(time.as_nanos() as u64))
    }

    /// Returns a random number below `end`.
    fn below(&mut self, end: u64) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end) as usize
    }
}
