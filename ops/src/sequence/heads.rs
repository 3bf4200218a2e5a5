//! Which heads each rank computes in attention.

use candle_core::{Result, bail};
use std::ops::Range;
use std::sync::Arc;

/// The heads of a tensor that each rank of a group computes. Several ranks may need the same key and value head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeadShares {
    /// Number of heads of the tensor.
    pub(crate) heads: usize,
    /// The heads of each rank, in rank order.
    pub(crate) lists: Arc<[Vec<usize>]>,
}

impl HeadShares {
    /// Divides query heads evenly. If the number of heads is not a multiple of the number of ranks, the first ranks get
    /// one more.
    ///
    /// # Errors
    /// Fails if there are fewer heads than ranks.
    pub(crate) fn of_queries(op: &'static str, heads: usize, ranks: usize) -> Result<Self> {
        if heads < ranks {
            bail!(
                "{op}: {ranks} ranks share each sequence, but there are only {heads} heads to divide among them; \
                 use a smaller `sequence_parallel_size`, or use `mesh.context_parallel_degree` instead"
            );
        }
        let share = |rank: usize| share(heads, rank, ranks).collect();
        Ok(Self { heads, lists: (0..ranks).map(share).collect() })
    }

    /// Returns the key and value heads that a rank's query heads read: query head h reads head h / (heads /
    /// `kv_heads`).
    ///
    /// Attention on a rank applies this formula to the rank's own numbers of heads. If that gives the wrong heads, the
    /// rank gets one key and value head for each of its query heads.
    pub(crate) fn of_keys(&self, kv_heads: usize) -> Self {
        let group = self.heads / kv_heads;
        let keys = |queries: &Vec<usize>| {
            let each: Vec<usize> = queries.iter().map(|query| query / group).collect();
            let mut once = each.clone();
            once.dedup();
            let is_even = queries.len().is_multiple_of(once.len());
            let own_group = queries.len() / once.len();
            let is_same = is_even && each.iter().enumerate().all(|(at, &key)| once[at / own_group] == key);
            if is_same { once } else { each }
        };
        Self { heads: kv_heads, lists: self.lists.iter().map(keys).collect() }
    }
}

/// Returns the range of `count` items that belongs to a rank.
fn share(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let start = |rank: usize| rank * (count / ranks) + rank.min(count % ranks);
    start(rank)..start(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(heads: usize, kv_heads: usize, ranks: usize) -> [Vec<Vec<usize>>; 2] {
        let queries = HeadShares::of_queries("test", heads, ranks).unwrap();
        let keys = queries.of_keys(kv_heads);
        [queries.lists.to_vec(), keys.lists.to_vec()]
    }

    #[test]
    fn every_query_head_has_its_keys() {
        for (heads, kv_heads) in [(8, 8), (8, 4), (8, 2), (8, 1), (6, 2), (6, 3), (12, 4), (5, 1), (15, 5)] {
            for ranks in 1..=heads.min(6) {
                let [queries, keys] = lists(heads, kv_heads, ranks);
                assert_eq!(queries.concat(), (0..heads).collect::<Vec<_>>());
                for (queries, keys) in queries.iter().zip(&keys) {
                    assert!(queries.len().is_multiple_of(keys.len()), "{heads} {kv_heads} {ranks}");
                    let group = queries.len() / keys.len();
                    for (at, query) in queries.iter().enumerate() {
                        assert_eq!(keys[at / group], query / (heads / kv_heads), "{heads} {kv_heads} {ranks}");
                    }
                }
            }
        }
    }

    #[test]
    fn kv_heads_are_sent_once_where_heads_divide_evenly() {
        assert_eq!(lists(8, 4, 2)[1], [[0, 1], [2, 3]]);
        assert_eq!(lists(8, 2, 4)[1], [[0], [0], [1], [1]]);
        // Rank 1 of 3 has the query heads 2 and 3, which read the keys 0 and 1.
        assert_eq!(lists(6, 2, 3)[1], [vec![0], vec![0, 1], vec![1]]);
        // The query heads 3 to 5 of rank 1 read keys 0, 1 and 1.
        assert_eq!(lists(8, 2, 3)[1], [vec![0], vec![0, 1, 1], vec![1]]);
        assert!(HeadShares::of_queries("test", 2, 3).unwrap_err().to_string().contains("only 2 heads"));
    }
}
