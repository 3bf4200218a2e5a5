//! Setting samples aside for evaluation.

use std::{ops::Range, sync::Arc};

use super::dataset::{Dataset, SampleShape, Samples};
use zero_engine::DataError;

/// Cuts a dataset in two: what to train on, and the last `eval_fraction` of the samples to evaluate on, rounded to
/// whole samples but at least one. With a fraction of 0 there is no second part.
///
/// # Errors
/// The fraction is not in 0..1, or nothing would be left to train on.
#[expect(clippy::type_complexity, reason = "a pair of datasets, of which one may be missing")]
pub fn split(
    dataset: Arc<dyn Dataset>,
    eval_fraction: f64,
) -> Result<(Arc<dyn Dataset>, Option<Arc<dyn Dataset>>), DataError> {
    if eval_fraction == 0.0 {
        return Ok((dataset, None));
    }
    let samples = dataset.samples();
    let eval = ((samples as f64 * eval_fraction).round() as usize).max(1);
    if !(0.0..1.0).contains(&eval_fraction) || eval >= samples {
        return Err(DataError::Split { samples, eval_fraction });
    }
    let part = |range| Arc::new(Part { dataset: Arc::clone(&dataset), range });
    let cut = samples - eval;
    Ok((part(0..cut), Some(part(cut..samples))))
}

struct Part {
    dataset: Arc<dyn Dataset>,
    range: Range<usize>,
}

impl Dataset for Part {
    fn samples(&self) -> usize {
        self.range.len()
    }

    fn shape(&self) -> SampleShape {
        self.dataset.shape()
    }

    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
        if index >= self.range.len() {
            return Err(DataError::Index { index, samples: self.range.len() });
        }
        self.dataset.append(self.range.start + index, samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sample i has the one target i.
    struct Counting(usize);

    impl Dataset for Counting {
        fn samples(&self) -> usize {
            self.0
        }
        fn shape(&self) -> SampleShape {
            SampleShape::Features(0)
        }
        fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
            samples.targets.push(index as u32);
            Ok(())
        }
    }

    fn all(dataset: &dyn Dataset) -> Vec<u32> {
        let mut samples = Samples::default();
        (0..dataset.samples()).for_each(|i| dataset.append(i, &mut samples).unwrap());
        samples.targets
    }

    #[test]
    fn the_end_is_set_aside() {
        let (train, eval) = split(Arc::new(Counting(10)), 0.2).unwrap();
        let eval = eval.unwrap();
        assert_eq!((all(&*train), all(&*eval)), ((0..8).collect(), vec![8, 9]));
        assert!(matches!(train.append(8, &mut Samples::default()), Err(DataError::Index { index: 8, samples: 8 })));

        let (train, eval) = split(Arc::new(Counting(10)), 0.001).unwrap();
        assert_eq!((train.samples(), eval.unwrap().samples()), (9, 1));
        let (train, eval) = split(Arc::new(Counting(10)), 0.0).unwrap();
        assert!(train.samples() == 10 && eval.is_none());
    }

    #[test]
    fn a_split_that_leaves_nothing_is_an_error() {
        for (samples, fraction) in [(10, 1.0), (10, -0.1), (10, f64::NAN), (10, 0.96), (1, 0.1)] {
            assert!(matches!(split(Arc::new(Counting(samples)), fraction), Err(DataError::Split { .. })), "{fraction}");
        }
    }
}
