//! Metrics for training on pairs of answers, with TRL's names.
//!
//! The reward of an answer is β times the difference between its log-probabilities under the model and under the
//! reference model. Without a reference model, it is β times the mean log-probability.

use candle_core::{DType, Result, Tensor};
use zero_config::Preference;
use zero_engine::{Activations, Error};
use zero_model::zoo::{LABEL_COUNTS, REFERENCE_LOG_PROBS};

use super::metrics::{Function, Metric, Of};

/// Returns the share of pairs whose chosen answer has the larger reward, and the mean difference of the rewards.
pub(super) fn metrics(preference: &Preference) -> std::result::Result<Vec<Metric>, Error> {
    let named = |function: Of<Activations, Activations>| Function::Named {
        outputs: vec!["lm_head".into()],
        targets: vec![REFERENCE_LOG_PROBS.into(), LABEL_COUNTS.into()],
        function,
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
    let accuracy =
        move |outputs: &Activations, targets: &Activations| margins(outputs, targets)?.gt(0.0)?.to_dtype(DType::F32);
    let accuracy = Metric::new("reward_accuracy", &[], named(Box::new(accuracy)))?;
    let margin = Metric::new("reward_margin", &[], named(Box::new(margins)))?;
    Ok(vec![accuracy, margin])
}

#[cfg(test)]
mod tests;
