//! Trains small models that the tests define, on ranks that are threads.

mod best;
mod evaluate_only;
mod evaluation;
mod metrics_of_data_sets;
mod several_inputs;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Device;
use candle_nn::{VarBuilder, linear};
use zero_comm::{Options, threads};
use zero_engine::ops::cross_entropy;

use super::*;
use crate::data::{InMemory, from_fn};
use crate::metrics::accuracy;
use crate::train::Finished;
use zero_comm::launcher_environment::LauncherEnvironment;

/// Returns points in two dimensions. The class is the index of the larger coordinate.
fn points(samples: usize) -> InMemory {
    let number = |i: usize| (i * 37 % 101) as f32 / 101.0 - 0.5;
    let numbers: Vec<f32> = (0..2 * samples).map(number).collect();
    let classes: Vec<u32> = numbers.chunks(2).map(|point| u32::from(point[1] > point[0])).collect();
    let points = Tensor::from_vec(numbers, (samples, 2), &Device::Cpu).unwrap();
    InMemory::new(points, Tensor::from_vec(classes, samples, &Device::Cpu).unwrap()).unwrap()
}

fn model() -> Layers {
    Layers::new()
        .layer("first", |vb: VarBuilder| linear(2, 16, vb))
        .layer("relu", |_: VarBuilder| Ok(candle_nn::Activation::Relu))
        .layer("last", |vb: VarBuilder| linear(16, 2, vb))
        .loss(cross_entropy)
}

/// Returns a configuration with global batches of 8 samples in micro-batches of 2, for 1, 2 or 4 ranks.
fn text(folder: &Path, more: &str) -> String {
    format!(
        "train_batch_size: 8\ntrain_micro_batch_size_per_gpu: 2\noptimizer: {{type: AdamW, params: {{lr: 0.05}}}}\n\
         zero_optimization: {{stage: 1}}\ntraining: {{output_dir: {:?}, reproducible: true, {more}}}\n",
        folder.join("run")
    )
}

fn config(folder: &Path, more: &str) -> Config {
    Config::parse("ds.yaml", text(folder, more)).unwrap()
}

/// Returns a trainer that prints nothing.
fn quiet<'a>(config: Config) -> Trainer<'a> {
    Trainer::new(config).output(Output::Quiet)
}

