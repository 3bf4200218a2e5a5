//! Tests metrics of whole data sets, and the ready-made metrics.

use candle_core::{Device, Tensor};
use zero_engine::ops::IGNORE_INDEX;

use super::{config, fit_on, metrics, mistake, model, points, quiet};
use crate::data::{Dataset, InMemory};
use crate::metrics::{accuracy, f1, macro_f1, matthews_correlation, pearson, roc_auc, spearman};
use crate::python::{python, results};
use crate::train::Summary;

/// A metric that depends on the order of the samples and on every output.
fn ordered(scores: &Tensor, classes: &Tensor) -> candle_core::Result<f64> {
    let scores = scores.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
    let classes = classes.to_vec1::<u32>()?;
    assert_eq!(scores.len(), classes.len());
    Ok(scores.iter().zip(classes).enumerate().map(|(i, (s, c))| (i + 1) as f64 * f64::from(*s) + f64::from(c)).sum())
}

/// 27 samples do not fill whole micro-batches, and 14 micro-batches cannot be divided evenly among 4 ranks.
#[test]
fn functions_receive_all_samples_in_order_on_any_number_of_ranks() {
    for (stages, more) in [(1, ""), (1, "eval_batches: 4, "), (2, "")] {
        let evaluations = [1, 2, 4].into_iter().filter(|ranks| ranks % stages == 0).map(|ranks| {
            let folder = tempfile::tempdir().unwrap();
            let more = more.replace('4', &format!("{}", 8 / ranks));
            let mut config = config(folder.path(), &format!("max_steps: 4, eval_every: 2, {more}save_last: false"));
            if stages > 1 {
                let text = super::text(folder.path(), "max_steps: 4, eval_every: 2, save_last: false");
                let text = format!("{text}pipeline: {{stages: {stages}}}\n");
                config = zero_config::Config::with_world_size("ds.yaml", text, ranks).unwrap();
            }
            let trainer = || {
                quiet(config.clone())
                    .model(model())
                    .data(points(64), points(27))
                    .dataset_metric("ordered", ordered)
                    .metric("accuracy", accuracy)
                    .dataset_metric("f1", f1)
            };
            let summaries: Vec<Summary> = fit_on(ranks, trainer).into_iter().map(Result::unwrap).collect();
            assert!(summaries.iter().all(|summary| *summary == summaries[0]), "{summaries:?}");
            let lines = metrics(folder.path());
            let evaluation = summaries[0].evaluation.clone().unwrap();
            let names: Vec<_> = evaluation.metrics.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names, ["ordered", "accuracy", "f1"]);
            assert_eq!(lines[3]["eval_f1"].as_f64(), evaluation.metric("f1"));
            (evaluation.samples, evaluation.metrics)
        });
        let evaluations: Vec<_> = evaluations.collect();
        assert!(evaluations.iter().all(|other| *other == evaluations[0]), "{evaluations:?}");
        assert_eq!(evaluations[0].0, if more.is_empty() { 27 } else { 16 });
    }
}

