//! `data.datasets`: several data sets, and how many samples of each an epoch has. Keys have mosaicml-streaming's names.

use serde::Serialize;

use crate::choice::Choice as _;
use crate::config::{Data, DataFormat, SplitPart};
use crate::errors::ErrorKind;
use crate::path::{item_path, last};
use crate::read::reader::{Find, Reader, Resolver};
use crate::schema::*;
use crate::table::section;

/// Returns the path of a key of the data set with that index.
fn path(index: usize, key: &'static str) -> String {
    item_path(Data::datasets, index, key)
}

section! {
    /// A data set of `data.datasets`.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct MixedDataset(keys) in "data.datasets" {
        pub name: Option<String> = key(Kind::Path, "= its position in the list, from 0", "Name of the data set in messages and of its loss in evaluations");
        pub path: Vec<String> = key(Kind::Paths, REQUIRED, "File, glob, or list of them, as in data.train");
        pub split: Option<String> = key(Kind::Text, "= all files", "Split of the folder or repository in path, found in the same way as in Hugging Face's `datasets`, or slices of splits: `train`, `train[:90%]`, `train[1000:2000]`, `train+validation`");
        pub format: Option<DataFormat> = key(DataFormat::KIND, "= data.format", "How these files are read");
        pub text_key: Option<String> = key(Kind::Text, "= data.text_key", "Field of a JSON line that holds the text");
        pub eval: Option<Vec<String>> = key(Kind::Paths, "null", "Evaluation data, in the same form as path");
        pub weight: Option<f64> = key(NON_NEGATIVE, "null", "Share of an epoch, relative to the weights of the other data sets; an epoch has as many samples as all data sets together");
        pub proportion: Option<f64> = key(RATIO, "null", "Share of an epoch; the proportions of all data sets must add up to 1");
        pub repeat: Option<f64> = key(POSITIVE, "null", "Number of times that an epoch uses each sample of this data set; 0.5: half of the samples. 1 if none of `weight`, `proportion`, `repeat` and `choose` is set");
        pub choose: Option<usize> = key(COUNT, "null", "Number of samples of this data set in an epoch");
    }
}

impl Find for Vec<MixedDataset> {
    fn find(keys: &mut Reader<'_, '_>, name: &'static str) -> Option<Self> {
        keys.list(name, MixedDataset::of)
    }
}

/// The number of samples of a data set in an epoch, as written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Share {
    /// A share of the epoch, relative to the shares of the other data sets.
    Weight(f64),
    /// The number of passes over its own samples.
    Repeat(f64),
    /// The number of samples.
    Choose(usize),
}

impl MixedDataset {
    /// Returns the share as written; one pass if no share is written.
    pub fn share(&self) -> Share {
        match (self.weight.or(self.proportion), self.choose) {
            (Some(weight), _) => Share::Weight(weight),
            (None, Some(samples)) => Share::Choose(samples),
            (None, None) => Share::Repeat(self.repeat.unwrap_or(1.0)),
        }
    }

    /// Returns the format of each data set, or `otherwise` for a data set without a format.
    pub(crate) fn formats(sets: Option<&Vec<Self>>, otherwise: DataFormat) -> Vec<DataFormat> {
        sets.map_or(vec![otherwise], |sets| sets.iter().map(|set| set.format.unwrap_or(otherwise)).collect())
    }

    /// Checks the data sets against each other and against the other keys of `data`.
    pub(crate) fn check(data: &Data, resolver: &mut Resolver<'_>) {
        let Some(sets) = &data.datasets else {
            let is_wrong = [Data::train, Data::datasets].iter().any(|path| resolver.report.is_poisoned(path))
                || resolver.has_section(Data::datasets);
            if data.train.is_none() && !is_wrong {
                let message = format!("`{}` is missing", Data::train);
                let help = format!("set it to a path, a glob, or a list of them, or set `{}`", Data::datasets);
                let at = resolver.at(Data::PATH);
                resolver.report.error(ErrorKind::Missing, Data::train, at, message, Some(help));
            }
            return;
        };
        if data.train.is_some() {
            let message = format!("`{}` and `{}` both set the training data", Data::train, Data::datasets);
            resolver.contradiction(&[Data::train, Data::datasets], message, Some("keep one of the two".to_string()));
        }
        Self::check_names(sets, resolver);
        Self::check_splits(sets, resolver);
        Self::check_shares(sets, resolver);
        Self::check_evaluation(sets, data, resolver);
    }

