//! Concatenates several data sets.

use std::ops::Range;

use zero_engine::DataError;

use super::fingerprint::DocumentFacts;
use super::records::{Columns, FileDataset, Records, SampleShape, Samples, TokenizedWhere};
use super::watch::Watch;

/// Parts of data sets. If one part has labels or position IDs, the samples of the other parts get labels or position
/// IDs too, because a batch may have samples of several parts.
struct Joined {
    parts: Vec<(FileDataset, Range<usize>)>,
    /// The index of each part's first sample, followed by the total number of samples.
    starts: Vec<usize>,
    has_labels: bool,
    has_positions: bool,
}

/// Concatenates ranges of data sets whose samples all have the same shape.
///
/// # Errors
/// Fails if the first sample of a data set cannot be read.
pub(crate) fn join(parts: Vec<(FileDataset, Range<usize>)>) -> Result<FileDataset, DataError> {
    let (mut starts, mut has_labels, mut has_positions) = (vec![0], false, false);
    for (data, range) in &parts {
        let mut samples = Samples::default();
        data.records().append(range.start, &mut samples)?;
        has_labels |= !samples.labels.is_empty();
        has_positions |= !samples.position_ids.is_empty();
        starts.push(starts[starts.len() - 1] + range.len());
    }
    Ok(FileDataset::new(Joined { parts, starts, has_labels, has_positions }))
}

impl Joined {
    /// Returns the data set of a sample, and the sample's index in it.
    fn find(&self, index: usize) -> (&dyn Records, usize) {
        let part = self.starts.partition_point(|&start| start <= index) - 1;
        let (data, range) = &self.parts[part];
        (data.records(), range.start + index - self.starts[part])
    }
}

impl Joined {
    /// Returns each data set once, even if several parts are ranges of the same data set.
    fn whole(&self) -> impl Iterator<Item = &dyn Records> {
        self.parts.iter().filter(|(_, range)| range.start == 0).map(|(data, _)| data.records())
    }
}

impl Records for Joined {
    fn samples(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    fn shape(&self) -> SampleShape {
        self.parts[0].0.shape()
    }

    fn columns(&self) -> Option<&Columns> {
        self.parts.iter().find_map(|(data, _)| data.records().columns())
    }

    fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
        if index >= self.samples() {
            return Err(DataError::Index { index, samples: self.samples() });
        }
        let (records, index) = self.find(index);
        let before = samples.targets.len();
        let (tokens, positions) = (samples.tokens.len(), samples.position_ids.len());
        records.append(index, samples)?;
        let length = samples.tokens.len() - tokens;
        if self.has_labels {
            samples.labels.extend(samples.targets.drain(before..).map(i64::from));
        }
        if self.has_positions && samples.position_ids.len() == positions {
            samples.position_ids.extend(0..length as u32);
        }
        Ok(())
    }

    fn padding(&self, index: usize) -> Result<usize, DataError> {
        let (records, index) = self.find(index);
        records.padding(index)
    }

    fn each_document(&self, visit: &mut dyn FnMut(DocumentFacts)) -> Result<(), DataError> {
        self.whole().try_for_each(|records| records.each_document(visit))
    }

    fn verify(&self, watch: &dyn Watch) -> Result<(), DataError> {
        self.whole().try_for_each(|records| records.verify(watch))
    }

    fn tokenized(&self) -> Vec<TokenizedWhere> {
        self.whole().flat_map(Records::tokenized).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_model::ops::IGNORE_INDEX;

    struct Tokens {
        first: u32,
        has_labels: bool,
    }

    impl Records for Tokens {
        fn samples(&self) -> usize {
            5
        }

        fn shape(&self) -> SampleShape {
            SampleShape::Tokens(2)
        }

        fn append(&self, index: usize, samples: &mut Samples) -> Result<(), DataError> {
            let token = self.first + index as u32;
            samples.tokens.extend([token, token]);
            match self.has_labels {
                true => {
                    samples.labels.extend([i64::from(token), IGNORE_INDEX]);
                    samples.position_ids.extend([0, 0]);
                }
                false => samples.targets.extend([token, token]),
            }
            Ok(())
        }
    }

    #[test]
    fn samples_of_several_data_sets_fit_into_one_batch() {
        let data = |first, has_labels| FileDataset::new(Tokens { first, has_labels });
        let joined = join(vec![(data(10, false), 1..3), (data(20, true), 0..5), (data(30, false), 4..5)]).unwrap();
        let mut samples = Samples::default();
        for index in [7, 0, 2, 1] {
            joined.append(index, &mut samples).unwrap();
        }
        assert_eq!(samples.tokens, [34, 34, 11, 11, 20, 20, 12, 12]);
        assert_eq!(samples.labels, [34, 34, 11, 11, 20, IGNORE_INDEX, 12, 12]);
        assert_eq!((samples.targets, samples.position_ids), (vec![], vec![0, 1, 0, 1, 0, 0, 0, 1]));
        assert!(joined.append(8, &mut Samples::default()).is_err());

        let plain = join(vec![(data(10, false), 0..5), (data(20, false), 0..5)]).unwrap();
        let mut samples = Samples::default();
        plain.append(5, &mut samples).unwrap();
        assert_eq!((samples.targets, samples.labels.len(), samples.position_ids.len()), (vec![20, 20], 0, 0));
    }
}
