//! Finds the processes of a launcher's ranks, and the lost rank in an error.

use std::fs;

use crate::case::{Case, text};

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

/// Returns the rank that a line of an error names as lost, if the line also names the operation and its number, as in
/// `rank 0 lost rank 2 in all_gather #16: …` and `rank 0 timed out after 3s waiting for rank 2 in all_gather #16`. The
/// lost rank itself, if it still runs, says `rank 2 was lost by another rank in all_gather #16: …`.
pub(crate) fn lost(line: &str) -> Option<usize> {
    let (_, after) =
        [" lost rank ", " waiting for rank ", "error: rank "].iter().find_map(|before| line.split_once(before))?;
    let (rank, after) = after.split_once(" in ")?;
    let rank = rank.strip_suffix(" was lost by another rank").unwrap_or(rank);
    let (operation, number) = after.split_once(" #")?;
    let is_named = operation.starts_with(|c: char| c.is_ascii_lowercase()) && !operation.contains(' ');
    if is_named && number.starts_with(|c: char| c.is_ascii_digit()) { rank.parse().ok() } else { None }
}

/// Returns for each of these ranks the rank that its log names as [`lost`]. The logs are those of the first attempt of a
/// job with `--log-dir logs`.
pub(crate) fn named_by(case: &Case, ranks: impl IntoIterator<Item = usize>) -> Vec<Option<usize>> {
    let log = |rank: usize| fs::read_to_string(case.path(&format!("logs/attempt_0/{rank}/stderr.log"))).unwrap();
    ranks.into_iter().map(|rank| log(rank).lines().find_map(lost)).collect()
}
