//! Selects the checkpoint from which a run resumes, and loads it.

use std::path::{Path, PathBuf};

use serde_json::Value;
use zero_config::Config;
use zero_engine::checkpoint::start::Start;
use zero_engine::{Engine, Error};

use super::checkpoint_store;
use super::options::{Resume, RunOptions};
use super::output::preparing::Preparing;
use zero_engine::printed::tell;

/// Returns whether the run starts anew or resumes from a checkpoint.
pub(super) fn start(config: &Config, options: &RunOptions) -> Result<Start, Error> {
    let root = Path::new(&config.training.output_dir).join("checkpoints");
    Ok(match &options.resume {
        _ if !options.restarts.from.is_empty() => Start::GoesOn,
        None => Start::Anew,
        Some(Resume::From(_)) => Start::GoesOn,
        Some(Resume::Auto) if zero_checkpoint::committed(&root)?.is_empty() => {
            // The store may have intact copies.
            if config.training.checkpoint_store.is_none() {
                refuse_lost(&root)?;
            }
            Start::Anew
        }
        Some(Resume::Auto) => Start::GoesOn,
    })
}

/// Fails if the run has checkpoints, but all have lost their manifests. A save renames its folder to `step-…` only
/// after it has written the manifest, so such a folder is not an interrupted save.
fn refuse_lost(root: &Path) -> Result<(), Error> {
    let Some(newest) = zero_checkpoint::meant(root).ok().and_then(|mut folders| folders.pop()) else {
        return Ok(());
    };
    let message = format!("{} is missing its {}", newest.display(), zero_checkpoint::MANIFEST);
    let help = "no checkpoint of the run can be loaded; restore the file, resume from a copy with `--resume FOLDER`, \
                or train from scratch without `--resume`";
    Err(Error::setting("--resume", message, help))
}

/// Resumes as the options require. `auto` loads the newest checkpoint. If this checkpoint is damaged, it prints a
/// warning and tries the previous one.
pub(super) fn resume(
    engine: &mut Engine,
    options: &RunOptions,
    out: &Path,
    preparing: &Preparing<'_>,
) -> Result<Option<(PathBuf, Value)>, Error> {
    let load = |engine: &mut Engine, folder: &Path| match options.evaluate {
        true => engine.load_weights(folder),
        false => engine.load_checkpoint(folder),
    };
    let mut candidates = match &options.resume {
        _ if !options.restarts.from.is_empty() => options.restarts.from.clone(),
        None => return Ok(None),
        Some(Resume::From(folder)) => {
            let named = |error: Error| error.named("--resume", "give a checkpoint folder, a run folder, or `auto`");
            let folder = match zero_config::address(folder) {
                Some(address) => checkpoint_store::fetch(address, &**engine.communicator(), preparing)?,
                None => zero_checkpoint::newest_meant(folder).map_err(|error| named(error.into()))?,
            };
            let state = load(engine, &folder).map_err(named)?;
            return Ok(Some((folder, state)));
        }
        Some(Resume::Auto) => zero_checkpoint::committed(&out.join("checkpoints"))?,
    };
    if engine.communicator().rank() == 0 {
        warn_of_incomplete(&candidates, out);
    }
    let mut damaged = None;
    while let Some((step, folder)) = candidates.pop() {
        match load(engine, &folder) {
            Ok(state) => return Ok(Some((folder, state))),
            Err(error) if error.is_damage() => {
                if engine.communicator().rank() == 0 {
                    tell(&format!("warning: cannot load the checkpoint of step {step}: {error}"));
                }
                damaged = damaged.or(Some(error));
            }
            Err(error) => return Err(error),
        }
    }
    // If all checkpoints of a run are damaged, fails instead of starting over.
    damaged.map_or(Ok(None), |error: Error| {
        let help = "no checkpoint of the run can be loaded; resume from a copy with `--resume FOLDER`, or train from \
                    scratch without `--resume`";
        Err(Error::Named { key: "--resume".into(), source: Box::new(error), help: help.into() })
    })
}

/// Warns if a later checkpoint than those in `candidates` has no manifest: a copy was interrupted, or the manifest
/// has been deleted.
fn warn_of_incomplete(candidates: &[(u64, PathBuf)], out: &Path) {
    let Ok(folders) = zero_checkpoint::meant(&out.join("checkpoints")) else { return };
    let newest = candidates.last().map(|(step, _)| *step);
    for folder in folders.iter().filter(|folder| zero_checkpoint::step(folder) > newest) {
        tell(&format!("warning: {} is incomplete: it has no {}", folder.display(), zero_checkpoint::MANIFEST));
    }
}