/// Trains on `ranks` ranks and returns the result of each rank.
fn fit_on(ranks: usize, trainer: impl Fn() -> Trainer<'static> + Sync) -> Vec<Result<Summary, Error>> {
    std::thread::scope(|scope| {
        let fit = |comm| trainer().communicator(comm).fit();
        let started: Vec<_> =
            threads(ranks, &Options::default()).into_iter().map(|comm| scope.spawn(move || fit(comm))).collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns the error message of a run on one rank.
fn mistake(trainer: impl Fn() -> Trainer<'static> + Sync) -> String {
    fit_on(1, trainer).remove(0).unwrap_err().to_string()
}

fn metrics(folder: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(folder.join("run/metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn callbacks_run_once_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let (steps, evaluations) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for comm in threads(2, &Options::default()) {
            scope.spawn(|| {
                quiet(config(folder.path(), "max_steps: 5, eval_every: 2, save_last: false"))
                    .model(model())
                    .data(points(64), points(10))
                    .on_step(|step| {
                        assert_eq!((step.samples, step.steps), (step.step * 8, 5));
                        steps.fetch_add(1, Ordering::Relaxed);
                    })
                    .on_evaluation(|_| {
                        evaluations.fetch_add(1, Ordering::Relaxed);
                    })
                    .communicator(comm)
                    .fit()
                    .unwrap()
            });
        }
    });
    // Evaluations ran after step 2, step 4 and the last step.
    assert_eq!((steps.into_inner(), evaluations.into_inner()), (5, 3));
}

#[test]
fn a_callback_ends_the_run_on_all_ranks() {
    for (ranks, at_evaluation) in [(1, false), (2, false), (4, true)] {
        let folder = tempfile::tempdir().unwrap();
        let trainer = || {
            let trainer = quiet(config(folder.path(), "max_steps: 9, eval_every: 2")).model(model());
            let trainer = trainer.data(points(64), points(10));
            match at_evaluation {
                true => trainer.on_evaluation(|evaluation| match evaluation.step {
                    4 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }),
                false => trainer
                    .on_step(|step| if step.step == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
                    .on_step(|step| assert!(step.step <= 3)),
            }
        };
        let steps = if at_evaluation { 4 } else { 3 };
        for summary in fit_on(ranks, trainer).into_iter().map(Result::unwrap) {
            assert_eq!((summary.steps, summary.finished), (steps, Finished::Done));
            assert_eq!(summary.checkpoint, Some(folder.path().join(format!("run/checkpoints/step-{steps:08}"))));
        }
    }
}

#[test]
fn a_resumed_run_is_bit_identical_to_an_uninterrupted_run() {
    let (whole, stopped) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let of = |folder: &Path, steps: usize, resume: bool| {
        let trainer = quiet(config(folder, &format!("max_steps: {steps}, eval_every: 4"))).model(model());
        let trainer = trainer.data(points(50), points(9)).metric("accuracy", accuracy);
        if resume { trainer.resume(Resume::Auto) } else { trainer }
    };
    let expected = fit_on(2, || of(whole.path(), 12, false)).remove(0).unwrap();
    let first = fit_on(2, || of(stopped.path(), 7, false)).remove(0).unwrap();
    assert!(first.checkpoint.is_some() && first.resumed_from.is_none());
    // The result is the same on a different number of ranks, because sums are added in a fixed order.
    let resumed = fit_on(4, || of(stopped.path(), 12, true)).remove(0).unwrap();
    assert_eq!(resumed.resumed_from, first.checkpoint);
    assert_eq!(resumed.loss.map(f32::to_bits), expected.loss.map(f32::to_bits));
    let losses = |folder: &Path| metrics(folder).iter().map(|line| line["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses(whole.path()), losses(stopped.path()));
    let again = fit_on(1, || of(stopped.path(), 12, true)).remove(0).unwrap();
    assert_eq!((again.steps, again.loss, again.evaluation), (12, None, None));
}

#[test]
fn early_stopping_follows_a_metric_or_the_loss() {
    for stopping in ["metric: one, mode: max", "min_delta: 1000"] {
        let folder = tempfile::tempdir().unwrap();
        let more =
            format!("max_steps: 50, eval_every: 2, save_last: false, early_stopping: {{patience: 3, {stopping}}}");
        let trainer = || {
            let one = |scores: &Tensor, _: &Tensor| scores.ones_like()?.mean_all();
            quiet(config(folder.path(), &more)).model(model()).data(points(64), points(8)).metric("one", one)
        };
        // The first evaluation is the best, and the next three do not improve on it.
        for summary in fit_on(2, trainer) {
            let summary = summary.unwrap();
            assert_eq!((summary.steps, summary.finished), (8, Finished::Done), "{stopping}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let more = "eval_every: 2, early_stopping: {patience: 3, metric: f1}";
    let told = mistake(|| quiet(config(folder.path(), more)).model(model()).data(points(64), points(8)));
    assert!(told.contains("unknown metric `f1`"), "{told}");
}

#[test]
fn mistakes_are_reported_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let new = || quiet(config(folder.path(), "max_steps: 2"));
    assert!(mistake(|| new().model(model())).contains("call `Trainer::data`"));
    assert!(mistake(|| new().train_data(points(8))).contains("the configuration has no model"));
    let empty = || from_fn(0, |_| Ok((Tensor::new(&[0f32], &Device::Cpu)?, Tensor::new(0u32, &Device::Cpu)?)));
    assert!(mistake(|| new().model(model()).train_data(empty())).contains("the training data set has no samples"));
    let told = mistake(|| new().model(model()).data(points(8), empty()));
    assert!(told.contains("the evaluation data set has no samples"), "{told}");
    let twice = || new().model(model()).train_data(points(8)).metric("a", accuracy).metric("a", accuracy);
    assert!(mistake(twice).contains("another metric already has the name `a`"));
    assert!(mistake(|| new().metric("loss", accuracy)).contains("another metric already has the name `loss`"));
    assert!(mistake(|| new().metric("F 1", accuracy)).contains("`F 1` is not a valid metric name"));
    let text = "train_batch_size: 2\nmodel: {type: mlp, input_size: 2, output_size: 2}\ndata: {train: a.csv}";
    let zoo = || quiet(Config::parse("ds.yaml", text).unwrap());
    let told = mistake(|| zoo().model(model()));
    assert!(told.contains("a `model` section, but the program also calls `Trainer::model`"), "{told}");
    let told = mistake(|| zoo().train_data(points(8)));
    assert!(told.contains("a `data` section, but the program also calls `Trainer::data`"), "{told}");
    assert!(
        mistake(|| new().train_data(points(8)).model(model()).resume(Resume::From("none".into()))).contains("none")
    );
}

#[test]
fn errors_of_data_sets_and_metrics_end_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let new = || quiet(config(folder.path(), "max_steps: 2, save_last: false")).model(model());
    struct Short;
    impl Dataset for Short {
        fn len(&self) -> usize {
            9
        }
        fn batch(&self, indices: &[usize]) -> Result<zero_engine::Batch, crate::data::BoxError> {
            points(9).batch(&indices[1..])
        }
    }
    assert!(mistake(|| new().train_data(Short)).contains("the data set returned a batch with 1 instead of 2 samples"));
    let broken = || {
        from_fn(9, |_| match std::fs::File::open("/nowhere") {
            Ok(_) => Ok((Tensor::new(&[0f32], &Device::Cpu)?, Tensor::new(0u32, &Device::Cpu)?)),
            Err(error) => Err(error.into()),
        })
    };
    let error = fit_on(1, || new().train_data(broken())).remove(0).unwrap_err();
    assert!(error.to_string().contains("the data set failed: No such file"), "{error}");
    assert_eq!(error.exit_status(), 3);
    let wrong = |scores: &Tensor, _: &Tensor| scores.narrow(0, 0, 1);
    let untrained = || new().on_step(|step| assert!(step.step == 0, "the metric was not tried before"));
    let told = mistake(|| untrained().data(points(8), points(8)).metric("wrong", wrong));
    assert!(told.contains("in the metric `wrong`") && told.contains("for each of 2 samples"), "{told}");
}

#[test]
fn only_a_process_that_was_started_alone_starts_ranks() {
    let alone = LauncherEnvironment::alone();
    for (asked, written, starts) in
        [(None, None, None), (Some(1), Some(4), None), (Some(2), Some(4), Some(2)), (None, Some(4), Some(4))]
    {
        assert_eq!(ranks::to_start(asked, || written, &alone).unwrap(), starts);
    }
    let one_of_two = LauncherEnvironment { world_size: 2, ..alone };
    assert_eq!(ranks::to_start(Some(2), || Some(4), &one_of_two).unwrap(), None);
    let error = ranks::to_start(Some(3), || None, &one_of_two).unwrap_err().to_string();
    assert!(error.contains("the option asks for 3 ranks, but the launcher started 2 ranks"), "{error}");
}

/// Without `-n`, a program starts the same number of ranks as `zero-train` does.
#[test]
fn without_a_number_the_configuration_decides_how_many_ranks_start() {
    for (text, ranks) in [
        ("", Some(1)),
        ("pipeline: {stages: 2}", Some(2)),
        ("sequence_parallel_size: 2\npipeline: {stages: 2}", Some(4)),
        ("launcher: {num_processes: 3}", Some(3)),
        ("pipeline: {stages: 2}\nlauncher: {num_processes: 6}", Some(6)),
        ("zero_optimization: {stage: 4}", None),
    ] {
        let text = format!("train_micro_batch_size_per_gpu: 1\n{text}");
        let source = Source { name: "ds.yaml".into(), text: text.clone() };
        let typed = zero_config::load(source, &[]).unwrap();
        assert_eq!(ranks::configured(&typed), ranks, "{text}");
    }
}

/// The order of samples, the position in this order and the loader use no memory per sample. One byte per sample would
/// add up to a petabyte.
#[test]
fn the_number_of_samples_costs_no_memory() {
    const SAMPLES: usize = 1_000_000_000_000_000;
    let folder = tempfile::tempdir().unwrap();
    let [seen, again] = [(); 2].map(|()| std::sync::Arc::new(std::sync::Mutex::new(vec![])));
    let trainer = |max_steps: usize, resumes: bool, seen: &std::sync::Arc<std::sync::Mutex<Vec<usize>>>| {
        let seen = seen.clone();
        let lines = from_fn(SAMPLES, move |i| {
            seen.lock().unwrap().push(i);
            let x = Tensor::new(&[i as f32 / SAMPLES as f32, 0.5], &Device::Cpu)?;
            Ok((x, Tensor::new(u32::from(i > SAMPLES / 2), &Device::Cpu)?))
        });
        let trainer = quiet(config(folder.path(), &format!("max_steps: {max_steps}"))).model(model()).train_data(lines);
        if resumes { trainer.resume(crate::train::Resume::Auto) } else { trainer }
    };
    fit_on(1, || trainer(3, false, &seen)).remove(0).unwrap();
    fit_on(4, || trainer(6, true, &again)).into_iter().for_each(|rank| drop(rank.unwrap()));
    let seed = config(folder.path(), "").training.seed;
    let mut all = [seen.lock().unwrap().clone(), again.lock().unwrap().clone()].concat();
    all.sort_unstable();
    // Every rank loads the first micro-batch twice, because it first checks the shape of the samples.
    all.dedup();
    let mut expected: Vec<usize> = (0..48).map(|at| crate::data::sample_index(seed, at, SAMPLES, true)).collect();
    expected.sort_unstable();
    assert_eq!(all, expected, "the samples of all steps");
}
