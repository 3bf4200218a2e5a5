//! Metrics for training on pairs of answers, with TRL's names.
//!
//! The reward of an answer is β times the difference between its log-probabilities under the model and under the
//! reference model. Without a reference model, it is β times the mean log-probability.

use candle_core::{DType, Result, Tensor};
use zero_config::Preference;
use zero_engine::{Activations, Error};
use zero_model::zoo::{LABEL_COUNTS, REFERENCE_LOG_PROBS};

use super::metrics::{Function, Metric, MetricValues, Of, Selection};

/// Returns two metrics: the share of pairs whose chosen answer has the larger reward, and the mean difference of the
/// rewards.
pub(super) fn metrics(preference: &Preference) -> std::result::Result<Vec<Metric>, Error> {
    let named = |name: &str, function: Of<MetricValues>| {
        let targets = vec![REFERENCE_LOG_PROBS.into(), LABEL_COUNTS.into()];
        let selection = Selection::Named { outputs: vec!["lm_head".into()], targets };
        Metric::new(name, &[], selection, Function::Mean(function))
    };
    let (beta, has_reference) = (preference.beta, preference.has_reference());
    let margins = move |outputs: &Activations, targets: &Activations| -> Result<Tensor> {
        let [reference, counts] = targets.tensors() else { candle_core::bail!("expected two targets") };
        let sums = outputs.single()?.narrow(1, 0, 2)?;
        let rewards = match has_reference {
            true => (sums - reference)?,
            false => (sums / counts.narrow(1, 0, 2)?)?,
        };
        (rewards.narrow(1, 0, 1)? - rewards.narrow(1, 1, 1)?)? * beta
    };
    let accuracy = named(
        "reward_accuracy",
        Box::new(move |outputs, targets| Ok(margins(outputs, targets)?.gt(0.0)?.to_dtype(DType::F32)?.into())),
    )?;
    let margin = named("reward_margin", Box::new(move |outputs, targets| Ok(margins(outputs, targets)?.into())))?;
    Ok(vec![accuracy, margin])
}

#[cfg(test)]
mod tests;
