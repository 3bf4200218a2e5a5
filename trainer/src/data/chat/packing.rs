//! Packing: decides which conversations share a sample.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// A distribution of items over bins. Items are numbered from 0.
pub(super) struct Packs {
    /// The items of all bins, one bin after the other.
    items: Vec<u32>,
    /// The start of each bin in `items`, followed by the total number of items.
    starts: Vec<u32>,
}

impl Packs {
    /// Returns the number of bins.
    pub(super) fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns the items of a bin, in order.
    pub(super) fn bin(&self, bin: usize) -> &[u32] {
        &self.items[self.starts[bin] as usize..self.starts[bin + 1] as usize]
    }
}

/// Distributes items over few bins of size `room`. Each length is at most `room`.
///
/// Uses best-fit decreasing, as in TRL: takes the items in order of decreasing length, and puts each into the fullest
/// bin with enough room. Finally sorts the items of each bin, and the bins by their first items.
pub(super) fn pack(lengths: &[u32], room: usize) -> Packs {
    let mut items: Vec<u32> = (0..lengths.len() as u32).collect();
    items.sort_by_key(|&item| Reverse(lengths[item as usize]));
    let (mut bin_of, mut bins) = (vec![0; lengths.len()], 0u32);
    // The open bins, by remaining room.
    let mut open: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for item in items {
        let length = lengths[item as usize] as usize;
        let (left, bin) = match open.range_mut(length..).next() {
            Some((&left, same)) => {
                let bin = same.pop().expect("a list of bins is never empty");
                if same.is_empty() {
                    open.remove(&left);
                }
                (left, bin)
            }
            None => {
                bins += 1;
                (room, bins - 1)
            }
        };
        bin_of[item as usize] = bin;
        open.entry(left.saturating_sub(length)).or_default().push(bin);
    }
    in_order(bin_of, bins as usize)
}

/// Sorts the bins by their first items. `bin_of` holds the bin of each item.
fn in_order(mut bin_of: Vec<u32>, bins: usize) -> Packs {
    let (mut numbers, mut next) = (vec![None; bins], 0);
    // Counts the items of each bin, shifted by one. The sums below turn the counts into starts.
    let mut starts = vec![0; bins + 1];
    for bin in &mut bin_of {
        let number = numbers[*bin as usize].get_or_insert_with(|| {
            next += 1;
            next - 1
        });
        *bin = *number;
        starts[*number as usize + 1] += 1;
    }
    (1..=bins).for_each(|bin| starts[bin] += starts[bin - 1]);
    let (mut items, mut ends) = (vec![0; bin_of.len()], starts.clone());
    for (item, &bin) in bin_of.iter().enumerate() {
        let end = &mut ends[bin as usize];
        items[*end as usize] = item as u32;
        *end += 1;
    }
    Packs { items, starts }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(lengths: &[u32], room: usize) -> Vec<Vec<u32>> {
        let packs = pack(lengths, room);
        (0..packs.len()).map(|bin| packs.bin(bin).to_vec()).collect()
    }

    #[test]
    fn the_fullest_bin_with_room_takes_an_item() {
        assert_eq!(packed(&[3, 6, 4, 5, 1], 10), [vec![0, 3, 4], vec![1, 2]]);
        assert_eq!(packed(&[10, 10, 1], 10), [vec![0], vec![1], vec![2]]);
        assert!(packed(&[], 10).is_empty());
    }

    #[test]
    fn every_item_is_in_one_bin_and_bins_are_nearly_full() {
        let lengths: Vec<u32> = (0u64..5000).map(|i| 1 + (i * i * 7919 % 1009) as u32).collect();
        let bins = packed(&lengths, 2048);
        assert!(bins.is_sorted() && bins.iter().all(|bin| bin.is_sorted()));
        let mut items: Vec<u32> = bins.concat();
        items.sort_unstable();
        assert!(items.into_iter().eq(0..lengths.len() as u32));
        assert!(bins.iter().all(|bin| bin.iter().map(|&item| lengths[item as usize]).sum::<u32>() <= 2048));
        // A lower bound: the sum of the lengths divided by the size of a bin.
        let least = lengths.iter().sum::<u32>().div_ceil(2048) as usize;
        assert!(bins.len() <= least + 1, "{} bins, at least {least}", bins.len());
    }
}
