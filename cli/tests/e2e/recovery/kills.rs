//! Ranks killed at random moments of long runs: every kill is recovered from on the first try, and the bits stay.
#![allow(unreachable_pub)] // part of one test

use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::case::{Case, text};
use crate::launch::ranks;

/// Kills of one run, at most.
const KILLS_OF_A_RUN: usize = 20;
/// Steps of a run. One that gets to its end before its last kill is followed by another.
const STEPS: u64 = 600;
/// Steps between two checkpoints.
const SAVE_EVERY: u64 = 10;
/// Latest moment of a kill after the start of an attempt.
const LATEST: Duration = Duration::from_millis(600);

/// Kills `kills` ranks in runs of two, one after the other, and prints what came of it.
pub fn sweep(kills: usize) {
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
        // One restart a kill: none of them failed by itself.
        let restarts = errors.lines().filter(|line| line.starts_with("restart ")).count();
        assert_eq!(restarts, done, "{errors}");
        assert!((case.losses(&out), case.shards(&out, STEPS)) == expected, "{out} has other bits: {errors}");
        fs::remove_dir_all(case.path(&out)).unwrap();
        (killed, runs) = (killed + done, runs + 1);
    }
    until_ended.sort_unstable();
    let at = |share: f64| until_ended[((until_ended.len() - 1) as f64 * share).ceil() as usize];
    println!("| killed | runs | recovered on the first try | until the survivor had ended: median | p99 | longest |");
    println!("|---|---|---|---|---|---|");
    println!("| {killed} | {runs} | {killed} | {:.0?} | {:.0?} | {:.0?} |", at(0.5), at(0.99), at(1.0));
}

/// A run that saves while it waits, or in the background.
fn start(case: &Case, out: &str, restarts: usize, background: bool) -> Child {
    let (steps, restarts) = (STEPS.to_string(), restarts.to_string());
    let saves = format!("training.save_every={SAVE_EVERY}");
    let args = ["--config", "ds.yaml", "--plain", "-n", "2", "--out", out, "--max-steps", &steps, "--set", &saves];
    let mut command = case.command(&args);
    command.args(["--max-restarts", &restarts, "--set", "steps_per_print=0"]);
    command.args(["--set", &format!("training.save_async={background}")]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Kills a rank of an attempt at some moment, and waits until the other has ended; says how long that took. `None` if the run was over
/// before.
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
    // A rank that is done, and only not waited for yet, cannot be killed any more: the run is over.
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

/// Whether a process is gone, or only waited for.
fn has_ended(process: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name before the state may have brackets and spaces itself.
    status.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

/// A generator whose seed is the time, and is printed.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let seed = std::env::var("ZERO_TRAIN_KILLS_SEED").ok().and_then(|seed| seed.parse().ok());
        Self(seed.unwrap_or(time.as_nanos() as u64))
    }

    /// SplitMix64.
    fn below(&mut self, end: u64) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end) as usize
    }
}
