//! Draws the next token from logits. Supports temperature, top-k, top-p, min-p and a repetition penalty, with the
//! names, the order and the rules of transformers.

use zero_engine::Error;

/// Selects how the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The logits are divided by this value. With 0, the most likely token is always chosen, and of equally likely
    /// tokens the one with the smallest ID.
    pub temperature: f64,
    /// Draws only from the `top_k` most likely tokens. Tokens that are as likely as the least likely of these are
    /// included.
    pub top_k: Option<usize>,
    /// Draws only from the most likely tokens: the fewest whose probabilities sum to at least this value.
    pub top_p: Option<f64>,
    /// Draws only from tokens whose probability is at least this fraction of the largest probability.
    pub min_p: Option<f64>,
    /// For all tokens in the prompt and in the text so far, positive logits are divided by this value and negative
    /// logits are multiplied by it. 1 has no effect.
    pub repetition_penalty: f64,
}

impl Default for Sampling {
    /// Returns greedy decoding.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: None, min_p: None, repetition_penalty: 1.0 }
    }
}

impl Sampling {
    /// Checks the ranges of all values.
    ///
    /// # Errors
    /// Fails for the first value that is out of range or has no effect.
    pub fn check(&self) -> Result<(), Error> {
        let fraction = |value: Option<f64>, key, zero: bool| match value {
            Some(value) if !(value <= 1.0 && (value > 0.0 || zero && value == 0.0)) => {
                let help = if zero { "use a number from 0 to 1" } else { "use a number above 0 and at most 1" };
                Err(Error::setting(key, format!("{value} is out of range"), help))
            }
            _ => Ok(()),
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            let message = format!("{} is not a valid temperature", self.temperature);
            return Err(Error::setting("--temperature", message, "use 0 for greedy decoding, or a positive number"));
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            let message = format!("{} is not a positive number", self.repetition_penalty);
            return Err(Error::setting("--repetition-penalty", message, "use 1 for no penalty"));
        }
        if self.top_k == Some(0) {
            return Err(Error::setting("--top-k", "0 leaves no token to sample", "use at least 1, or omit the option"));
        }
        fraction(self.top_p, "--top-p", false)?;
        fraction(self.min_p, "--min-p", true)?;
        let filters =
            [("--top-k", self.top_k.is_some()), ("--top-p", self.top_p.is_some()), ("--min-p", self.min_p.is_some())];
        match filters.into_iter().find(|(_, is_set)| *is_set && self.temperature == 0.0) {
            Some((key, _)) => {
                let message = "the option has no effect at temperature 0, which always chooses the most likely token";
                Err(Error::setting(key, message, "set --temperature to a positive number, such as 1"))
            }
            None => Ok(()),
        }
    }

    /// Returns the next token, at quantile `uniform` of the distribution. `seen` are the tokens of the prompt and the
    /// text so far.
    pub(crate) fn next(&self, logits: &mut [f32], seen: &[u32], uniform: f32) -> u32 {
        self.penalize(logits, seen);
        if self.temperature <= 0.0 {
            return most_likely(logits);
        }
        let mut candidates = self.candidates(logits);
        let total: f64 = candidates.all.iter().map(|&(logit, _)| candidates.weight(logit)).sum();
        let mut left = f64::from(uniform) * total;
        for index in 0..candidates.all.len() {
            let (logit, token) = candidates.at(index);
            left -= candidates.weight(logit);
            if left < 0.0 {
                return token;
            }
        }
        candidates.all.last().map_or(0, |&(_, token)| token)
    }

    /// Returns the probability of each token.
    #[cfg(test)]
    pub(super) fn probabilities(&self, logits: &[f32], seen: &[u32]) -> Vec<f64> {
        let mut logits = logits.to_vec();
        self.penalize(&mut logits, seen);
        let candidates = self.candidates(&logits);
        let total: f64 = candidates.all.iter().map(|&(logit, _)| candidates.weight(logit)).sum();
        let mut all = vec![0.0; logits.len()];
        for &(logit, token) in &candidates.all {
            all[token as usize] = candidates.weight(logit) / total;
        }
        all
    }

    fn penalize(&self, logits: &mut [f32], seen: &[u32]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let penalty = self.repetition_penalty as f32;
        let mut seen = seen.to_vec();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
    }

