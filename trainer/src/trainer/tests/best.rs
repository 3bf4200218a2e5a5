//! Tests `training.keep_best`.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Tensor};

use super::{config, fit_on, mistake, model, points, quiet};
use crate::train::{Resume, Summary};

/// Trains on two ranks and evaluates every second step. In evaluation i, the metric `planted` has the value
/// `values[i]`.
fn fit(folder: &Path, steps: u64, more: &str, values: &'static [f32], resume: Option<Resume>) -> Summary {
    let trainer = || {
        // The metric is called once before the first step, and then twice per evaluation on a rank, because the eight
        // points are two micro-batches per rank.
        let calls = AtomicUsize::new(0);
        let planted = move |_: &Tensor, _: &Tensor| {
            let value = values[calls.fetch_add(1, Ordering::Relaxed).saturating_sub(1) / 2];
            Tensor::new(value, &Device::Cpu)
        };
        let more = format!("max_steps: {steps}, eval_every: 2, keep_last: 1, {more}");
        let trainer =
            quiet(config(folder, &more)).model(model()).data(points(64), points(8)).metric("planted", planted);
        match &resume {
            Some(from) => trainer.resume(from.clone()),
            None => trainer,
        }
    };
    let summaries: Vec<Summary> = fit_on(2, trainer).into_iter().map(Result::unwrap).collect();
    assert_eq!(summaries[0], summaries[1]);
    summaries.into_iter().next().unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder.join("run/checkpoints")).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn linked(folder: &Path) -> String {
    fs::read_link(folder.join("run/checkpoints/best")).unwrap().to_str().unwrap().to_string()
}

#[test]
fn the_best_checkpoint_is_kept_until_a_better_one() {
    const KEEP: &str = "keep_best: {metric: planted, mode: max}";
    for more in ["", ", save_async: true", ", save_last: false", ", save_every: 3"] {
        let folder = tempfile::tempdir().unwrap();
        let (path, keep) = (folder.path(), format!("{KEEP}{more}"));
        let best = fit(path, 10, &keep, &[0.2, 0.9, f32::NAN, 0.4, 0.9], None).best.unwrap();
        assert_eq!((best.step, best.value), (4, f64::from(0.9_f32)), "{more}");
        assert_eq!(best.folder, path.join("run/checkpoints/step-00000004"));
        assert_eq!(linked(path), "step-00000004");
        let last = match more {
            ", save_last: false" => None,
            _ => Some("step-00000010"),
        };
        let kept = ["best", "latest", "step-00000004"].into_iter().chain(last).collect::<Vec<_>>();
        assert_eq!(names(path), kept, "{more}");
        if last.is_none() {
            continue;
        }
        // The resumed run remembers the best value.
        let resumed = fit(path, 14, &keep, &[0.8, 0.95], Some(Resume::Auto)).best.unwrap();
        assert_eq!((resumed.step, linked(path).as_str()), (14, "step-00000014"), "{more}");
        assert_eq!(names(path), ["best", "latest", "step-00000014"], "{more}");
        // A run can resume from the link `best`. If it resumes in another folder, it has its own best checkpoint.
        let other = tempfile::tempdir().unwrap();
        let from = Resume::From(path.join("run/checkpoints/best"));
        let other_run = fit(other.path(), 16, &keep, &[0.1], Some(from));
        assert_eq!(other_run.resumed_from, Some(path.join("run/checkpoints/step-00000014")));
        assert_eq!((other_run.best.unwrap().step, linked(other.path()).as_str()), (16, "step-00000016"));
    }
}

/// By default, the checkpoint with the lowest loss is the best. A run that learns has its lowest loss at the end.
#[test]
fn the_best_checkpoint_may_be_the_last() {
    let folder = tempfile::tempdir().unwrap();
    let summary = fit(folder.path(), 6, "keep_best: {}", &[0.0; 3], None);
    let (best, evaluation) = (summary.best.unwrap(), summary.evaluation.unwrap());
    assert_eq!((best.step, best.value), (6, f64::from(evaluation.loss)));
    assert_eq!(Some(best.folder), summary.checkpoint);
    // A run that resumes from a step before its best checkpoint finds a new best checkpoint.
    let folder = tempfile::tempdir().unwrap();
    let early = folder.path().join("early");
    fit(folder.path(), 2, "", &[0.0], None);
    fs::rename(folder.path().join("run"), &early).unwrap();
    fit(folder.path(), 6, "keep_best: {}", &[0.0; 3], None);
    let kept = early.join("checkpoints/step-00000002");
    fs::rename(&kept, folder.path().join("run/checkpoints/step-00000002")).unwrap();
    let from = Resume::From(folder.path().join("run/checkpoints/step-00000002"));
    let set_back = fit(folder.path(), 4, "keep_best: {}", &[0.0], Some(from));
    assert_eq!((set_back.best.unwrap().step, linked(folder.path()).as_str()), (4, "step-00000004"));
}

#[test]
fn an_unknown_metric_of_the_best_checkpoint_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let more = "eval_every: 2, keep_best: {metric: f1}";
    let told = mistake(|| quiet(config(folder.path(), more)).model(model()).data(points(64), points(8)));
    assert!(told.contains("unknown metric `f1`") && told.contains("training.keep_best.metric"), "{told}");
}
