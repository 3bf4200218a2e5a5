//! Divides a vector into consecutive ranges, one for each rank.

use std::ops::Range;

/// Returns consecutive ranges of `counts[r] * scale` bytes.
pub(crate) fn consecutive(counts: impl IntoIterator<Item = usize>, scale: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let next = |count: usize| {
        let range = start..start + count * scale;
        start = range.end;
        range
    };
    counts.into_iter().map(next).collect()
}

/// Divides `length` elements into `parts` parts whose lengths differ by at most one.
pub fn even_counts(length: usize, parts: usize) -> impl Iterator<Item = usize> {
    (0..parts).map(move |part| length / parts + usize::from(part < length % parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_even_consecutive_and_complete() {
        for length in [0, 1, 7, 8, 9, 1000] {
            for parts in 1..9 {
                let ranges = consecutive(even_counts(length, parts), 4);
                assert_eq!(ranges.len(), parts);
                assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, 4 * length));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            }
        }
    }
}
