//! Determines which ranks of a group first compute a partial sum together and then send it to the other ranks.
//!
//! Every sum uses the binary tree over the ranks, so ranks of one host may form a partial sum only if it is a node of
//! that tree. A *cell* is a run of consecutive ranks on one host that forms one node of the tree. A group on two hosts
//! with four ranks per host has two cells, one per host. With three ranks per host, it has the cells 0–1, 2, 3 and 4–5,
//! because the tree first combines 2 with 3. Fewer cells mean less traffic between hosts. Launchers number ranks host
//! by host. If the number of ranks per host is a power of two, each host is therefore one cell.

use std::ops::Range;

/// Returns the cells of a group in rank order, given the host of each rank. The ranks of a cell are consecutive ranks
/// on one host, which compute a partial sum before they send it to other hosts. If a cell needs data of another cell,
/// the data is sent only once.
#[must_use]
pub fn cells<T: PartialEq>(hosts: &[T]) -> Vec<Range<usize>> {
    let size = hosts.len();
    let mut cells = Vec::new();
    let mut start = 0;
    while start < size {
        let same = hosts[start..].iter().take_while(|host| **host == hosts[start]).count();
        let length = node(start, same, size);
        cells.push(start..start + length);
        start += length;
    }
    cells
}

/// Returns the index of the cell that contains `rank`, and the rank's index in that cell.
pub(crate) fn position(cells: &[Range<usize>], rank: usize) -> (usize, usize) {
    let cell = cells.partition_point(|cell| cell.end <= rank);
    (cell, rank - cells[cell].start)
}

/// Returns the size of the largest node of the tree over `size` ranks that starts at `start` and has at most `limit`
/// ranks.
fn node(start: usize, limit: usize, size: usize) -> usize {
    // Round the number of remaining ranks up to a power of two. If `start` is a multiple of that power, the remaining
    // ranks form one node.
    let rest = size - start;
    if rest <= limit && start.is_multiple_of(rest.next_power_of_two()) {
        return rest;
    }
    let mut length = 1;
    while 2 * length <= limit && start.is_multiple_of(2 * length) {
        length *= 2;
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(ranks_of_hosts: &[usize]) -> Vec<usize> {
        let names: Vec<String> = (0..ranks_of_hosts.len()).map(|host| host.to_string()).collect();
        let hosts: Vec<&str> =
            names.iter().zip(ranks_of_hosts).flat_map(|(name, ranks)| vec![name.as_str(); *ranks]).collect();
        let cells = cells(&hosts);
        assert_eq!((cells[0].start, cells[cells.len() - 1].end), (0, hosts.len()));
        assert!(cells.windows(2).all(|pair| pair[0].end == pair[1].start));
        cells.iter().map(|cell| cell.len()).collect()
    }

    #[test]
    fn a_host_is_one_cell_if_the_reduction_tree_allows_it() {
        assert_eq!(lengths(&[4, 4]), [4, 4]);
        assert_eq!(lengths(&[8, 8, 8]), [8, 8, 8]);
        assert_eq!(lengths(&[4, 3]), [4, 3]);
        assert_eq!(lengths(&[7]), [7]);
        assert_eq!(lengths(&[4, 4, 1]), [4, 4, 1]);
        assert_eq!(lengths(&[3, 3]), [2, 1, 1, 2]);
        assert_eq!(lengths(&[3, 2]), [2, 1, 1, 1]);
        assert_eq!(lengths(&[1, 1, 1]), [1, 1, 1]);
        assert_eq!(lengths(&[2, 6]), [2, 2, 4]);
    }

    /// Returns all nodes of the tree, level by level.
    fn nodes(size: usize) -> Vec<Range<usize>> {
        let mut level: Vec<Range<usize>> = (0..size).map(|rank| rank..rank + 1).collect();
        let mut all = level.clone();
        while level.len() > 1 {
            level = level.chunks(2).map(|pair| pair[0].start..pair[pair.len() - 1].end).collect();
            all.extend(level.iter().cloned());
        }
        all
    }

    #[test]
    fn every_cell_is_a_node_of_the_reduction_tree() {
        for size in 1..40 {
            let nodes = nodes(size);
            for split in 0..=size {
                let hosts: Vec<&str> = (0..size).map(|rank| if rank < split { "a" } else { "b" }).collect();
                assert!(
                    cells(&hosts).iter().all(|cell| nodes.contains(cell)),
                    "{size} ranks, {split} on the first host"
                );
            }
        }
    }
}
