//! The weights of micro-batches in the loss of the global batch.
//!
//! A loss is a mean, often over targets, and micro-batches may have different numbers of targets. The loss of the
//! global batch is the mean over all of its targets, however they are distributed across micro-batches and ranks. The
//! gradient of micro-batch m is therefore multiplied by w·M/W: w is the micro-batch's weight, and W is the sum of the
//! weights of all M micro-batches of the global batch. The weights are known before the first backward, because all
//! micro-batches of a step are loaded together.
//!
//! Most models define no loss weight ([`Model::loss_weight`]). Their micro-batches are loaded one at a time, and ranks
//! exchange nothing. If micro-batches have different numbers of samples, these numbers serve as weights. If all weights
//! are equal, the factor is exactly 1.

use std::cell::OnceCell;

use zero_comm::{Buffer, Communicator, ReduceOp};
use zero_model::Model;

use crate::batch::Batch;
use crate::error::Error;

/// The weights of the micro-batches of one run of a program, once they are known.
#[derive(Debug, Default)]
pub(crate) struct LossWeights(OnceCell<Known>);

#[derive(Debug)]
pub(crate) struct Known {
    /// The weights of this rank's micro-batches.
    own: Vec<u64>,
    /// The factors by which the mean losses of this rank's micro-batches are multiplied.
    factors: Vec<f64>,
    /// The weights summed over all ranks: one for the whole step, or one for each micro-batch index.
    totals: Vec<u64>,
}

/// The micro-batches over which a mean is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mean {
    /// All micro-batches of all ranks: a training step.
    Step,
    /// The same as `Step`, but micro-batches have different numbers of samples. These numbers are the weights if the
    /// model has none.
    StepOfSamples,
    /// The micro-batches of all ranks with the same index: an evaluation.
    EachMicroBatch,
}

/// Maximum weight of a micro-batch. Sums of larger weights over all micro-batches could overflow.
const MOST: u64 = 1 << 40;

impl LossWeights {
    /// Returns the factor by which a micro-batch's mean loss is multiplied before the average over micro-batches and
    /// ranks.
    pub(crate) fn factor(&self, micro_batch: usize) -> f64 {
        self.0.get().and_then(|known| known.factors.get(micro_batch).copied()).unwrap_or(1.0)
    }

    /// Returns the weight of one of this rank's micro-batches.
    pub(crate) fn own(&self, micro_batch: usize) -> Option<u64> {
        self.0.get().and_then(|known| known.own.get(micro_batch).copied())
    }

    /// Returns the weights over all ranks.
    pub(crate) fn totals(&self) -> Option<&[u64]> {
        self.0.get().map(|known| known.totals.as_slice())
    }

    /// Wraps `load` for a rank of `data`, the replicas of a pipeline stage. If the stage computes the loss and its
    /// micro-batches have weights, the first call loads all `count` micro-batches and sums the weights over `data`.
    pub(crate) fn loader<'a>(
        &'a self,
        (model, data, computes_loss): (&'a Model, &'a dyn Communicator, bool),
        (mean, count): (Mean, usize),
        mut load: impl FnMut(usize) -> Result<Batch, Error> + 'a,
    ) -> impl FnMut(usize) -> Result<Batch, Error> + 'a {
        let mut loaded: Vec<Option<Batch>> = vec![];
        let mut has_begun = false;
        move |index| {
            if !computes_loss {
                return load(index);
            }
            if let Some(batch) = loaded.get_mut(index).and_then(Option::take) {
                return Ok(batch);
            }
            let first = load(index)?;
            let weight = |batch: &Batch| match weight(model, batch)? {
                None if mean == Mean::StepOfSamples => Ok(Some(batch.rows()? as u64)),
                weight => Ok::<_, Error>(weight),
            };
            match (weight(&first)?, std::mem::replace(&mut has_begun, true)) {
                (None, _) if self.0.get().is_none() => return Ok(first),
                (Some(_), false) => {}
                _ => return Err(differ()),
            }
            let mut own = vec![];
            for other in 0..count {
                let batch = if other == index { first.clone() } else { load(other)? };
                own.push(weight(&batch)?.ok_or_else(differ)?);
                loaded.push((other != index).then_some(batch));
            }
            let known = known(own, mean, data)?;
            self.0.set(known).map_err(|_| Error::Batch("the weights of its loss were already computed".into()))?;
            Ok(first)
        }
    }
}

fn differ() -> Error {
    Error::Batch(
        "either all micro-batches of a step must have targets that can be ignored (i64), or none of them".into(),
    )
}

fn weight(model: &Model, batch: &Batch) -> Result<Option<u64>, Error> {
    let weight = model.loss_weight(&batch.loss_targets(model.signature())?)?;
    match weight {
        Some(weight) if weight > MOST => {
            Err(Error::Batch(format!("the weight of a micro-batch is {weight}; the maximum is 2^40")))
        }
        weight => Ok(weight),
    }
}

fn known(own: Vec<u64>, mean: Mean, data: &dyn Communicator) -> Result<Known, Error> {
    let sent = match mean {
        Mean::Step | Mean::StepOfSamples => vec![own.iter().sum::<u64>()],
        Mean::EachMicroBatch => own.clone(),
    };
    let sent = sent.into_iter().map(u64::cast_signed).collect();
    let totals = data.all_reduce(Buffer::I64(sent), ReduceOp::Sum).wait()?.into_i64()?;
    let totals: Vec<u64> = totals.into_iter().map(i64::cast_unsigned).collect();
    let ranks = data.size();
    let (micro_batches, total): (usize, &dyn Fn(usize) -> u64) = match mean {
        Mean::Step | Mean::StepOfSamples => (own.len() * ranks, &|_| totals[0]),
        Mean::EachMicroBatch => (ranks, &|index| totals[index]),
    };
    if mean != Mean::EachMicroBatch && totals[0] == 0 {
        return Err(Error::Batch("all targets of the step are ignored (-100), so its loss is undefined".to_string()));
    }
    let factors = own.iter().enumerate().map(|(index, &weight)| factor(weight, micro_batches, total(index)));
    let factors = factors.collect();
    Ok(Known { own, factors, totals })
}

/// Returns weight·`micro_batches`/`total`, which is exactly 1 if all weights are equal.
fn factor(weight: u64, micro_batches: usize, total: u64) -> f64 {
    match total {
        0 => 0.0,
        total => (u128::from(weight) * micro_batches as u128) as f64 / total as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_loss_weights_give_a_factor_of_one() {
        for weight in [1, 3, 1000, (1 << 40) - 1] {
            for micro_batches in [1usize, 3, 7, 48, 1000] {
                assert_eq!(factor(weight, micro_batches, weight * micro_batches as u64), 1.0);
            }
        }
        assert_eq!((factor(0, 4, 9), factor(0, 4, 0), factor(3, 4, 6)), (0.0, 0.0, 2.0));
    }
}
