//! Prepares, counts and verifies the data of a configuration: the commands `zero-train data prepare`, `stats` and
//! `verify`.

use std::collections::HashSet;

use zero_config::Config;
use zero_engine::{DataError, Error};

use crate::data::{Dataset, DocumentFacts, FileDataset, SampleShape, Watch};
use crate::process::signals::Requests;
use crate::train::configured_data;
use crate::train::output::preparing::Preparing;

/// The result of preparing a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedData {
    /// `training data` or `evaluation data`.
    pub name: &'static str,
    /// Number of files that this call tokenized into the cache.
    pub new: usize,
    /// Number of files that were already in the cache.
    pub cached: usize,
    /// Number of files that each run tokenizes in memory, because all files together are small.
    pub in_memory: usize,
    /// Number of documents in all these files. A conversation counts as one document, and so does an answer with its
    /// prompt.
    pub documents: u64,
    /// Number of tokens in all these files, including the separators between documents.
    pub tokens: u64,
}

/// Statistics of a data set.
#[derive(Debug, Clone, PartialEq)]
pub struct DataStats {
    /// `training data` or `evaluation data`.
    pub name: &'static str,
    /// Number of samples.
    pub samples: usize,
    /// Number of tokens per sample. `None` for tables.
    pub tokens_per_sample: Option<usize>,
    /// Lengths of the documents in tokens. `None` for token files and tables, which have no documents. An answer with
    /// its prompt counts as a document.
    pub documents: Option<Lengths>,
    /// Number of documents with the same tokens as an earlier document.
    pub duplicates: u64,
    /// Share of positions that are padding.
    pub padding: f64,
    /// Describes how many samples are truncated, padded or dropped. `None` if there is nothing to describe.
    pub description: Option<String>,
}

/// Statistics of the lengths of documents, in tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Lengths {
    /// Number of documents.
    pub count: u64,
    /// Sum of the lengths.
    pub sum: u64,
    /// The smallest length.
    pub min: u64,
    /// The median. If there are two middle lengths, the smaller of them.
    pub median: u64,
    /// The 99th percentile.
    pub p99: u64,
    /// The largest length.
    pub max: u64,
}

/// Opens the data of a configuration, which fills the token cache. Does not build the model.
///
/// SIGINT and SIGTERM stop the work before the next group of documents. No unfinished files stay in the cache.
///
/// # Errors
/// Fails if the data cannot be opened. Returns [`Error::Interrupted`] after a signal.
pub fn prepare_data(config: &Config) -> Result<Vec<PreparedData>, Error> {
    let prepared = |(name, data): (&'static str, Data)| {
        let files = match data {
            Data::Files(data) => data.records().tokenized(),
            Data::Pairs(pairs) => pairs.tokenized(),
        };
        let count = |is_cached, is_new| {
            files.iter().filter(|file| (file.is_cached, file.is_new) == (is_cached, is_new)).count()
        };
        PreparedData {
            name,
            new: count(true, true),
            cached: count(true, false),
            in_memory: count(false, true),
            documents: files.iter().map(|file| file.documents).sum(),
            tokens: files.iter().map(|file| file.tokens).sum(),
        }
    };
    let requests = Requests::of_command();
    Ok(opened(config, &requests)?.into_iter().map(prepared).collect())
}

/// Counts the documents, tokens and samples of a configuration's data.
///
/// # Errors
/// Fails if the data cannot be opened or read. Returns [`Error::Interrupted`] after a signal.
pub fn data_stats(config: &Config) -> Result<Vec<DataStats>, Error> {
    let stats = |(name, data): (&'static str, Data)| {
        let (mut lengths, mut seen, mut duplicates) = (vec![], HashSet::new(), 0);
        let mut visit = |document: DocumentFacts| {
            lengths.push(document.tokens);
            duplicates += u64::from(!seen.insert(document.hash));
        };
        let (samples, tokens_per_sample, padding, description) = match &data {
            Data::Files(data) => {
                data.records().each_document(&mut visit)?;
                let tokens = match data.shape() {
                    SampleShape::Tokens(length) => Some(length),
                    SampleShape::Features(_) => None,
                };
                let padding: usize = (0..data.len()).map(|index| data.padding(index)).sum::<Result<_, _>>()?;
                (data.len(), tokens, padding, data.description())
            }
            Data::Pairs(pairs) => {
                pairs.each_document(&mut visit)?;
                let lengths = |pair| Ok(pairs.lengths(pair)?.iter().sum::<usize>());
                let used: usize = (0..pairs.len()).map(lengths).sum::<Result<_, DataError>>()?;
                let length = pairs.tokens_per_sample();
                (pairs.len(), Some(length), pairs.len() * length - used, Some(pairs.description()))
            }
        };
        let positions = samples * tokens_per_sample.unwrap_or(1);
        let padding = padding as f64 / positions.max(1) as f64;
        let documents = Lengths::of(lengths);
        Ok(DataStats { name, samples, tokens_per_sample, documents, duplicates, padding, description })
    };
    let requests = Requests::of_command();
    let opened = opened(config, &requests)?;
    requests.end_at_once();
    opened.into_iter().map(stats).collect()
}

/// Reads and checks all data of a configuration. Returns the name and the number of samples of each data set.
///
/// # Errors
/// Fails at the first problem and reports its position. Returns [`Error::Interrupted`] after a signal.
pub fn verify_data(config: &Config) -> Result<Vec<(&'static str, usize)>, Error> {
    let requests = Requests::of_command();
    let watch = Preparing::of_command(&requests);
    let verified = |(name, data): (&'static str, Data)| match data {
        Data::Files(data) => {
            data.records().verify(&watch).map_err(|error| interrupted(error.into(), &requests))?;
            Ok((name, data.len()))
        }
        Data::Pairs(pairs) => {
            pairs.verify(&watch).map_err(|error| interrupted(error.into(), &requests))?;
            Ok((name, pairs.len()))
        }
    };
    opened(config, &requests)?.into_iter().map(verified).collect()
}

