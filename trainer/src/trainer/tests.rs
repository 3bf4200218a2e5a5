//! Trains small models of the program's own on ranks that are threads.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Device;
use candle_nn::{Module, VarBuilder, linear};
use zero_comm::{Options, threads};
use zero_engine::Batch;
use zero_engine::ops::{IGNORE_INDEX, count_targets, cross_entropy};

use super::*;
use crate::data::{InMemory, from_fn};
use crate::metrics::accuracy;
use crate::train::Finished;

/// Points in two dimensions; the class is the index of the larger coordinate.
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

/// A configuration with micro-batches of 2 samples, so that 1, 2 and 4 ranks train on the same batches.
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

/// A trainer that prints nothing.
fn quiet<'a>(config: Config) -> Trainer<'a> {
    Trainer::new(config).output(Output::Quiet)
}

/// Fits on `ranks` ranks and returns the result of each.
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

/// 27 samples do not divide into whole micro-batches, and 14 micro-batches do not divide evenly among 4 ranks.
#[test]
fn metrics_are_the_same_on_any_number_of_ranks() {
    let evaluations = [1, 2, 4].map(|ranks| {
        let folder = tempfile::tempdir().unwrap();
        let trainer = || {
            let doubled = |scores: &Tensor, classes: &Tensor| accuracy(scores, classes)? * 2.0;
            let mean = |scores: &Tensor, classes: &Tensor| accuracy(scores, classes)?.mean_all();
            quiet(config(folder.path(), "max_steps: 6, eval_every: 3, save_last: false"))
                .model(model())
                .data(points(64), points(27))
                .metric("accuracy", accuracy)
                .metric("doubled", doubled)
                .metric("mean", mean)
        };
        let summaries: Vec<Summary> = fit_on(ranks, trainer).into_iter().map(Result::unwrap).collect();
        assert!(summaries.iter().all(|summary| *summary == summaries[0]), "{summaries:?}");
        let evaluation = summaries[0].evaluation.clone().unwrap();
        assert_eq!((evaluation.samples, evaluation.step, summaries[0].steps), (27, 6, 6));
        let lines = metrics(folder.path());
        assert_eq!(lines[5]["eval_accuracy"].as_f64(), evaluation.metric("accuracy"));
        assert!(lines[4]["eval_accuracy"].is_null() && lines[2]["eval_accuracy"].is_number());
        evaluation
    });
    assert!(evaluations.iter().all(|other| *other == evaluations[0]), "{evaluations:?}");
    let [accuracy, mean] = ["accuracy", "mean"].map(|name| evaluations[0].metric(name).unwrap());
    assert!((accuracy - mean).abs() < 1e-6, "{accuracy} {mean}");
    assert_eq!(evaluations[0].metric("doubled").unwrap(), 2.0 * evaluations[0].metric("accuracy").unwrap());
}

/// Points of which only some have a class, as i64; `keeps_all` leaves out no sample, otherwise only those with a class.
fn partly_labelled(samples: usize, keeps_all: bool) -> InMemory {
    let has_class = |i: &usize| !i.is_multiple_of(3) && !(6..12).contains(i);
    let kept: Vec<u32> = (0..samples).filter(|i| keeps_all || has_class(i)).map(|i| i as u32).collect();
    let all = points(samples).batch(&(0..samples).collect::<Vec<_>>()).unwrap();
    let classes: Vec<u32> = all.targets.unwrap().to_vec1().unwrap();
    let class = |&i: &u32| if has_class(&(i as usize)) { i64::from(classes[i as usize]) } else { IGNORE_INDEX };
    let some = Tensor::from_vec(kept.iter().map(class).collect::<Vec<_>>(), kept.len(), &Device::Cpu).unwrap();
    let kept = Tensor::new(kept, &Device::Cpu).unwrap();
    InMemory::new(all.inputs.single().unwrap().index_select(&kept, 0).unwrap(), some).unwrap()
}

