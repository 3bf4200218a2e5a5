//! Opens the data sets of `data.datasets`.

use std::ops::Range;

use zero_config as config;
use zero_engine::Error;

use super::{Opened, Set, Sources, sets};
use crate::data::{self, DataError, DataOptions, Dataset, FileDataset, Tokenizer, Watch};
use crate::train::mixing::MixedSet;

impl Sources<'_> {
    /// Opens the data sets of `data.datasets`.
    pub(super) fn open_mixed(
        self,
        mixed: &[config::MixedDataset],
        watch: &dyn Watch,
    ) -> Result<Opened<FileDataset>, Error> {
        let open = |options: &DataOptions, tokenizer: &Tokenizer| data::open_watched(options, tokenizer, watch);
        let (data, fraction) = (self.data, self.data.eval_fraction);
        let (mut train, mut eval, mut opened): (Vec<(FileDataset, Range<usize>)>, Vec<_>, Vec<_>) = Default::default();
        let all = |data: FileDataset| {
            let samples = data.len();
            (data, 0..samples)
        };
        for (index, (set, written)) in sets(data).iter().zip(mixed).enumerate() {
            let own = self.open_splits(set, open)?;
            let cut = match fraction > 0.0 {
                true => data::split(own.clone(), fraction)?.0.len(),
                false => own.len(),
            };
            let evaluated = match &written.eval {
                Some(sources) => {
                    let key = format!("data.datasets.{index}.eval");
                    Some(all(self.open((&key, sources), set, None, open)?))
                }
                None => (cut < own.len()).then(|| (own.clone(), cut..own.len())),
            };
            let (name, share, description) = (written.name_at(index), written.share(), own.description());
            train.push((own, 0..cut));
            for (other, _) in train.last().into_iter().chain(&evaluated) {
                fits_first(&set.key, other, &train[0].0)?;
            }
            let part = evaluated.clone().map(|part| data::join(vec![part])).transpose()?;
            opened.push(MixedSet { name, samples: cut, share, description, eval: part });
            eval.extend(evaluated);
        }
        if let Some(sources) = &data.eval {
            let (format, text_key) = (data.format, data.text_key.as_str());
            let set = Set { key: String::new(), sources, splits: vec![], format, text_key };
            let own = self.open(("data.eval", sources), &set, None, open)?;
            fits_first("data.eval", &own, &train[0].0)?;
            eval.push(all(own));
        }
        let eval = (!eval.is_empty()).then(|| data::join(eval)).transpose()?;
        let (tokenizer, vocabulary) = (self.tokenizer, self.vocabulary);
        Ok(Opened { train: data::join(train)?, eval, sets: opened, tokenizer, vocabulary })
    }
}

impl Sources<'_> {
    /// Opens the files of a data set, or concatenates its slices of splits.
    fn open_splits(
        &self,
        set: &Set<'_>,
        open: impl Fn(&DataOptions, &Tokenizer) -> Result<FileDataset, DataError>,
    ) -> Result<FileDataset, Error> {
        let part = |split| self.open((&set.key, set.sources), set, split, &open);
        if let [] | [_] = set.splits[..] {
            return part(set.splits.first());
        }
        let parts = set.splits.iter().map(|split| {
            let data = part(Some(split))?;
            let samples = data.len();
            Ok::<_, Error>((data, 0..samples))
        });
        Ok(data::join(parts.collect::<Result<_, _>>()?)?)
    }
}

/// Fails if the samples of a data set cannot be in the same batch as those of the first data set.
/// Tables must also have the same columns.
pub(super) fn fits_first(key: &str, data: &FileDataset, first: &FileDataset) -> Result<(), Error> {
    data.same_columns(first)?;
    match (data.shape(), first.shape()) {
        (shape, expected) if shape == expected => Ok(()),
        (shape, expected) => Err(Error::setting(
            key,
            format!("the samples of this data set are {shape:?}, but those of the first data set are {expected:?}"),
            "use data sets whose samples have the same shape",
        )),
    }
}
