//! Ready-made metrics: [`accuracy`], [`squared_error`] and [`absolute_error`] for
//! [`Trainer::metric`](crate::Trainer::metric); [`f1`], [`macro_f1`], [`matthews_correlation`], [`roc_auc`],
//! [`pearson`] and [`spearman`] for [`Trainer::dataset_metric`](crate::Trainer::dataset_metric). All ignore targets of
//! −100, as losses do, if the targets are integers.

use std::collections::BTreeSet;

use candle_core::{D, DType, Result, Tensor, bail};
use zero_engine::ops::IGNORE_INDEX;

pub use crate::train::MetricValues;

/// Computes the share of targets that equal the class with the highest score. `scores` has the shape `[…, classes]`,
/// and `targets` has the shape `[…]`. Returns, for each target, 1 or 0 and its weight, which is 0 for a target of −100.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn accuracy(scores: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
    let targets = targets.to_dtype(DType::I64)?;
    let hits = scores.argmax(D::Minus1)?.to_dtype(DType::I64)?.eq(&targets)?;
    Ok((hits.to_dtype(DType::F32)?, targets.ne(IGNORE_INDEX)?.to_dtype(DType::F32)?))
}

/// Computes the squared error of each number.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn squared_error(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    (outputs - targets)?.sqr()
}

/// Computes the absolute error of each number.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn absolute_error(outputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    (outputs - targets)?.abs()
}

/// Computes the F1 score of class 1: 2·TP / (2·TP + FP + FN), and 0 if that is 0 / 0. `scores` has the shape
/// `[…, classes]`, and `targets` has the shape `[…]`.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn f1(scores: &Tensor, targets: &Tensor) -> Result<f64> {
    Ok(f1_of(&predictions(scores, targets)?, 1))
}

/// Computes the mean of the F1 scores of all classes that occur among the targets or the predictions. `scores` has the
/// shape `[…, classes]`, and `targets` has the shape `[…]`.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn macro_f1(scores: &Tensor, targets: &Tensor) -> Result<f64> {
    let pairs = predictions(scores, targets)?;
    let classes: BTreeSet<i64> = pairs.iter().flatten().copied().collect();
    Ok(classes.iter().map(|&class| f1_of(&pairs, class)).sum::<f64>() / classes.len() as f64)
}

/// Computes the Matthews correlation coefficient of two or more classes (Gorodkin 2004), and 0 if it is 0 / 0. `scores`
/// has the shape `[…, classes]`, and `targets` has the shape `[…]`.
///
/// # Errors
/// Fails if the shapes do not match.
pub fn matthews_correlation(scores: &Tensor, targets: &Tensor) -> Result<f64> {
    let pairs = predictions(scores, targets)?;
    let classes: BTreeSet<i64> = pairs.iter().flatten().copied().collect();
    let count = |side: usize, class: i64| pairs.iter().filter(|pair| pair[side] == class).count() as f64;
    let sum = |a: usize, b: usize| classes.iter().map(|&class| count(a, class) * count(b, class)).sum::<f64>();
    let samples = pairs.len() as f64;
    let hits = pairs.iter().filter(|[predicted, target]| predicted == target).count() as f64;
    let covariance = hits * samples - sum(0, 1);
    let squares = (samples * samples - sum(0, 0)) * (samples * samples - sum(1, 1));
    Ok(if squares == 0.0 { 0.0 } else { covariance / squares.sqrt() })
}