/// Samples without a target are no part of an evaluation's mean, on any number of ranks.
#[test]
fn evaluations_are_means_over_the_targets() {
    for more in ["", "eval_batches: 4, "] {
        // 32 samples are four micro-batches of two on each of four ranks.
        let evaluations = [(1, true), (2, true), (4, true), (1, false)].map(|(ranks, keeps_all)| {
            let folder = tempfile::tempdir().unwrap();
            let more = match keeps_all {
                true => more.replace('4', &format!("{}", 16 / ranks)),
                false => String::new(),
            };
            let trainer = || {
                quiet(config(folder.path(), &format!("max_steps: 6, eval_every: 3, {more}save_last: false")))
                    .model(model().loss_weight(count_targets))
                    .data(partly_labelled(64, true), partly_labelled(32, keeps_all))
            };
            let summaries: Vec<Summary> = fit_on(ranks, trainer).into_iter().map(Result::unwrap).collect();
            assert!(summaries.iter().all(|summary| *summary == summaries[0]), "{summaries:?}");
            (summaries[0].loss, summaries[0].evaluation.clone().unwrap().loss)
        });
        assert!(evaluations.iter().all(|(loss, _)| *loss == evaluations[0].0), "{evaluations:?}");
        // Sums over all samples are exact. Means of micro-batches are rounded.
        let tolerance = if more.is_empty() { 0.0 } else { 1e-6 };
        for (_, loss) in &evaluations[..3] {
            assert!((loss - evaluations[0].1).abs() <= tolerance, "{evaluations:?}");
        }
        assert!((evaluations[3].1 - evaluations[0].1).abs() < 1e-6, "{evaluations:?}");
    }
}

