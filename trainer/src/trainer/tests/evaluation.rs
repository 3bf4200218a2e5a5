//! Tests evaluations and metrics on any number of ranks.

use candle_core::{Device, Tensor};
use zero_config::Config;
use zero_engine::ops::{IGNORE_INDEX, count_targets};

use super::{config, fit_on, metrics, mistake, model, points, quiet, text};
use crate::data::{Dataset, InMemory};
use crate::metrics::accuracy;
use crate::train::Summary;

/// 27 samples do not fill whole micro-batches, and 14 micro-batches cannot be divided evenly among 4 ranks.
#[test]
fn metrics_are_the_same_on_any_number_of_ranks() {
    let evaluations = [1, 2, 4].map(|ranks| {
        let folder = tempfile::tempdir().unwrap();
        let trainer = || {
            let doubled = |scores: &Tensor, classes: &Tensor| accuracy(scores, classes)?.0 * 2.0;
            let mean = |scores: &Tensor, classes: &Tensor| accuracy(scores, classes)?.0.mean_all();
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

/// Returns points with classes as i64. Only some points have a class. With `keeps_all`, the points without a class are
/// kept without a target. Otherwise they are left out.
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

/// Samples without a target do not affect the mean of an evaluation, on any number of ranks.
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
    // `training.eval_batches` allows 32 samples, but the evaluation data are a fifth of 40 samples.
    assert_eq!(evaluation.samples, 8);
    assert!(evaluation.metric("accuracy").is_some_and(|accuracy| (0.0..=1.0).contains(&accuracy)));
}

/// Two ranks that share sequences evaluate the same samples as one rank, and count each sample once.
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