    /// Checks that the names of the data sets are unique.
    fn check_names(sets: &[Self], resolver: &mut Resolver<'_>) {
        let names: Vec<String> = sets.iter().enumerate().map(|(index, set)| set.name_at(index)).collect();
        for (index, name) in names.iter().enumerate() {
            if !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                let message = format!("`{name}` is not a valid data set name");
                let place = path(index, Self::name);
                resolver.contradiction(&[&place], message, Some("use letters, digits and `_`".into()));
            }
            if let Some(first) = names[..index].iter().position(|other| other == name) {
                let places = [first, index].map(|index| path(index, Self::name));
                let message = format!("two data sets have the name `{name}`");
                resolver.contradiction(&[&places[0], &places[1]], message, Some("give each its own name".into()));
            }
        }
    }

    /// Checks the notation of splits.
    fn check_splits(sets: &[Self], resolver: &mut Resolver<'_>) {
        for (index, set) in sets.iter().enumerate() {
            if let Some(Err(problem)) = set.split.as_deref().map(SplitPart::parse) {
                resolver.contradiction(&[&path(index, Self::split)], problem, None);
            }
        }
    }

    /// Returns the slices of `split`; empty if the key is not given and all files are read.
    pub fn split_parts(&self) -> Vec<SplitPart> {
        self.split.as_deref().map_or(vec![], |split| SplitPart::parse(split).unwrap_or_default())
    }

    /// Checks that all data sets give their shares with the same key, and that the shares add up to an epoch.
    fn check_shares(sets: &[Self], resolver: &mut Resolver<'_>) {
        let keys = [Self::weight, Self::proportion, Self::repeat, Self::choose];
        let written =
            |set: &Self| [set.weight.is_some(), set.proportion.is_some(), set.repeat.is_some(), set.choose.is_some()];
        let of = |set: &Self| keys.into_iter().zip(written(set)).filter(|(_, is)| *is).map(|(key, _)| key);
        for (index, set) in sets.iter().enumerate() {
            if let [one, other, ..] = of(set).collect::<Vec<_>>()[..] {
                let message =
                    format!("`{}` and `{}` both set the data set's share of an epoch", last(one), last(other));
                let places = [path(index, one), path(index, other)];
                resolver.contradiction(&[&places[0], &places[1]], message, Some("keep one of the two".into()));
            }
        }
        // Weights and proportions divide one epoch among all data sets, so each data set needs one.
        for (key, help) in
            [(Self::weight, "give each data set a weight"), (Self::proportion, "give each data set a proportion")]
        {
            let have = |set: &Self| of(set).any(|other| other == key);
            if let (Some(with), Some(without)) = (sets.iter().position(have), sets.iter().position(|set| !have(set))) {
                let name = last(key);
                let message = format!(
                    "`{name}` is set for data set `{}` but not for `{}`",
                    sets[with].name_at(with),
                    sets[without].name_at(without)
                );
                let place = path(with, key);
                resolver.contradiction(&[&place], message, Some(help.to_string()));
            }
        }
        let proportions: Vec<f64> = sets.iter().filter_map(|set| set.proportion).collect();
        let sum: f64 = proportions.iter().sum();
        if proportions.len() == sets.len() && (sum - 1.0).abs() > 1e-6 {
            let message = format!("the proportions add up to {sum}");
            let help = Some("make the proportions add up to 1, or use weights, which are relative".to_string());
            resolver.contradiction(&[Data::datasets], message, help);
        }
        let weights: Vec<f64> = sets.iter().filter_map(|set| set.weight).collect();
        if weights.len() == sets.len() && weights.iter().sum::<f64>() == 0.0 {
            let message = "all weights are 0".to_string();
            resolver.contradiction(
                &[Data::datasets],
                message,
                Some("give at least one data set a weight above 0".into()),
            );
        }
    }

    /// Checks that only one key gives the evaluation data.
    fn check_evaluation(sets: &[Self], data: &Data, resolver: &mut Resolver<'_>) {
        if let Some(index) = sets.iter().position(|set| set.eval.is_some()) {
            let own = path(index, Self::eval);
            for (other, is_written) in
                [(Data::eval, data.eval.is_some()), (Data::eval_fraction, data.eval_fraction > 0.0)]
            {
                if is_written {
                    let message = format!("`{own}` and `{other}` both set the evaluation data");
                    resolver.contradiction(&[&own, other], message, Some("keep one of the two".into()));
                }
            }
        }
    }

    /// Returns the name of the data set at that index.
    pub fn name_at(&self, index: usize) -> String {
        self.name.clone().unwrap_or_else(|| index.to_string())
    }
}
