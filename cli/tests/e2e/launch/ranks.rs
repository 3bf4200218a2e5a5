//! Finds the processes of a launcher's ranks.

use std::fs;

use crate::case::text;

/// Returns an environment variable of a process; `None` if the process has ended.
fn variable(process: u32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{process}/environ")).ok()?;
    let entries = environment.split(|&byte| byte == 0).map(text);
    entries.filter_map(|entry| entry.strip_prefix(&format!("{name}=")).map(String::from)).next()
}

/// Returns the process IDs of a launcher's ranks, ordered by rank.
pub(crate) fn of(launcher: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|process| process.parse().ok());
    let rank = |process: u32| Some((variable(process, "RANK")?.parse::<usize>().ok()?, process));
    let mut ranks: Vec<(usize, u32)> = children.filter_map(rank).collect();
    ranks.sort_unstable();
    ranks.into_iter().map(|(_, process)| process).collect()
}

/// Returns the process IDs of the ranks of one attempt, ordered by rank.
pub(crate) fn of_attempt(launcher: u32, attempt: usize) -> Vec<u32> {
    let wanted = attempt.to_string();
    of(launcher).into_iter().filter(|&rank| variable(rank, "ZERO_TRAIN_ATTEMPT").as_ref() == Some(&wanted)).collect()
}
