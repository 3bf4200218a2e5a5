//! The data sets of `data.datasets` in a run: how many samples an epoch takes from each data set, and their positions.

use serde_json::{Value, json};
use zero_config::Share;
use zero_engine::Error;
use zero_engine::format::{counted, grouped};

use crate::data::{FileDataset, MixedPart, Mixture, apportion};

/// An opened data set of `data.datasets`.
pub(super) struct MixedSet {
    pub(super) name: String,
    /// Number of training samples.
    pub(super) samples: usize,
    pub(super) share: Share,
    pub(super) description: Option<String>,
    /// The evaluation data of the data set, if it has any.
    pub(super) eval: Option<FileDataset>,
}

/// The mixture of a run, and the names of its data sets.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Mixing {
    names: Vec<String>,
    mixture: Mixture,
    /// The position in the run at which the mixture begins. It is above 0 if an earlier part of the run had a different
    /// mixture.
    start: u64,
}

impl Mixing {
    /// Creates the mixture of these data sets.
    ///
    /// # Errors
    /// Fails if an epoch would have no samples.
    pub(super) fn new(sets: &[MixedSet]) -> Result<Self, Error> {
        let total: usize = sets.iter().map(|set| set.samples).sum();
        let weights: Vec<f64> =
            sets.iter().map(|set| if let Share::Weight(weight) = set.share { weight } else { 0.0 }).collect();
        // In the configuration, either all data sets have weights, or none of them has a weight.
        let by_weight = match weights.iter().sum::<f64>() > 0.0 {
            true => apportion(&weights, total as u64),
            false => vec![0; sets.len()],
        };
        let part = |(set, by_weight): (&MixedSet, u64)| {
            let per_epoch = match set.share {
                Share::Weight(_) => by_weight,
                Share::Repeat(passes) => (set.samples as f64 * passes).round() as u64,
                Share::Choose(samples) => samples as u64,
            };
            MixedPart { samples: set.samples as u64, per_epoch, taken: 0 }
        };
        let parts: Vec<MixedPart> = sets.iter().zip(by_weight).map(part).collect();
        if parts.iter().all(|part| part.per_epoch == 0) {
            let help = "increase `repeat`, or use `choose`";
            return Err(Error::setting("data.datasets", "an epoch would contain no samples", help));
        }
        let names = sets.iter().map(|set| set.name.clone()).collect();
        Ok(Self { names, mixture: Mixture::new(parts), start: 0 })
    }

    /// Returns the number of samples of an epoch.
    pub(super) fn per_epoch(&self) -> u64 {
        self.mixture.per_epoch()
    }

    /// Returns the index, in the joined data sets, of the sample at `position` in the run. Each epoch uses only its
    /// first `used` samples.
    pub(super) fn index(&self, seed: u64, position: u64, used: u64, shuffle: bool) -> usize {
        self.mixture.index(seed, self.drawn(position, used), shuffle)
    }

    /// Converts a position in the run to a position in the mixture.
    fn drawn(&self, position: u64, used: u64) -> u64 {
        let position = position.saturating_sub(self.start);
        position / used * self.per_epoch() + position % used
    }

    /// Describes each data set in one line.
    pub(super) fn lines(&self, sets: &[MixedSet]) -> Vec<String> {
        let all = self.per_epoch() as f64;
        let line = |(set, part): (&MixedSet, &MixedPart)| {
            let share = 100.0 * part.per_epoch as f64 / all;
            let description = set.description.as_ref().map_or(String::new(), |text| format!("; {text}"));
            format!(
                "data set {}: {}; an epoch uses {} from this data set, {share:.1} % of its samples{description}",
                set.name,
                counted(set.samples, "sample", "samples"),
                grouped(part.per_epoch),
            )
        };
        sets.iter().zip(self.mixture.parts()).map(line).collect()
    }

    /// Returns the state for checkpoints.
    pub(super) fn state(&self) -> Value {
        let set = |(name, part): (&String, &MixedPart)| json!({"name": name, "samples": part.samples, "per_epoch": part.per_epoch, "taken": part.taken});
        let sets: Vec<Value> = self.names.iter().zip(self.mixture.parts()).map(set).collect();
        json!({"start": self.start, "sets": sets})
    }

    /// Continues a run from the state of its checkpoint at `position`. If the data sets or their shares have changed, a
    /// new mixture begins at `position`, and each data set continues at its own position. Returns a message about a new
    /// mixture.
    pub(super) fn restore(&mut self, state: &Value, position: u64, used: impl Fn(u64) -> u64) -> Option<String> {
        let (names, before) = Self::read(state)?;
        let counts = |mixing: &Mixture| -> Vec<(u64, u64)> {
            mixing.parts().iter().map(|part| (part.samples, part.per_epoch)).collect()
        };
        let start = state["start"].as_u64().unwrap_or(0);
        if names == self.names && counts(&before) == counts(&self.mixture) {
            (self.mixture, self.start) = (before, start);
            return None;
        }
        let before = Self { names, mixture: before, start };
        let taken = before.mixture.taken(before.drawn(position, used(before.per_epoch())));
        let part = |(name, part): (&String, &MixedPart)| {
            let earlier = before.names.iter().position(|other| other == name).map_or(0, |index| taken[index]);
            MixedPart { taken: earlier, ..*part }
        };
        self.mixture = Mixture::new(self.names.iter().zip(self.mixture.parts()).map(part).collect());
        self.start = position;
        Some(
            "the data sets or their shares changed: a new epoch begins, and each data set continues where it stopped"
                .into(),
        )
    }

    fn read(state: &Value) -> Option<(Vec<String>, Mixture)> {
        let number = |set: &Value, key: &str| set[key].as_u64();
        let part = |set: &Value| {
            let samples = number(set, "samples")?.max(1);
            Some(MixedPart { samples, per_epoch: number(set, "per_epoch")?, taken: number(set, "taken")? })
        };
        let sets = state["sets"].as_array()?;
        let parts = sets.iter().map(part).collect::<Option<Vec<_>>>()?;
        let names = sets.iter().map(|set| set["name"].as_str().map(String::from)).collect::<Option<Vec<_>>>()?;
        parts.iter().any(|part| part.per_epoch > 0).then(|| (names, Mixture::new(parts)))
    }
}

#[cfg(test)]
mod tests;
