//! Tests evaluations without training.

use std::path::Path;

use zero_comm::{Communicator, Options, threads};

use super::*;
use crate::train::Evaluation;

/// Evaluates on `ranks` ranks and returns the result, which is the same on all of them.
fn evaluate_on(ranks: usize, trainer: impl Fn() -> Trainer<'static> + Sync) -> Result<Evaluation, Error> {
    let mut found = std::thread::scope(|scope| {
        let evaluate = |comm: Arc<dyn Communicator>| trainer().communicator(comm).evaluate();
        let started: Vec<_> =
            threads(ranks, &Options::default()).into_iter().map(|comm| scope.spawn(move || evaluate(comm))).collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    let first = found.remove(0);
    assert!(found.iter().all(|other| other.as_ref().ok() == first.as_ref().ok()), "{first:?} {found:?}");
    first
}

/// Returns the names of all files in a folder, with their lengths.
fn files(folder: &Path) -> Vec<(String, u64)> {
    let mut found = vec![];
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        match entry.path().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push((entry.path().display().to_string(), entry.metadata().unwrap().len())),
        }
    }
    found.sort();
    found
}

#[test]
fn a_checkpoint_evaluates_as_it_did_in_its_run() {
    let folder = tempfile::tempdir().unwrap();
    for more in ["", "eval_batches: 2, "] {
        let trainer = || {
            let config = config(folder.path(), &format!("max_steps: 6, {more}"));
            quiet(config).model(model()).data(points(64), points(27)).metric("accuracy", accuracy)
        };
        let expected = fit_on(2, trainer).remove(0).unwrap().evaluation.unwrap();
        let before = files(folder.path());
        let run = folder.path().join("run");
        for (ranks, from) in [(2, Resume::Auto), (2, Resume::From(run.clone())), (4, Resume::From(run))] {
            let found = evaluate_on(ranks, || trainer().resume(from.clone())).unwrap();
            // With `eval_batches`, more ranks evaluate more samples.
            assert!(found == expected || ranks == 4 && !more.is_empty(), "{found:?} {expected:?}");
        }
        assert_eq!(files(folder.path()), before);
    }
}

#[test]
fn initial_weights_are_evaluated_without_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = || quiet(config(folder.path(), "max_steps: 1")).model(model()).data(points(64), points(27));
    let found = evaluate_on(1, trainer).unwrap();
    assert_eq!((found.step, found.samples), (0, 27));
    assert_eq!(files(folder.path()), []);
    // The loss of the first step is a loss of the initial weights, on samples of the same distribution.
    let first = fit_on(1, trainer).remove(0).unwrap().loss.unwrap();
    assert!((found.loss - first).abs() < 0.1, "{} {first}", found.loss);
}

#[test]
fn an_evaluation_without_data_or_checkpoint_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let new = || quiet(config(folder.path(), "max_steps: 1")).model(model());
    let told = evaluate_on(2, || new().train_data(points(8))).unwrap_err().to_string();
    assert!(told.contains("the run has no evaluation data") && told.contains("Trainer::data"), "{told}");
    let told = evaluate_on(2, || new().data(points(8), points(8)).resume(Resume::Auto)).unwrap_err().to_string();
    assert!(told.contains("run has no checkpoint to evaluate"), "{told}");
    assert_eq!(files(folder.path()), []);
}
