//! Starts the ranks of this machine as processes, and ends them together.
//!
//! The parent hosts the store where the ranks meet, and gives each its place in the variables that torchrun uses. It
//! trains nothing itself. When a rank dies, the others notice by themselves; the parent says which died first, and ends
//! what is left after a second.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use zero_comm::store::StoreServer;

use crate::surroundings;

/// How long the other ranks may take to end by themselves after one has died.
const GRACE: Duration = Duration::from_millis(1000);

struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    errors: Option<JoinHandle<String>>,
}

/// Starts `ranks` copies of this program with the same arguments, waits for all, and returns the exit status.
///
/// # Errors
/// If a process cannot be started.
pub(crate) fn launch(ranks: usize, threads: usize, standard_input: Option<&str>) -> anyhow::Result<u8> {
    let token = token()?;
    let store = StoreServer::bind("127.0.0.1:0", Some(&token)).context("cannot open the port where ranks meet")?;
    let signals = [(signal_hook::consts::SIGINT, Signal::INT), (signal_hook::consts::SIGTERM, Signal::TERM)];
    let mut flags = vec![];
    for (number, signal) in signals {
        let flag = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(number, flag.clone())?;
        flags.push((flag, signal));
    }
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut all = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", store.address().ip().to_string())
            .env("MASTER_PORT", store.address().port().to_string())
            .env("ZERO_TRAIN_TOKEN", &token)
            .env(surroundings::LAUNCHED, "1")
            .envs(surroundings::variables(threads))
            .stdin(if standard_input.is_some() { Stdio::piped() } else { Stdio::null() });
        if rank > 0 {
            command.stderr(Stdio::piped());
        }
        let mut child = command.spawn().with_context(|| format!("cannot start rank {rank}"))?;
        if let (Some(mut pipe), Some(text)) = (child.stdin.take(), standard_input) {
            // A rank that ends before it has read everything says why itself.
            let _ = pipe.write_all(text.as_bytes());
        }
        let errors = child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = String::new();
                let _ = pipe.read_to_string(&mut text);
                text
            })
        });
        all.push(Rank { child, status: None, errors });
    }
    let first = wait(&mut all, &flags)?;
    Ok(report(all, first))
}

/// The exit status of a rank that lost a peer.
const LOST_PEER: Option<i32> = Some(4);

/// Waits for all ranks; returns the one that failed first: if one of two lost the other, that other, whichever is seen first.
fn wait(all: &mut [Rank], flags: &[(Arc<AtomicBool>, Signal)]) -> anyhow::Result<Option<usize>> {
    let mut first: Option<(usize, Instant)> = None;
    let mut follows = false;
    while all.iter().any(|rank| rank.status.is_none()) {
        for (flag, signal) in flags {
            if flag.swap(false, Ordering::Relaxed) {
                send(all, *signal);
            }
        }
        for (index, rank) in all.iter_mut().enumerate() {
            if rank.status.is_none()
                && let Some(status) = rank.child.try_wait()?
            {
                rank.status = Some(status);
                let is_cause = !status.success() && (first.is_none() || follows && status.code() != LOST_PEER);
                if is_cause {
                    first = Some((index, first.map_or_else(Instant::now, |(_, since)| since)));
                    follows = status.code() == LOST_PEER;
                }
            }
        }
        if first.is_some_and(|(_, since)| since.elapsed() > GRACE) {
            send(all, Signal::KILL);
            // What ends now is no cause.
            follows = false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(first.map(|(rank, _)| rank))
}

fn send(all: &[Rank], signal: Signal) {
    for rank in all.iter().filter(|rank| rank.status.is_none()) {
        // It may have ended meanwhile.
        let _ = kill_process(Pid::from_child(&rank.child), signal);
    }
}

/// Says what rank 0, whose errors went straight to the terminal, cannot have said; returns the exit status.
fn report(mut all: Vec<Rank>, first: Option<usize>) -> u8 {
    let Some(first) = first else { return 0 };
    let code = |rank: &Rank| rank.status.and_then(|status| status.code());
    let own = code(&all[first]);
    let errors = all[first].errors.take().and_then(|handle| handle.join().ok()).unwrap_or_default();
    match own {
        // Stopped by a signal after a checkpoint: no error.
        Some(130 | 143) => {}
        // The same mistake, which rank 0 has told of.
        Some(status @ (2 | 3 | 5)) if code(&all[0]) == Some(status) => {}
        Some(_) if errors.trim().is_empty() => {}
        Some(_) => eprint!("{errors}"),
        None => {
            let signal = all[first].status.and_then(|status| status.signal()).unwrap_or(0);
            eprintln!(
                "error: rank {first} was killed by signal {signal}; it was the first to end, the others followed"
            );
        }
    }
    own.map_or(4, |status| u8::try_from(status).unwrap_or(1))
}

/// 32 random bytes in hexadecimal: what every connection of this job must prove to know.
fn token() -> anyhow::Result<String> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).map_err(|e| anyhow::anyhow!("no random bytes for the job's token: {e}"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