/// Computes the area under the ROC curve: the probability that a sample of class 1 has a higher score than a sample of
/// class 0, where equal scores count half. `scores` has one score per target, or the scores of both classes in a last
/// dimension of 2. The result is NaN if all targets have the same class.
///
/// # Errors
/// Fails if the shapes do not match, or if a target is not 0, 1 or −100.
pub fn roc_auc(scores: &Tensor, targets: &Tensor) -> Result<f64> {
    let targets = integers(targets)?;
    let scores = numbers(scores)?;
    let scores = match scores.len() {
        both if both == 2 * targets.len() => scores.chunks_exact(2).map(|pair| pair[1] - pair[0]).collect(),
        one if one == targets.len() => scores,
        other => bail!("{other} scores do not match {} targets", targets.len()),
    };
    if let Some(other) = targets.iter().find(|target| ![0, 1, IGNORE_INDEX].contains(target)) {
        bail!("the area under the ROC curve needs the classes 0 and 1, not {other}")
    }
    let counted = scores.into_iter().zip(targets).filter(|(_, target)| *target != IGNORE_INDEX);
    let (scores, targets): (Vec<f64>, Vec<i64>) = counted.unzip();
    let positives = targets.iter().filter(|target| **target == 1).count() as f64;
    let negatives = targets.len() as f64 - positives;
    let sum: f64 = ranks(&scores).iter().zip(targets).filter(|(_, target)| *target == 1).map(|(rank, _)| rank).sum();
    Ok((sum - positives * (positives + 1.0) / 2.0) / (positives * negatives))
}

/// Computes Pearson's correlation coefficient of the outputs and the targets. The result is NaN if all outputs or all
/// targets are equal.
///
/// # Errors
/// Fails if the numbers of outputs and targets differ.
pub fn pearson(outputs: &Tensor, targets: &Tensor) -> Result<f64> {
    let [outputs, targets] = pair(outputs, targets)?;
    Ok(correlation(&outputs, &targets))
}

/// Computes Spearman's rank correlation coefficient of the outputs and the targets. Equal numbers have their mean rank.
/// The result is NaN if all outputs or all targets are equal.
///
/// # Errors
/// Fails if the numbers of outputs and targets differ.
pub fn spearman(outputs: &Tensor, targets: &Tensor) -> Result<f64> {
    let [outputs, targets] = pair(outputs, targets)?;
    Ok(correlation(&ranks(&outputs), &ranks(&targets)))
}

/// Returns the predicted class and the target of each target that is not ignored.
fn predictions(scores: &Tensor, targets: &Tensor) -> Result<Vec<[i64; 2]>> {
    let predicted = integers(&scores.argmax(D::Minus1)?)?;
    let targets = integers(targets)?;
    if predicted.len() != targets.len() {
        bail!("scores for {} targets do not match {} targets", predicted.len(), targets.len())
    }
    let pairs = predicted.into_iter().zip(targets).map(|(predicted, target)| [predicted, target]);
    Ok(pairs.filter(|[_, target]| *target != IGNORE_INDEX).collect())
}

fn f1_of(pairs: &[[i64; 2]], class: i64) -> f64 {
    let count = |side: usize| pairs.iter().filter(|pair| pair[side] == class).count();
    let both = pairs.iter().filter(|pair| **pair == [class; 2]).count();
    match count(0) + count(1) {
        0 => 0.0,
        sum => 2.0 * both as f64 / sum as f64,
    }
}

fn integers(tensor: &Tensor) -> Result<Vec<i64>> {
    tensor.to_dtype(DType::I64)?.flatten_all()?.to_vec1()
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn pair(outputs: &Tensor, targets: &Tensor) -> Result<[Vec<f64>; 2]> {
    let [outputs, targets] = [numbers(outputs)?, numbers(targets)?];
    match outputs.len() == targets.len() {
        true => Ok([outputs, targets]),
        false => bail!("{} outputs do not match {} targets", outputs.len(), targets.len()),
    }
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |numbers: &[f64]| numbers.iter().sum::<f64>() / numbers.len() as f64;
    let (mean_a, mean_b) = (mean(a), mean(b));
    let of = |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(b).map(|(a, b)| f(a - mean_a, b - mean_b)).sum::<f64>();
    of(&|a, b| a * b) / (of(&|a, _| a * a) * of(&|_, b| b * b)).sqrt()
}

/// Returns the rank of each number, from 1. Equal numbers have the mean of their ranks.
fn ranks(numbers: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..numbers.len()).collect();
    order.sort_by(|&a, &b| numbers[a].total_cmp(&numbers[b]));
    let mut ranks = vec![0.0; numbers.len()];
    let mut before = 0;
    for equal in order.chunk_by(|&a, &b| numbers[a] == numbers[b]) {
        let mean = before as f64 + (equal.len() + 1) as f64 / 2.0;
        equal.iter().for_each(|&index| ranks[index] = mean);
        before += equal.len();
    }
    ranks
}
