//! Packing: which conversations share a sample.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Distributes items of these lengths, each at most `room`, over few bins of `room`. Returns the items of each bin.
///
/// Best-fit decreasing, as in TRL: the items, longest first, each go to the fullest bin that has room. Bins and their
/// items are then put into the order of the items.
pub(super) fn pack(lengths: &[usize], room: usize) -> Vec<Vec<usize>> {
    let mut items: Vec<usize> = (0..lengths.len()).collect();
    items.sort_by_key(|&item| Reverse(lengths[item]));
    let mut bins: Vec<Vec<usize>> = vec![];
    // The bins by the room that is left in them.
    let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for item in items {
        let length = lengths[item];
        let (left, bin) = match open.range_mut(length..).next() {
            Some((&left, same)) => {
                let bin = same.pop().expect("a list of bins is never empty");
                if same.is_empty() {
                    open.remove(&left);
                }
                (left, bin)
            }
            None => {
                bins.push(vec![]);
                (room, bins.len() - 1)
            }
        };
        bins[bin].push(item);
        open.entry(left.saturating_sub(length)).or_default().push(bin);
    }
    bins.iter_mut().for_each(|bin| bin.sort_unstable());
    bins.sort_unstable();
    bins
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_bin_with_room_takes_an_item() {
        assert_eq!(pack(&[3, 6, 4, 5, 1], 10), [vec![0, 3, 4], vec![1, 2]]);
        assert_eq!(pack(&[10, 10, 1], 10), [vec![0], vec![1], vec![2]]);
        assert!(pack(&[], 10).is_empty());
    }

    #[test]
    fn every_item_is_in_one_bin_and_bins_are_nearly_full() {
        let lengths: Vec<usize> = (0u64..5000).map(|i| 1 + (i * i * 7919 % 1009) as usize).collect();
        let bins = pack(&lengths, 2048);
        let mut items: Vec<usize> = bins.concat();
        items.sort_unstable();
        assert!(items.into_iter().eq(0..lengths.len()));
        assert!(bins.iter().all(|bin| bin.iter().map(|&item| lengths[item]).sum::<usize>() <= 2048));
        // No packing needs fewer bins than the sum of lengths.
        let least = lengths.iter().sum::<usize>().div_ceil(2048);
        assert!(bins.len() <= least + 1, "{} bins, at least {least}", bins.len());
    }
}
