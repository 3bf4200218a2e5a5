//! The median rule: stops a trial that is far behind the others.
//!
//! Golovin et al. 2017, "Google Vizier: a service for black-box optimization", section 3.2.2: for each completed trial,
//! take the mean of the values that the trial reported up to a step. A trial is stopped at that step if its best value
//! so far is worse than the median of these means.

use super::trial::Evaluation;

/// Minimum number of completed trials that the rule needs.
const COMPLETE: usize = 3;
/// Minimum number of evaluations of a trial before the rule may stop it.
const EVALUATIONS: usize = 2;

/// Returns the median of the completed trials' means if the best loss of this trial is worse than the median; `None` if
/// this trial may continue.
pub(super) fn behind(own: &[Evaluation], complete: &[&[Evaluation]]) -> Option<f64> {
    let last = own.last()?;
    if own.len() < EVALUATIONS || complete.len() < COMPLETE {
        return None;
    }
    let mut means: Vec<f64> = complete.iter().filter_map(|of| mean(of, last.step)).collect();
    if means.len() < COMPLETE {
        return None;
    }
    means.sort_by(f64::total_cmp);
    let half = means.len() / 2;
    let median = if means.len() % 2 == 1 { means[half] } else { f64::midpoint(means[half - 1], means[half]) };
    let best = own.iter().map(|of| f64::from(of.loss)).fold(f64::INFINITY, f64::min);
    (best > median).then_some(median)
}

/// Returns the mean loss of the evaluations up to a step.
fn mean(of: &[Evaluation], step: u64) -> Option<f64> {
    let until: Vec<f64> = of.iter().filter(|of| of.step <= step).map(|of| f64::from(of.loss)).collect();
    (!until.is_empty()).then(|| until.iter().sum::<f64>() / until.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(losses: &[f32]) -> Vec<Evaluation> {
        losses.iter().enumerate().map(|(at, &loss)| Evaluation { step: 10 * (at as u64 + 1), loss }).collect()
    }

    #[test]
    fn a_trial_worse_than_the_median_of_means_is_stopped() {
        // The means after two evaluations are 3.5, 4.5 and 5.5; later evaluations do not count.
        let others = [losses(&[4.0, 3.0, 0.1]), losses(&[5.0, 4.0, 0.1]), losses(&[6.0, 5.0, 0.1])];
        let complete: Vec<&[Evaluation]> = others.iter().map(Vec::as_slice).collect();
        assert_eq!(behind(&losses(&[5.0, 4.6]), &complete), Some(4.5));
        assert_eq!(behind(&losses(&[5.0, 4.5]), &complete), None, "no worse");
        assert_eq!(behind(&losses(&[4.4, 9.0]), &complete), None, "its best counts, not its last");
        // With an even number of trials, the median lies between the two middle values, 4.5 and 5.5.
        let more = losses(&[9.0, 9.0]);
        let four = [complete.clone(), vec![&more[..]]].concat();
        assert_eq!(behind(&losses(&[9.0, 5.0]), &four), None);
        assert_eq!(behind(&losses(&[9.0, 5.1]), &four), Some(5.0));
    }

    #[test]
    fn no_trial_is_judged_too_early() {
        let other = losses(&[1.0, 1.0]);
        assert_eq!(behind(&losses(&[9.0, 9.0]), &[&other, &other]), None, "only two trials are complete");
        assert_eq!(behind(&losses(&[9.0]), &[&other, &other, &other]), None, "only one evaluation");
        assert_eq!(behind(&losses(&[9.0, 9.0]), &[&other, &other, &other]), Some(1.0));
        assert_eq!(behind(&[], &[&other, &other, &other]), None);
    }
}
