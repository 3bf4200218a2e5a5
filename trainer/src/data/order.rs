//! The order of training samples: shuffling without a list of indices.
//!
//! An epoch's order is a pseudo-random permutation of `0..n`, computed one index at a time in constant time and without
//! a table. It is a Feistel network (Luby & Rackoff, 1988) over the smallest power of two that is at least n, repeated
//! until the result is below n (Black & Rogaway, 2002). The permutation depends only on the seed, the epoch and n, so
//! every layout and every resumed run uses the same order.

/// Part of the key. It makes the permutation independent of other random numbers that are derived from the same seed.
const PURPOSE: u64 = u64::from_le_bytes(*b"shuffle\0");
/// Four rounds make a strong permutation of numbers with many bits. Numbers of only two or three bits need more rounds.
const ROUNDS: u64 = 8;

/// Returns the index in the data set for a position in the training run. An epoch has `n` samples, at least 1.
///
/// `position` counts samples of the whole run over all ranks: (step · M + micro-batch) · B + row, with M micro-batches
/// of B samples in a global batch, all counted from 0. The epoch is position / n, rounded down. Each epoch contains
/// every sample exactly once, whatever the layout. A batch may span two epochs.
pub fn sample_index(seed: u64, position: u64, n: usize, shuffle: bool) -> usize {
    let n = (n as u64).max(1);
    let (epoch, within) = (position / n, position % n);
    (if shuffle { permute(seed, epoch, n, within) } else { within }) as usize
}

/// Applies the permutation of `0..n` for the seed and the epoch to `index`, which must be below `n`.
fn permute(seed: u64, epoch: u64, n: u64, index: u64) -> u64 {
    let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
    let low_bits = bits / 2;
    let (low_mask, high_mask) = (mask(low_bits), mask(bits - low_bits));
    let key = mix(mix(seed ^ PURPOSE).wrapping_add(epoch));

    let mut x = index;
    loop {
        let (mut high, mut low) = (x >> low_bits, x & low_mask);
        for round in (0..ROUNDS).step_by(2) {
            // Each line changes one half by a function of the other half. Such a line is its own inverse, so the
            // network is a permutation.
            low ^= mix(key ^ high.wrapping_add(round << 56)) & low_mask;
            high ^= mix(key ^ low.wrapping_add((round + 1) << 56)) & high_mask;
        }
        x = high << low_bits | low;
        // The network permutes the numbers below a power of two that is less than 2n, so few repetitions are needed.
        // The loop ends because every cycle of the permutation returns to its start, and `index` is below n.
        if x < n {
            return x;
        }
    }
}

fn mask(bits: u32) -> u64 {
    (1u64 << bits) - 1
}

/// Mixes `x` with SplitMix64's increment and finalizer (Steele, Lea & Flood, 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_has_every_sample_once() {
        for n in (1..=130).chain([255, 256, 257, 1000, 1023, 1024, 1025, 4097, 10_007]) {
            for epoch in 0..3u64 {
                let mut seen = vec![false; n];
                for within in 0..n as u64 {
                    let index = sample_index(7, epoch * n as u64 + within, n, true);
                    assert!(!std::mem::replace(&mut seen[index], true), "n {n}, epoch {epoch}: {index} twice");
                }
            }
        }
    }

    #[test]
    fn the_permutation_works_for_the_largest_sizes() {
        for n in [u64::MAX, 1 << 63, (1 << 63) + 1, (1 << 32) - 1] {
            for index in [0, 1, n / 2, n - 1] {
                assert!(permute(1, u64::MAX, n, index) < n);
            }
        }
        assert_eq!(sample_index(1, u64::MAX, 1, true), 0);
    }

    #[test]
    fn unshuffled_is_in_order() {
        assert_eq!((0..7).map(|p| sample_index(9, p, 3, false)).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn seeds_and_epochs_have_different_orders() {
        let order =
            |seed, epoch: u64| (0..100).map(|i| sample_index(seed, epoch * 100 + i, 100, true)).collect::<Vec<_>>();
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 1), order(2, 0));
        assert_ne!(order(1, 0), (0..100).collect::<Vec<_>>());
    }

    /// These values must never change: a newer version that resumes a run must continue with the same samples.
    #[test]
    fn the_order_is_stable_across_versions() {
        assert_eq!(
            (0..10).map(|i| sample_index(1234, i, 10, true)).collect::<Vec<_>>(),
            [4, 2, 9, 5, 3, 8, 0, 6, 7, 1]
        );
    }

    /// Each sample occurs equally often at each position, up to random deviations. The χ² distribution with 81 degrees
    /// of freedom has a mean of 81 and a standard deviation of 12.7. The limit of 150 is more than five standard
    /// deviations above the mean.
    #[test]
    fn shuffled_positions_are_uniform() {
        let (n, epochs) = (10usize, 20_000u64);
        let mut counts = vec![0u32; n * n];
        for position in 0..epochs * n as u64 {
            counts[position as usize % n * n + sample_index(3, position, n, true)] += 1;
        }
        let expected = epochs as f64 / n as f64;
        let chi2: f64 = counts.iter().map(|&count| (f64::from(count) - expected).powi(2) / expected).sum();
        assert!(chi2 < 150.0, "{chi2}");
    }

    /// Shuffling separates neighbours. The expected distance between two random positions is n/3.
    #[test]
    fn neighbours_are_scattered() {
        let n = 100_000u64;
        let place = |i| permute(5, 0, n, i);
        let distance: f64 = (1..n).map(|i| place(i).abs_diff(place(i - 1)) as f64).sum::<f64>() / (n - 1) as f64;
        assert!((distance / n as f64 - 1.0 / 3.0).abs() < 0.01, "{distance}");
    }
}
