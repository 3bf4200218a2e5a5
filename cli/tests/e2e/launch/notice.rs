//! Measures how soon ranks notice that one of them is lost, and checks that they raise no false alarm.
//!
//! `ZERO_TRAIN_NOTICE` sets the number of kills (10 by default). If it is set, the test under load runs 10,000 steps.
//! `scripts/notice.sh` runs only these tests. The ranks are started without our launcher, which would end the survivors
//! itself.

use crate::case;
use crate::launch::hosts::LAYOUTS;
use crate::launch::ranks;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use case::{Alone, Case, port, signal, wait_for};

/// The transports within a host and between hosts.
const TRANSPORTS: [&str; 2] = ["shared_memory", "tcp"];
const RANKS: usize = 4;
/// `launcher.timeout_seconds` of the runs in which a rank is stopped instead of killed.
const DEADLINE: Duration = Duration::from_secs(2);

fn asked() -> Option<usize> {
    std::env::var("ZERO_TRAIN_NOTICE").ok().and_then(|times| times.parse().ok())
}

/// Starts ranks that train without end in one of the layouts, and sends the signal `name` to one of them. Asserts that
/// all others end and name the lost rank. Returns the time from the signal until the last one had ended.
fn lose_one(case: &Case, number: usize, name: &str, transport: &str) -> Duration {
    let (out, port) = (format!("{name}-{number}"), port());
    let (transport, deadline) =
        (format!("launcher.transport={transport}"), format!("launcher.timeout_seconds={}", DEADLINE.as_secs()));
    let mut args = vec!["--config", "ds.yaml", "--quiet", "--out", &out, "--max-steps", "1000000", "--set", &transport];
    if name == "STOP" {
        args.extend(["--set", &deadline]);
    }
    // Consecutive numbers have different transports, so each layout runs with both.
    args.extend(LAYOUTS[number / TRANSPORTS.len() % LAYOUTS.len()]);
    let rank = |rank: usize| Alone::rank(case.command(&args), rank, RANKS, port);
    let mut ranks: Vec<Alone> = (0..RANKS).map(rank).collect();
    wait_for(|| {
        let ended = ranks.iter_mut().position(Alone::has_ended);
        assert!(ended.is_none(), "ended early: {:?}", ended.map(|rank| ranks.remove(rank).end()));
        case.steps(&out) >= 3
    });
    // Waits, so that the signal arrives at different points of a step. Multiples of the golden ratio spread the waits
    // evenly over 0.2 s.
    std::thread::sleep(Duration::from_secs_f64(0.2 * (number as f64 * 0.618_034).fract()));
    let victim = number % RANKS;
    let lost = ranks.remove(victim);
    signal(lost.id(), name);
    let since = Instant::now();
    while !ranks.iter_mut().all(Alone::has_ended) {
        assert!(since.elapsed() < Duration::from_secs(120), "a survivor does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let took = since.elapsed();
    for (status, errors) in ranks.into_iter().map(Alone::end) {
        assert_eq!(status, Some(4), "{errors}");
        let first = errors.lines().next().unwrap_or_default();
        let is_named = first.starts_with("error: rank ") && ranks::lost(first) == Some(victim);
        assert!(is_named, "rank {victim} was lost: {args:?}, {errors}");
    }
    drop(lost);
    fs::remove_dir_all(case.path(&out)).unwrap();
    took
}

/// Prints a row of the table, and returns the 99th percentile.
fn row(what: &str, transport: &str, mut took: Vec<Duration>) -> Duration {
    took.sort_unstable();
    let at = |share: f64| took[((took.len() - 1) as f64 * share).ceil() as usize];
    println!("| {what} | {transport} | {} | {:.1?} | {:.1?} | {:.1?} |", took.len(), at(0.5), at(0.99), at(1.0));
    at(0.99)
}

#[test]
fn survivors_end_soon_after_a_lost_rank_and_name_it() {
    let case = Case::new();
    let kills = asked().unwrap_or(10);
    let lose = |name: &str, number: usize| lose_one(&case, number, name, TRANSPORTS[number % TRANSPORTS.len()]);
    let killed: Vec<Duration> = (0..kills.max(2)).map(|number| lose("KILL", number)).collect();
    // Survivors of a stopped rank mostly wait, so both transports are tested at the same time.
    let stop_two = |first: usize| {
        std::thread::scope(|scope| {
            let second = scope.spawn(|| lose("STOP", first + 1));
            [lose("STOP", first), second.join().expect("no panic")]
        })
    };
    let stops = (kills / 10).max(LAYOUTS.len() * TRANSPORTS.len());
    let stopped: Vec<Duration> = (0..stops).step_by(2).flat_map(stop_two).collect();
    let of = |all: &[Duration], which: usize| all.iter().copied().skip(which).step_by(2).collect::<Vec<_>>();
    println!("| rank | transport | times | until the last survivor had ended: median | p99 | longest |");
    println!("|---|---|---|---|---|---|");
    let deadline = format!("stopped, deadline {DEADLINE:?}");
    for (which, transport) in TRANSPORTS.into_iter().enumerate() {
        // These limits allow for other tests that run at the same time. On an idle machine, the survivors of a kill end
        // within half a second.
        assert!(row("killed", transport, of(&killed, which)) < Duration::from_secs(5));
        assert!(row(&deadline, transport, of(&stopped, which)) < DEADLINE + Duration::from_secs(15));
    }
    assert!(stopped.iter().all(|took| *took > DEADLINE / 2), "ended before the timeout: {stopped:?}");
}

/// Starts one process per core that keeps the core busy.
fn load(case: &Case) -> Vec<Alone> {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let spin = || Alone::start(case.command_of(Path::new("sh"), &["-c", "while :; do :; done"]));
    (0..cores).map(|_| spin()).collect()
}

#[test]
fn no_rank_is_considered_lost_on_busy_cores() {
    let case = Case::new();
    let steps = if asked().is_some() { 10_000 } else { 300 };
    let args = ["--quiet", "-n", "2", "--out", "busy", "--max-steps", &steps.to_string()];
    let small = ["--set", "model.n_layer=1", "--set", "zero_optimization.stage=1"];
    let started = Instant::now();
    let load = load(&case);
    case.train(&[&args[..], &small].concat());
    println!("{steps} steps of 2 ranks beside {} busy processes: no alarm, {:.0?}", load.len(), started.elapsed());
    drop(load);
    assert_eq!(case.steps("busy"), steps);
}