    /// Returns the tokens that remain after all filters.
    fn candidates(&self, logits: &[f32]) -> Candidates {
        let all: Vec<(f32, u32)> = logits.iter().zip(0..).map(|(&logit, token)| (logit, token)).collect();
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut candidates = Candidates { all, sorted: 0, largest, temperature: self.temperature };
        if let Some(k) = self.top_k.filter(|&k| k < candidates.all.len()) {
            let (least, _) = candidates.at(k - 1);
            candidates.retain(|logit| logit >= least);
        }
        if let Some(p) = self.top_p {
            let total: f64 = candidates.all.iter().map(|&(logit, _)| candidates.weight(logit)).sum();
            let (mut before, mut kept) = (0.0, 0);
            while kept < candidates.all.len() && before < p * total {
                let (logit, _) = candidates.at(kept);
                before += candidates.weight(logit);
                kept += 1;
            }
            candidates.all.truncate(kept.max(1));
        }
        if let Some(p) = self.min_p {
            // The most likely token has the weight 1.
            let (largest, temperature) = (candidates.largest, self.temperature);
            candidates.retain(|logit| weight(logit, largest, temperature) >= p);
        }
        candidates
    }
}

/// Returns the index of the largest logit, or the first such index.
fn most_likely(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] || logits[best].is_nan() {
            best = token;
        }
    }
    best as u32
}

/// Returns e^((logit − largest) / temperature).
fn weight(logit: f32, largest: f32, temperature: f64) -> f64 {
    ((f64::from(logit) - f64::from(largest)) / temperature).exp()
}

/// Logits and tokens. The first `sorted` items are the most likely tokens, in order. Sorting is incremental, because a
/// draw usually needs few tokens, and sorting the whole vocabulary would take a tenth of a small model's time.
struct Candidates {
    all: Vec<(f32, u32)>,
    sorted: usize,
    largest: f32,
    temperature: f64,
}

impl Candidates {
    fn weight(&self, logit: f32) -> f64 {
        weight(logit, self.largest, self.temperature)
    }

    /// Returns the candidate at `index` in the order of decreasing logits.
    fn at(&mut self, index: usize) -> (f32, u32) {
        if index >= self.sorted {
            let count = (8 * (index + 1)).max(64) - self.sorted;
            let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
            let mut next = &mut self.all[self.sorted..];
            if count < next.len() {
                next = next.select_nth_unstable_by(count, order).0;
            }
            next.sort_unstable_by(order);
            self.sorted += next.len();
        }
        self.all[index]
    }

    fn retain(&mut self, is_kept: impl Fn(f32) -> bool) {
        self.all.retain(|&(logit, _)| is_kept(logit));
        self.sorted = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(logits: &[f32], sampling: Sampling, uniform: f32) -> u32 {
        sampling.next(&mut logits.to_vec(), &[], uniform)
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0, 2.0, 1.0];
        let at = |temperature, top_k| Sampling { temperature, top_k, ..Sampling::default() };
        assert_eq!(next(&logits, at(0.0, None), 0.99), 1);
        assert_eq!(next(&logits, at(1.0, Some(1)), 0.99), 1);
        assert_eq!(next(&logits, at(1.0, None), 0.0), 1);
        assert_eq!(next(&logits, at(1.0, None), 0.9999), 0);
        let n = 10_000;
        let ones = (0..n).filter(|&i| next(&logits, at(1.0, None), i as f32 / n as f32) == 1).count();
        assert!((ones as f64 / n as f64 - 0.6652).abs() < 0.001); // e² / (1 + e + e²)
    }

    #[test]
    fn candidates_are_sorted_only_as_far_as_needed_and_in_order() {
        let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 1000) as f32).collect();
        let mut candidates = Sampling { temperature: 1.0, ..Sampling::default() }.candidates(&logits);
        let mut expected: Vec<(f32, u32)> = logits.iter().zip(0..).map(|(&logit, token)| (logit, token)).collect();
        expected.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        assert_eq!(candidates.at(0), expected[0]);
        assert!(candidates.sorted < 100);
        let all: Vec<(f32, u32)> = (0..expected.len()).map(|index| candidates.at(index)).collect();
        assert_eq!(all, expected);
    }

    #[test]
    fn values_out_of_range_and_without_effect_are_errors() {
        let refused = |sampling: Sampling| sampling.check().unwrap_err().to_string();
        let base = Sampling { temperature: 1.0, ..Sampling::default() };
        assert!(base.check().is_ok() && Sampling::default().check().is_ok());
        assert!(refused(Sampling { temperature: -1.0, ..base }).contains("--temperature"));
        assert!(refused(Sampling { top_k: Some(0), ..base }).contains("--top-k"));
        assert!(refused(Sampling { top_p: Some(1.5), ..base }).contains("--top-p"));
        assert!(refused(Sampling { min_p: Some(f64::NAN), ..base }).contains("--min-p"));
        assert!(refused(Sampling { repetition_penalty: 0.0, ..base }).contains("--repetition-penalty"));
        assert!(refused(Sampling { temperature: 0.0, top_p: Some(0.9), ..base }).contains("no effect"));
    }
}
