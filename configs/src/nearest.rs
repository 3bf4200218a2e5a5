//! Finds the name that a mistyped one was probably meant to be.

/// Maximum length of a name to compare. No key is longer, and the cost of a comparison grows with the product of
/// the lengths.
const MAX_NAME_LENGTH: usize = 64;

/// Returns the candidate nearest to `name`, if one is near enough to be a likely correction.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.is_empty() || name.len() > MAX_NAME_LENGTH {
        return None;
    }
    let name = name.to_ascii_lowercase();
    let mut best = None;
    for candidate in candidates {
        let other = candidate.to_ascii_lowercase();
        let typo = strsim::normalized_damerau_levenshtein(&name, &other);
        // A common prefix outweighs the missing rest, so `zero` suggests `zero_optimization`.
        let beginning = strsim::jaro_winkler(&name, &other) - 0.1;
        let score = typo.max(beginning);
        if score > best.map_or(0.7, |(score, _)| score) {
            best = Some((score, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistyped_keys_are_recognised() {
        let keys = ["stage", "overlap_comm", "zero_optimization", "train_batch_size"];
        assert_eq!(nearest("stagee", keys.into_iter()), Some("stage"));
        assert_eq!(nearest("overlapcomm", keys.into_iter()), Some("overlap_comm"));
        assert_eq!(nearest("zero", keys.into_iter()), Some("zero_optimization"));
        assert_eq!(nearest("banana", keys.into_iter()), None);
        assert_eq!(nearest(&"stage".repeat(100), keys.into_iter()), None);
    }
}
