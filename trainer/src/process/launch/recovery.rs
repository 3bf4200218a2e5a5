//! Decides with how many ranks a run continues after a rank has died, and from which checkpoint.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use zero_config::{Config, Source};

use crate::train::holds_a_run;
use zero_engine::Error;

use super::error::failed;
use super::job::Team;

/// How a run recovers from a dead rank.
pub struct Recovery<'a> {
    /// Maximum number of restarts.
    pub max_restarts: usize,
    /// Minimum number of ranks to continue with. With `None`, the next attempt has the same number of ranks.
    pub min_ranks: Option<usize>,
    /// The state of the run folder before the run. `None` for other programs, which find their checkpoints themselves.
    pub before: Option<Before>,
    /// Fails if the configuration has changed since the run began.
    pub unchanged: &'a dyn Fn() -> Result<(), Error>,
    /// Returns a team of the given number of ranks. Fails if they cannot train with the same global batch size.
    pub smaller: &'a dyn Fn(usize) -> Result<Team, Error>,
}

impl Recovery<'_> {
    /// Returns the team of the next attempt, if `left` ranks of `team` have not died.
    pub(super) fn next(&self, team: &Team, left: usize) -> Result<Team, Error> {
        (self.unchanged)()?;
        let Some(min_ranks) = self.min_ranks else { return Ok(team.clone()) };
        if left == team.ranks {
            return Ok(team.clone());
        }
        if left < min_ranks {
            let help = "lower `launcher.min_ranks`, or remove it to restart all ranks";
            let all = team.ranks;
            return Err(Error::Launch(format!(
                "{left} of {all} ranks remain, fewer than `launcher.min_ranks: {min_ranks}`\n  help: {help}"
            )));
        }
        let mut reason = None;
        for ranks in (min_ranks..=left).rev() {
            match (self.smaller)(ranks) {
                Ok(team) => return Ok(team),
                // The error for the largest number of ranks is the most useful.
                Err(error) => reason = reason.or(Some(error)),
            }
        }
        let numbers = if min_ranks == left { format!("{left}") } else { format!("{min_ranks} to {left}") };
        let reason = reason.map_or_else(|| "unknown reason".into(), |reason| reason.to_string());
        Err(failed(format!("{numbers} ranks cannot continue with the same train_batch_size"))(reason))
    }

    /// Returns where the next attempt continues. Returns `None` for other programs, which find their checkpoints
    /// themselves.
    pub(super) fn whence(&self) -> Result<Option<Whence>, Error> {
        self.before.as_ref().map(Before::whence).transpose()
    }
}

/// Where an attempt continues.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Whence {
    /// The run's own checkpoints, with their steps. The attempt resumes from the newest checkpoint. Without a
    /// checkpoint, it begins where the first attempt began.
    pub(super) from: Vec<(u64, PathBuf)>,
    /// Whether the run folder already belongs to this run, so that it must not be moved aside.
    pub(super) keeps_folder: bool,
}

/// Fails if one of the files has changed since it was read.
///
/// # Errors
/// Names the file.
pub fn unchanged<'a>(files: impl IntoIterator<Item = (&'a Path, &'a Source)>) -> Result<(), Error> {
    for (path, source) in files {
        if Source::from_path(path)? != *source {
            let name = &source.name;
            return Err(Error::Launch(format!("{name} has changed since the run began; continue with --resume auto")));
        }
    }
    Ok(())
}

/// Returns overrides for a restart with fewer ranks. They keep the global batch size and the micro-batch size of
/// `config`, so each rank accumulates more micro-batches.
#[must_use]
pub fn same_batch(config: &Config) -> Vec<String> {
    vec![
        format!("train_batch_size={}", config.train_batch_size),
        format!("train_micro_batch_size_per_gpu={}", config.train_micro_batch_size_per_gpu),
        "gradient_accumulation_steps=".to_string(),
    ]
}

/// The contents of the run folder before the run.
///
/// The folder may belong to an earlier run that this run continues, or to another run. In the second case, the first
/// attempt moves the folder aside once its ranks are connected.
#[derive(Debug)]
pub struct Before {
    out: PathBuf,
    /// Device and inode of the folder, if it contained a run.
    folder: Option<(u64, u64)>,
    checkpoints: BTreeSet<Identity>,
}

/// Identifies a checkpoint by its path, its inode and the modification time of its manifest, so that a rewritten
/// checkpoint of the same name has a different identity.
type Identity = (PathBuf, u64, i64, i64);