#[test]
fn an_evaluation_without_any_target_is_an_error() {
    for more in ["", "eval_batches: 2, "] {
        let folder = tempfile::tempdir().unwrap();
        let none = || {
            let all = points(8).batch(&[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
            let targets = Tensor::full(IGNORE_INDEX, 8, &Device::Cpu).unwrap();
            InMemory::new(all.inputs.single().unwrap().clone(), targets).unwrap()
        };
        let error = mistake(|| {
            quiet(config(folder.path(), &format!("max_steps: 1, eval_every: 1, {more}save_last: false")))
                .model(model().loss_weight(count_targets))
                .data(partly_labelled(64, true), none())
        });
        assert!(error.contains("all targets of the evaluation data are ignored (-100)"), "{error}");
    }
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
    // The result is the same on another number of ranks, because sums are added in a fixed order.
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
    assert!(mistake(|| new().metric("F 1", accuracy)).contains("`F 1` is not a valid name"));
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
    assert!(mistake(|| new().train_data(Short)).contains("the data set returned a batch of 1 instead of 2 samples"));
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
    let told = mistake(|| new().data(points(8), points(8)).metric("wrong", wrong));
    assert!(told.contains("in the metric `wrong`") && told.contains("for each of 2 samples"), "{told}");
}

#[test]
fn metrics_work_with_the_configured_model_and_data() {
    let folder = tempfile::tempdir().unwrap();
    let rows: String = (0..40).map(|i| format!("{},{},{}\n", i % 7, i % 3, u32::from(i % 7 > i % 3))).collect();
    std::fs::write(folder.path().join("rows.csv"), rows).unwrap();
    let text = format!(
        "train_batch_size: 4\nmodel: {{type: mlp, input_size: 2, hidden_sizes: [8], output_size: 2}}\n\
         data: {{train: {:?}, eval_fraction: 0.2}}\ntraining: {{max_steps: 4, save_last: false, output_dir: {:?}}}",
        folder.path().join("rows.csv"),
        folder.path().join("run")
    );
    let trainer = || quiet(Config::parse("ds.yaml", text.clone()).unwrap()).metric("accuracy", accuracy);
    let evaluation = fit_on(2, trainer).remove(0).unwrap().evaluation.unwrap();
    // `training.eval_batches` micro-batches per rank, on two ranks.
    assert_eq!(evaluation.samples, 8 * 4);
    assert!(evaluation.metric("accuracy").is_some_and(|accuracy| (0.0..=1.0).contains(&accuracy)));
}

/// Two ranks with slices evaluate the same samples as one rank, and count each once.
#[test]
fn ranks_that_share_sequences_evaluate_each_sample_once() {
    let folder = tempfile::tempdir().unwrap();
    let words: String = (0..600).map(|i| ["one ", "two ", "three "][i * i % 3]).collect();
    std::fs::write(folder.path().join("words.txt"), words).unwrap();
    let text = |key: &str| {
        format!(
            "train_batch_size: 2\n{key}\nmodel: {{type: gpt2, n_layer: 1, n_embd: 16, n_head: 2, n_positions: 16}}\n\
             data: {{train: {:?}, sequence_length: 16, eval_fraction: 0.2}}\n\
             training: {{max_steps: 2, save_last: false, output_dir: {:?}}}",
            folder.path().join("words.txt"),
            folder.path().join("run")
        )
    };
    let of = |ranks: usize, key: &str| {
        let trainer = || quiet(Config::with_world_size("ds.yaml", text(key), ranks).unwrap());
        fit_on(ranks, trainer).remove(0).unwrap().evaluation.unwrap()
    };
    let expected = of(1, "");
    for key in ["sequence_parallel_size: 2", "mesh: {context_parallel_degree: 2}"] {
        let found = of(2, key);
        assert_eq!(found.samples, expected.samples, "{key}");
        assert!((found.loss / expected.loss - 1.0).abs() < 1e-5, "{key}: {} for {}", found.loss, expected.loss);
        let refused = || quiet(Config::with_world_size("ds.yaml", text(key), 2).unwrap()).metric("accuracy", accuracy);
        let told = fit_on(2, refused).remove(0).err().unwrap().to_string();
        assert!(told.contains("the metric `accuracy` needs whole sequences"), "{told}");
    }
}

#[test]
fn a_pipeline_evaluates_micro_batches_of_different_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let trainer = || {
        let text = text(folder.path(), "max_steps: 2, save_last: false") + "pipeline: {stages: 2}\n";
        quiet(Config::with_world_size("ds.yaml", text, 4).unwrap())
            .model(model())
            .data(points(64), points(27))
            .metric("accuracy", accuracy)
    };
    let summaries = fit_on(4, trainer);
    let evaluations: Vec<_> = summaries.into_iter().map(|summary| summary.unwrap().evaluation.unwrap()).collect();
    assert!(evaluations.iter().all(|evaluation| *evaluation == evaluations[0] && evaluation.samples == 27));
}

/// Adds up two inputs, each transformed by its own weights.
struct Two([candle_nn::Linear; 2]);

impl zero_engine::Layer for Two {
    fn run(&self, x: &Activations, _: &zero_engine::Pass) -> CandleResult<Activations> {
        let [first, second] = x.tensors() else { candle_core::bail!("{} inputs", x.tensors().len()) };
        Ok((self.0[0].forward(first)? + self.0[1].forward(second)?)?.into())
    }
}

#[test]
fn a_model_of_two_inputs_is_trained() {
    let folder = tempfile::tempdir().unwrap();
    let data = |samples: usize| {
        from_fn(samples, |i| {
            let (a, b) = (i as f32 * 0.37 % 1.0, i as f32 * 0.73 % 1.0);
            let inputs = [a, b].map(|x| Tensor::new(&[x], &Device::Cpu));
            let inputs = Activations::new(inputs.into_iter().collect::<CandleResult<_>>()?);
            Ok((inputs, Tensor::new(&[2.0 * a - b], &Device::Cpu)?))
        })
    };
    let trainer = || {
        let build = |vb: VarBuilder| Ok(Two([linear(1, 1, vb.pp("first"))?, linear(1, 1, vb.pp("second"))?]));
        let model = Layers::new().layer("two", build).loss(candle_nn::loss::mse);
        let trainer = quiet(config(folder.path(), "max_steps: 200, save_last: false")).model(model);
        trainer.data(data(64), data(16)).metric("absolute_error", crate::metrics::absolute_error)
    };
    let evaluation = fit_on(2, trainer).remove(0).unwrap().evaluation.unwrap();
    assert!(evaluation.metric("absolute_error").is_some_and(|error| error < 0.05), "{evaluation:?}");
}

/// Sample `i` has two named inputs and two named targets.
fn named(i: usize) -> Result<Batch, crate::data::BoxError> {
    let (a, b) = (i as f32 * 0.37 % 1.0, i as f32 * 0.73 % 1.0);
    let [a, b, sum] = [a, b, a + b].map(|x| Tensor::new(&[x], &Device::Cpu));
    let larger = Tensor::new(u32::from(i as f32 * 0.37 % 1.0 > i as f32 * 0.73 % 1.0), &Device::Cpu)?;
    Ok(Batch::named([("a", a?), ("b", b?)]).target("larger", larger).target("sum", sum?))
}

/// Both tasks use the hidden layer.
fn two_tasks() -> Layers {
    let build = |vb: VarBuilder| Ok(Two([linear(1, 8, vb.pp("first"))?, linear(1, 8, vb.pp("second"))?]));
    Layers::new()
        .layer("hidden", build)
        .inputs(["a", "b"])
        .layer("larger", |vb: VarBuilder| linear(8, 2, vb))
        .layer("sum", |vb: VarBuilder| linear(8, 1, vb))
        .inputs(["hidden"])
        .loss_of(["larger", "sum"], ["larger", "sum"], |[scores, output], [class, sum]| {
            cross_entropy(scores, class)? + candle_nn::loss::mse(output, sum)?
        })
}

/// The evaluation is the same on one rank, on two, and on two pipeline stages, with a data set in memory and with one
/// that a function computes.
#[test]
fn two_tasks_are_trained_and_measured_by_name() {
    let evaluations =
        [(1, ""), (2, ""), (2, "pipeline: {stages: 2}"), (4, "pipeline: {stages: 2}")].map(|(ranks, more)| {
            let folder = tempfile::tempdir().unwrap();
            let trainer = || {
                let text = text(folder.path(), "max_steps: 120, save_last: false") + more + "\n";
                let all: Vec<usize> = (0..17).map(|i| i + 100).collect();
                let valid = InMemory::of(from_fn(200, named).batch(&all).unwrap()).unwrap();
                quiet(Config::with_world_size("ds.yaml", text, ranks).unwrap())
                    .model(two_tasks())
                    .data(from_fn(64, named), valid)
                    .metric_of("accuracy", ["larger"], ["larger"], |[scores], [class]| accuracy(scores, class))
                    .metric_of("both", ["sum", "larger"], ["sum"], |[output, _], [sum]| (output - sum)?.abs())
            };
            let evaluation = fit_on(ranks, trainer).remove(0).unwrap().evaluation.unwrap();
            assert_eq!(evaluation.samples, 17);
            evaluation
        });
    assert!(evaluations.iter().all(|evaluation| *evaluation == evaluations[0]), "{evaluations:?}");
    let metric = |name: &str| evaluations[0].metric(name).unwrap();
    assert!(metric("accuracy") > 0.8 && metric("both") < 0.1, "{:?}", evaluations[0]);
}

#[test]
fn names_that_data_or_metrics_miss_are_reported_before_training() {
    let folder = tempfile::tempdir().unwrap();
    let new = || quiet(config(folder.path(), "max_steps: 2, save_last: false"));
    let data = || from_fn(16, named);
    let told = mistake(|| new().model(two_tasks()).train_data(points(16)));
    assert!(told.contains("layer `hidden` takes `a`") && told.contains("the inputs 1 without a name"), "{told}");
    let without = || from_fn(16, |i| Ok(Batch::named([("a", Tensor::new(&[i as f32], &Device::Cpu)?)])));
    let told = mistake(|| new().model(two_tasks()).data(data(), without()));
    assert!(told.contains("layer `hidden` takes `b`") && told.contains("the inputs `a` and no targets"), "{told}");
    let told = mistake(|| new().model(two_tasks()).data(data(), data()).metric("accuracy", accuracy));
    assert!(told.contains("the metric `accuracy` takes one output") && told.contains("larger, sum"), "{told}");
    let metric = |output: &'static str, target: &'static str| {
        let trainer = move || new().model(two_tasks()).data(data(), data());
        mistake(move || trainer().metric_of("m", [output], [target], |[y], _| Ok(y.clone())))
    };
    assert!(metric("hidden", "sum").contains("the output `hidden`, which the loss does not see"));
    let told = metric("sum", "total");
    assert!(told.contains("the target `total`") && told.contains("a, b, larger, sum"), "{told}");
}

#[test]
fn a_single_process_rejects_several_ranks() {
    let alone = LauncherEnvironment::alone();
    assert!(one_process_is_one_rank(None, None, &alone).is_ok());
    assert!(one_process_is_one_rank(Some(1), None, &alone).is_ok());
    for (asked, written) in [(Some(2), None), (None, Some(2))] {
        let error = one_process_is_one_rank(asked, written, &alone).unwrap_err().to_string();
        assert!(error.contains("zero-train launch --nproc-per-node 2 "), "{error}");
    }
}

/// The order of samples, the place in it and the loader hold nothing for each sample: a byte for each of these would be a
/// petabyte.
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
    // Every rank loads the first micro-batch once more, to see the shape of the samples.
    all.dedup();
    let mut expected: Vec<usize> = (0..48).map(|at| crate::data::sample_index(seed, at, SAMPLES, true)).collect();
    expected.sort_unstable();
    assert_eq!(all, expected, "the samples of all steps, those of the first three on one rank");
}
