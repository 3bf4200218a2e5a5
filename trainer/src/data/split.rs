//! Splits a data set into training and evaluation data.

use std::{ops::Range, sync::Arc};

use super::dataset::{BoxError, Dataset};
use super::order::sample_index;
use zero_engine::{Batch, DataError};

/// Splits a data set into training data and evaluation data. The evaluation data are the last `eval_fraction` of the
/// samples, rounded to whole samples, and at least one sample. [`shuffled_split`] takes random samples instead.
///
/// # Errors
/// Fails if the fraction is not between 0 and 1, or if no sample would be left to train on.
pub fn split<D: Dataset>(dataset: D, eval_fraction: f64) -> Result<(Subset<D>, Subset<D>), DataError> {
    parts(dataset, eval_fraction, None)
}

/// Splits a data set as [`split`] does, but the evaluation data are random samples. The same seed gives the same parts.
///
/// # Errors
/// Fails if the fraction is not between 0 and 1, or if no sample would be left to train on.
pub fn shuffled_split<D: Dataset>(
    dataset: D,
    eval_fraction: f64,
    seed: u64,
) -> Result<(Subset<D>, Subset<D>), DataError> {
    parts(dataset, eval_fraction, Some(seed))
}

fn parts<D: Dataset>(dataset: D, eval_fraction: f64, seed: Option<u64>) -> Result<(Subset<D>, Subset<D>), DataError> {
    let samples = dataset.len();
    let eval = ((samples as f64 * eval_fraction).round() as usize).max(1);
    if !(eval_fraction > 0.0 && eval_fraction < 1.0) || eval >= samples {
        return Err(DataError::Split { samples, eval_fraction });
    }
    let (dataset, cut) = (Arc::new(dataset), samples - eval);
    let part = |range| Subset { dataset: Arc::clone(&dataset), range, seed };
    Ok((part(0..cut), part(cut..samples)))
}

/// A part of a data set; see [`split`] and [`shuffled_split`].
#[derive(Debug)]
pub struct Subset<D> {
    dataset: Arc<D>,
    /// The samples' positions in the data set's order, or in the order that `seed` determines.
    range: Range<usize>,
    seed: Option<u64>,
}

impl<D: Dataset> Subset<D> {
    /// Returns the index in the whole data set.
    fn index(&self, index: usize) -> usize {
        let position = self.range.start + index;
        self.seed.map_or(position, |seed| sample_index(seed, position as u64, self.dataset.len(), true))
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    fn len(&self) -> usize {
        self.range.len()
    }

    fn batch(&self, indices: &[usize]) -> Result<Batch, BoxError> {
        if let Some(&index) = indices.iter().find(|&&index| index >= self.range.len()) {
            return Err(DataError::Index { index, samples: self.range.len() }.into());
        }
        let moved: Vec<usize> = indices.iter().map(|&index| self.index(index)).collect();
        self.dataset.batch(&moved)
    }

    fn tokens_per_sample(&self) -> usize {
        self.dataset.tokens_per_sample()
    }

    fn length(&self, index: usize) -> Result<usize, BoxError> {
        self.dataset.length(self.index(index))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::in_memory::from_fn;
    use super::*;

    /// Sample i has the target i.
    fn counting(samples: usize) -> impl Dataset {
        from_fn(samples, |i| {
            let i = Tensor::new(i as u32, &Device::Cpu)?;
            Ok((i.clone(), i))
        })
    }

    fn all(dataset: &dyn Dataset) -> Vec<u32> {
        let indices: Vec<usize> = (0..dataset.len()).collect();
        dataset.batch(&indices).unwrap().only_target().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn the_last_samples_are_held_out_for_evaluation() {
        let (train, eval) = split(counting(10), 0.2).unwrap();
        assert_eq!((all(&train), all(&eval)), ((0..8).collect(), vec![8, 9]));
        assert_eq!(train.batch(&[8]).unwrap_err().to_string(), "sample 8 is out of range: the data set has 8 samples");
        let (train, eval) = split(counting(10), 0.001).unwrap();
        assert_eq!((train.len(), eval.len()), (9, 1));
    }

    #[test]
    fn a_shuffled_split_holds_each_sample_once() {
        let parts = |seed| {
            let (train, eval) = shuffled_split(counting(100), 0.2, seed).unwrap();
            [all(&train), all(&eval)]
        };
        let [train, eval] = parts(3);
        let mut both = [train, eval.clone()].concat();
        both.sort_unstable();
        assert_eq!(both, (0..100).collect::<Vec<_>>());
        let early = eval.iter().filter(|&&sample| sample < 50).count();
        assert!(eval.len() == 20 && (4..=16).contains(&early), "{eval:?}");
        assert_eq!(parts(3)[1], eval);
        assert_ne!(parts(4)[1], eval);
    }

    #[test]
    fn a_split_that_leaves_nothing_is_an_error() {
        for (samples, fraction) in [(10, 0.0), (10, 1.0), (10, -0.1), (10, f64::NAN), (10, 0.96), (1, 0.1)] {
            assert!(matches!(split(counting(samples), fraction), Err(DataError::Split { .. })), "{fraction}");
        }
    }
}