enum Data {
    Files(FileDataset),
    Pairs(std::sync::Arc<crate::data::PairDataset>),
}

/// Opens the training data and, if configured, the evaluation data.
fn opened(config: &Config, requests: &Requests) -> Result<Vec<(&'static str, Data)>, Error> {
    let watch = Preparing::of_command(requests);
    // Opening tables does not check for signals, so signals are checked afterwards.
    let opened = open(config, &watch).and_then(|opened| watch.goes_on().map(|()| opened).map_err(Error::from));
    opened.map_err(|error| interrupted(error, requests))
}

/// Replaces the error of a stopped preparation by an error that names the signal.
fn interrupted(error: Error, requests: &Requests) -> Error {
    match error {
        Error::Data(DataError::Stopped) => Error::Interrupted { signal: requests.stop() as i32 },
        error => error,
    }
}

fn open(config: &Config, watch: &dyn Watch) -> Result<Vec<(&'static str, Data)>, Error> {
    let has_own_model = config.model.is_none();
    let (train, eval) = match &config.preference {
        Some(preference) => {
            let opened = configured_data::pairs(config, preference, has_own_model, watch)?;
            (Data::Pairs(opened.train), opened.eval.map(Data::Pairs))
        }
        None => {
            let opened = configured_data::files(config, has_own_model, watch)?;
            (Data::Files(opened.train), opened.eval.map(Data::Files))
        }
    };
    Ok([Some(("training data", train)), eval.map(|eval| ("evaluation data", eval))].into_iter().flatten().collect())
}

impl Lengths {
    fn of(mut lengths: Vec<u64>) -> Option<Self> {
        lengths.sort_unstable();
        let (&min, &max) = (lengths.first()?, lengths.last()?);
        let median = lengths[(lengths.len() - 1) / 2];
        let p99 = lengths[(lengths.len() * 99).div_ceil(100) - 1];
        Some(Self { count: lengths.len() as u64, sum: lengths.iter().sum(), min, median, p99, max })
    }

    /// Returns the mean length.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.count as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn length_statistics_are_exact() {
        assert_eq!(Lengths::of(vec![]), None);
        let lengths = Lengths::of((1..=200).rev().collect()).unwrap();
        let expected = Lengths { count: 200, sum: 20_100, min: 1, median: 100, p99: 198, max: 200 };
        assert_eq!((lengths.mean(), lengths), (100.5, expected));
        let one = Lengths::of(vec![7]).unwrap();
        assert_eq!((one.min, one.median, one.p99, one.max), (7, 7, 7, 7));
    }

    /// Tests the statistics of data in memory and in the cache. One file is large, because the minimum size for the
    /// cache cannot be configured.
    #[test]
    fn documents_are_counted_in_memory_and_in_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let line = |i: usize| format!("{{\"text\": \"{}\"}}\n", "ab".repeat(1 + i % 50));
        let small: String = (0..100).map(line).collect();
        std::fs::write(path("small.jsonl"), &small).unwrap();
        let large: String = (0..100_000).map(line).collect();
        std::fs::write(path("large.jsonl"), large + "{\"text\": \"once\"}").unwrap();
        let config = |name: &str| {
            let (data, cache) = (path(name), path("cache"));
            let text = format!("train_batch_size: 1\ndata: {{train: {data}, sequence_length: 10, cache_dir: {cache}}}");
            Config::parse("ds.yaml", text).unwrap()
        };
        let [stats] = &data_stats(&config("small.jsonl")).unwrap()[..] else { panic!("one data set") };
        let lengths = Lengths { count: 100, sum: 5100, min: 2, median: 50, p99: 100, max: 100 };
        // 99 newlines separate the documents.
        assert_eq!((stats.documents.clone(), stats.duplicates, stats.samples), (Some(lengths), 50, 5198 / 10));
        assert!(!folder.path().join("cache").exists());
        let [stats] = &data_stats(&config("large.jsonl")).unwrap()[..] else { panic!("one data set") };
        let lengths = Lengths { count: 100_001, sum: 5_100_004, min: 2, median: 50, p99: 100, max: 100 };
        assert_eq!((stats.documents.clone(), stats.duplicates), (Some(lengths), 99_950));

        let prepared = prepare_data(&config("large.jsonl")).unwrap();
        let expected = PreparedData {
            name: "training data",
            new: 0,
            cached: 1,
            in_memory: 0,
            documents: 100_001,
            tokens: 5_100_004 + 100_000,
        };
        assert_eq!(prepared, [expected]);
        assert_eq!(verify_data(&config("large.jsonl")).unwrap(), [("training data", 520_000)]);
        let mut entries =
            std::fs::read_dir(folder.path().join("cache/tokens")).unwrap().map(|entry| entry.unwrap().path());
        let entry = entries.find(|path| !path.ends_with(".lock")).unwrap();
        let mut bytes = std::fs::read(&entry).unwrap();
        bytes[3 << 20] ^= 1;
        std::fs::write(&entry, bytes).unwrap();
        let error = verify_data(&config("large.jsonl")).unwrap_err().to_string();
        assert!(error.contains("byte 3145728: the cached tokens are damaged"), "{error}");
        assert_eq!(prepare_data(&config("large.jsonl")).unwrap()[0].new, 1);
        verify_data(&config("large.jsonl")).unwrap();
    }
}