impl Before {
    /// Records the contents of `out`. Call it before any rank starts.
    ///
    /// # Errors
    /// Fails if the folder cannot be listed.
    pub fn look(out: &Path) -> Result<Self, Error> {
        let folder = if holds_a_run(out) { number(out) } else { None };
        let checkpoints = committed(out)?.into_iter().filter_map(|(_, path)| identity(&path)).collect();
        Ok(Self { out: out.to_path_buf(), folder, checkpoints })
    }

    fn whence(&self) -> Result<Whence, Error> {
        let mut own = committed(&self.out)?;
        own.retain(|(_, path)| identity(path).is_some_and(|identity| !self.checkpoints.contains(&identity)));
        let keeps_folder = self.folder.is_none() || number(&self.out) != self.folder;
        Ok(Whence { from: own, keeps_folder })
    }
}

fn committed(out: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    zero_checkpoint::committed(&out.join("checkpoints")).map_err(failed("cannot list the checkpoints"))
}

/// Returns the device and inode of a folder.
fn number(folder: &Path) -> Option<(u64, u64)> {
    fs::metadata(folder).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

fn identity(checkpoint: &Path) -> Option<Identity> {
    let manifest = fs::metadata(checkpoint.join("manifest.json")).ok()?;
    Some((checkpoint.to_path_buf(), number(checkpoint)?.1, manifest.mtime(), manifest.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(out: &Path, step: u64) -> PathBuf {
        let folder = out.join(format!("checkpoints/step-{step:08}"));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("manifest.json"), "{}").expect("a file");
        folder
    }

    #[test]
    fn a_run_resumes_only_from_its_own_checkpoints() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("run");
        save(&out, 10);
        let before = Before::look(&out).expect("the folder can be listed");
        // The first attempt has not created its folder yet, so the existing folder belongs to another run.
        let anew = |keeps_folder| Whence { from: vec![], keeps_folder };
        assert_eq!(before.whence().expect("the checkpoints can be listed"), anew(false));
        fs::rename(&out, folder.path().join("run.1")).expect("renamed");
        fs::create_dir(&out).expect("a folder");
        assert_eq!(before.whence().expect("the checkpoints can be listed"), anew(true));
        let own = save(&out, 5);
        let expected = Whence { from: vec![(5, own)], keeps_folder: true };
        assert_eq!(before.whence().expect("the checkpoints can be listed"), expected);
    }

    #[test]
    fn own_checkpoints_may_have_lower_steps_than_earlier_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("run");
        save(&out, 10);
        save(&out, 20);
        let before = Before::look(&out).expect("the folder can be listed");
        // The run has resumed from step 10 and reached step 15. The checkpoint of step 20 is older than the run.
        let own = save(&out, 15);
        assert_eq!(before.whence().expect("the checkpoints can be listed").from, [(15, own.clone())]);
        let older = own;
        // The run writes step 20 again.
        fs::rename(out.join("checkpoints/step-00000020"), out.join("checkpoints/old")).expect("renamed");
        let own = save(&out, 20);
        assert_eq!(before.whence().expect("the checkpoints can be listed").from, [(15, older), (20, own)]);
    }

    #[test]
    fn a_new_folder_belongs_to_the_run() {
        let folder = tempfile::tempdir().expect("a folder");
        let before = Before::look(&folder.path().join("run")).expect("a missing folder is empty");
        assert_eq!(
            before.whence().expect("the checkpoints can be listed"),
            Whence { from: vec![], keeps_folder: true }
        );
    }

    #[test]
    fn the_largest_number_of_ranks_that_can_train_is_used() {
        let team = |ranks| Team::new(ranks, 1);
        let smaller = |ranks: usize| match ranks {
            1 | 2 | 4 => Ok(team(ranks)),
            _ => Err(Error::Launch(format!("8 samples over {ranks} ranks"))),
        };
        let with =
            |min_ranks| Recovery { max_restarts: 1, min_ranks, before: None, unchanged: &|| Ok(()), smaller: &smaller };
        let next = |min_ranks, left| with(min_ranks).next(&team(4), left).map(|team| team.ranks);
        assert_eq!(next(None, 3).expect("the same number of ranks"), 4);
        assert_eq!(next(Some(1), 4).expect("no rank is lost"), 4);
        assert_eq!(next(Some(1), 3).expect("a smaller team"), 2);
        let error = |min_ranks, left| format!("{:#}", next(Some(min_ranks), left).expect_err("too few ranks"));
        assert_eq!(error(3, 3), "3 ranks cannot continue with the same train_batch_size: 8 samples over 3 ranks");
        assert_eq!(
            error(3, 2),
            "2 of 4 ranks remain, fewer than `launcher.min_ranks: 3`\n  help: lower `launcher.min_ranks`, or remove it to restart all ranks"
        );
    }
}
