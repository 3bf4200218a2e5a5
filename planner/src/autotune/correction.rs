//! Corrects predicted step times with measured runs: ridge regression fits one factor per setting.
//!
//! The logarithm of measured time / predicted time is modelled as a sum of a common term and one term for each setting
//! (a key with its value) of a configuration. Terms are regularized towards zero. The term of a setting that was never
//! measured is zero, and without any measurements all terms are zero.

use std::collections::BTreeMap;

/// Strength of the regularization, for a setting's term and for the common term: a term is pulled towards zero as if
/// this many additional measurements had the value zero.
const OF_A_SETTING: f64 = 1.0;
const OF_ALL: f64 = 0.05;
/// Lower bound on the uncertainty of predictions, in logarithms.
const LEAST_SPREAD: f64 = 0.02;
/// Uncertainty before any measurement, in logarithms.
const FIRST_SPREAD: f64 = 0.15;

/// A setting: a key and its value.
pub(super) type Setting = (String, String);

/// Formats settings in the syntax of `--set`.
pub(super) fn overrides(settings: &[Setting]) -> impl Iterator<Item = String> {
    settings.iter().map(|(path, value)| format!("{path}={value}"))
}

/// The fitted terms.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Correction {
    all: f64,
    terms: BTreeMap<Setting, f64>,
    /// Standard deviation of log(measured / corrected).
    pub(super) spread: f64,
}

impl Correction {
    /// Fits the terms to measured configurations, each given as its settings and the ratio measured / predicted.
    pub(super) fn fit(measured: &[(&[Setting], f64)]) -> Self {
        let mut ids: BTreeMap<&Setting, usize> = BTreeMap::new();
        for setting in measured.iter().flat_map(|(settings, _)| settings.iter()) {
            let next = ids.len() + 1;
            ids.entry(setting).or_insert(next);
        }
        let size = ids.len() + 1;
        let mut matrix = vec![vec![0.0; size]; size];
        let mut right = vec![0.0; size];
        for (settings, ratio) in measured {
            let has: Vec<usize> = std::iter::once(0).chain(settings.iter().map(|setting| ids[setting])).collect();
            for &i in &has {
                right[i] += ratio.ln();
                has.iter().for_each(|&j| matrix[i][j] += 1.0);
            }
        }
        for (i, row) in matrix.iter_mut().enumerate() {
            row[i] += if i == 0 { OF_ALL } else { OF_A_SETTING };
        }
        let solved = solve(matrix, right);
        let terms = ids.into_iter().map(|(setting, id)| (setting.clone(), solved[id])).collect();
        let mut correction = Self { all: solved[0], terms, spread: FIRST_SPREAD };
        if measured.len() > 1 {
            let off = measured.iter().map(|(settings, ratio)| (ratio.ln() - correction.term(settings)).powi(2));
            let found = (off.sum::<f64>() / (measured.len() - 1) as f64).sqrt();
            // The residuals of a fit underestimate the spread, so the initial spread counts as much as two
            // measurements.
            let count = measured.len() as f64;
            correction.spread = ((found.powi(2) * count + 2.0 * FIRST_SPREAD.powi(2)) / (count + 2.0)).sqrt();
            correction.spread = correction.spread.max(LEAST_SPREAD);
        }
        correction
    }

    /// Returns the factor for the prediction of a configuration with these settings.
    pub(super) fn factor(&self, settings: &[Setting]) -> f64 {
        self.term(settings).exp()
    }

    fn term(&self, settings: &[Setting]) -> f64 {
        self.all + settings.iter().filter_map(|setting| self.terms.get(setting)).sum::<f64>()
    }
}

/// Solves a system with a symmetric positive definite matrix, for which Gaussian elimination needs no pivoting.
fn solve(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let size = right.len();
    for column in 0..size {
        for row in column + 1..size {
            let factor = matrix[row][column] / matrix[column][column];
            let (above, below) = matrix.split_at_mut(row);
            below[0][column..].iter_mut().zip(&above[column][column..]).for_each(|(own, other)| *own -= factor * other);
            right[row] -= factor * right[column];
        }
    }
    for row in (0..size).rev() {
        let known: f64 = (row + 1..size).map(|k| matrix[row][k] * right[k]).sum();
        right[row] = (right[row] - known) / matrix[row][row];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(key: &str, value: &str) -> Setting {
        (key.into(), value.into())
    }

    #[test]
    fn a_setting_that_is_slower_than_predicted_is_detected() {
        let (slow, other) = (setting("stage", "3"), setting("micro", "4"));
        let cases = [
            (vec![], 1.1),
            (vec![other.clone()], 1.1),
            (vec![slow.clone()], 1.1 * 1.5),
            (vec![slow.clone(), other.clone()], 1.1 * 1.5),
        ];
        let measured: Vec<(&[Setting], f64)> = cases.iter().map(|(settings, ratio)| (&settings[..], *ratio)).collect();
        let correction = Correction::fit(&measured);
        let ratio = correction.factor(std::slice::from_ref(&slow)) / correction.factor(&[]);
        assert!(ratio > 1.2 && ratio <= 1.5, "{ratio}: most of it, though not all after four measurements");
        assert!((correction.factor(std::slice::from_ref(&other)) / correction.factor(&[]) - 1.0).abs() < 0.06);
        let more: Vec<_> = (0..20).flat_map(|_| measured.clone()).collect();
        let sure = Correction::fit(&more);
        assert!((sure.factor(&[slow, other]) - 1.65).abs() < 0.02);
        assert!(sure.spread < correction.spread && sure.spread >= LEAST_SPREAD);
    }

    #[test]
    fn no_measurements_give_no_correction() {
        let none = Correction::fit(&[]);
        assert_eq!((none.factor(&[setting("a", "b")]), none.spread), (1.0, FIRST_SPREAD));
        // A single measurement corrects the predictions of all configurations.
        let one = Correction::fit(&[(&[], 1.2)]);
        assert!((one.factor(&[setting("a", "b")]) - 1.19).abs() < 0.01, "{one:?}");
    }
}