#[test]
fn errors_of_a_function_name_the_metric() {
    let folder = tempfile::tempdir().unwrap();
    let new = || quiet(config(folder.path(), "max_steps: 1, save_last: false")).model(model());
    let told = mistake(|| new().data(points(8), points(8)).dataset_metric("wrong", |_, _| candle_core::bail!("no")));
    assert!(told.contains("in the metric `wrong`") && told.contains("no"), "{told}");
    let valid = || {
        let points = points(8).batch(&[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        let classes = Tensor::new(&[0_u32, 1, 1, 0, 1, 1, 1, 0], &Device::Cpu).unwrap();
        InMemory::new(points.inputs.single().unwrap().clone(), classes).unwrap()
    };
    let wrong = |scores: &Tensor, classes: &Tensor| roc_auc(scores, &(classes * 2.0)?);
    let told = mistake(|| new().data(points(8), valid()).dataset_metric("auc", wrong));
    assert!(told.contains("needs the classes 0 and 1, not 2"), "{told}");
}

fn one_hot(classes: &[i64], of: usize) -> Tensor {
    let scores = classes.iter().flat_map(|&class| (0..of as i64).map(move |other| f32::from(u8::from(other == class))));
    Tensor::from_vec(scores.collect::<Vec<_>>(), (classes.len(), of), &Device::Cpu).unwrap()
}

/// The inputs and the expected results are from scikit-learn's documentation.
#[test]
fn ready_metrics_agree_with_the_examples_of_scikit_learn() {
    let of = |numbers: &[f64]| Tensor::new(numbers, &Device::Cpu).unwrap();
    let classes = |classes: &[i64]| Tensor::new(classes, &Device::Cpu).unwrap();
    let (scores, targets) = (one_hot(&[0, 2, 1, 0, 0, 1], 3), classes(&[0, 1, 2, 0, 1, 2]));
    assert!((macro_f1(&scores, &targets).unwrap() - 0.8 / 3.0).abs() < 1e-12);
    let (scores, targets) = (one_hot(&[1, 0, 1, 1], 2), classes(&[1, 1, 1, 0]));
    assert!((matthews_correlation(&scores, &targets).unwrap() + 1.0 / 3.0).abs() < 1e-12);
    assert!((f1(&scores, &targets).unwrap() - 2.0 / 3.0).abs() < 1e-12);
    assert_eq!(roc_auc(&of(&[0.1, 0.4, 0.35, 0.8]), &classes(&[0, 0, 1, 1])).unwrap(), 0.75);
    assert!(roc_auc(&of(&[0.1, 0.4]), &classes(&[1, 1])).unwrap().is_nan());
    let (a, b) = (of(&[1.0, 2.0, 3.0, 4.0, 5.0]), of(&[5.0, 6.0, 7.0, 8.0, 7.0]));
    assert!((spearman(&a, &b).unwrap() - 0.820_782_681_668_123_3).abs() < 1e-12);
    assert!((pearson(&a, &b).unwrap() - 0.832_050_294_337_843_7).abs() < 1e-12);
}

#[test]
fn ignored_targets_do_not_count() {
    let targets = |classes: &[i64]| Tensor::new(classes, &Device::Cpu).unwrap();
    let (scores, some) = (one_hot(&[1, 0, 0, 1, 1], 2), targets(&[1, IGNORE_INDEX, 1, 0, IGNORE_INDEX]));
    let kept = (one_hot(&[1, 0, 1], 2), targets(&[1, 1, 0]));
    for metric in [f1, macro_f1, matthews_correlation, roc_auc] {
        assert_eq!(metric(&scores, &some).unwrap(), metric(&kept.0, &kept.1).unwrap());
    }
    let folder = tempfile::tempdir().unwrap();
    let accuracies = [&[0, 1, 2, 3][..], &[0, 2]].map(|kept| {
        let all = points(4).batch(kept).unwrap();
        let classes: Vec<u32> = all.targets.unwrap().to_vec1().unwrap();
        let target = |(i, class): (usize, u32)| if kept[i] % 2 == 0 { i64::from(class) } else { IGNORE_INDEX };
        let classes: Vec<i64> = classes.into_iter().enumerate().map(target).collect();
        let valid = InMemory::new(all.inputs.single().unwrap().clone(), targets(&classes)).unwrap();
        let config = config(folder.path(), "max_steps: 1, save_last: false");
        let trainer = quiet(config).model(model()).data(points(64), valid).metric("accuracy", accuracy);
        trainer.evaluate().unwrap().metric("accuracy")
    });
    assert_eq!(accuracies[0], accuracies[1]);
}

/// Compares with scikit-learn and SciPy on random scores with ties.
#[test]
fn ready_metrics_agree_with_scikit_learn() {
    let numbers: Vec<i64> = (0..400_i64).map(|i| (i * i * 37 + i * 11) % 101).collect();
    let script = format!(
        "
import numpy, scipy.stats
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score
numbers = numpy.array({numbers:?})
scores, targets = numbers[:300].reshape(100, 3), numbers[300:] % 3
predicted = scores.argmax(1)
print('result', f1_score(targets, predicted, average='macro'), matthews_corrcoef(targets, predicted))
scores, targets = numbers[:200].reshape(100, 2), numbers[300:] % 2
predicted = scores.argmax(1)
print('result', f1_score(targets, predicted), matthews_corrcoef(targets, predicted))
print('result', roc_auc_score(targets, scores[:, 1] - scores[:, 0]), roc_auc_score(targets, scores[:, 1]))
print('result', scipy.stats.pearsonr(scores[:, 0], scores[:, 1])[0], scipy.stats.spearmanr(scores[:, 0], scores[:, 1])[0])
"
    );
    let Some(output) = python(&["sklearn", "scipy"], &script) else { return };
    let expected: Vec<f64> =
        results(&output).flat_map(str::split_whitespace).map(|number| number.parse().unwrap()).collect();
    let all = Tensor::from_vec(numbers, 400, &Device::Cpu).unwrap();
    let targets = |of: i64| {
        let last = all.narrow(0, 300, 100).unwrap().to_vec1::<i64>().unwrap();
        Tensor::from_vec(last.into_iter().map(|n| n % of).collect::<Vec<_>>(), 100, &Device::Cpu).unwrap()
    };
    let scores = |of: usize| all.narrow(0, 0, 100 * of).unwrap().reshape((100, of)).unwrap();
    let column = |index: usize| scores(2).narrow(1, index, 1).unwrap();
    let found = [
        macro_f1(&scores(3), &targets(3)),
        matthews_correlation(&scores(3), &targets(3)),
        f1(&scores(2), &targets(2)),
        matthews_correlation(&scores(2), &targets(2)),
        roc_auc(&scores(2), &targets(2)),
        roc_auc(&column(1), &targets(2)),
        pearson(&column(0), &column(1)),
        spearman(&column(0), &column(1)),
    ];
    assert_eq!(expected.len(), found.len());
    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
        let found = found.unwrap();
        assert!((expected - found).abs() < 1e-12, "number {index}: {found} here, {expected} in Python");
    }
}
