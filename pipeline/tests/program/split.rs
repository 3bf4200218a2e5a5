//! Compares splits with an exhaustive search over all cuts.

use std::ops::Range;

use zero_pipeline::Schedule;
use zero_pipeline::schedule::Size;
use zero_pipeline::split::{self, LayerCost, SplitError};

/// Returns all ways to cut `layers` into `parts`. Cuts are sorted: longer first parts come first.
fn cuts(layers: Range<usize>, parts: usize) -> Vec<Vec<Range<usize>>> {
    if parts == 1 {
        return if layers.is_empty() { vec![] } else { vec![vec![layers]] };
    }
    let ends = (layers.start + 1..layers.end).rev();
    let first = |end: usize| {
        let rest = cuts(end..layers.end, parts - 1).into_iter();
        let start = layers.start;
        rest.map(move |rest| std::iter::once(start..end).chain(rest).collect())
    };
    ends.flat_map(first).collect()
}

/// A deterministic generator of numbers below `limit`.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

fn lengths(cut: &[Range<usize>]) -> Vec<usize> {
    cut.iter().map(ExactSizeIterator::len).collect()
}

#[test]
fn uniform_gives_left_over_layers_to_the_first_parts() {
    assert_eq!(split::uniform(7, 3).unwrap(), [0..3, 3..5, 5..7]);
    for layers in 1..40 {
        for parts in 1..=layers {
            let cut = split::uniform(layers, parts).unwrap();
            let lengths = lengths(&cut);
            assert_eq!(lengths.iter().sum::<usize>(), layers);
            assert!(lengths.is_sorted_by(|a, b| a >= b) && lengths[0] - lengths[parts - 1] <= 1, "{cut:?}");
            // Cutting by equal weights gives the same result.
            assert_eq!(split::balanced(&vec![3; layers], parts).unwrap(), cut);
        }
    }
}

#[test]
fn too_few_layers_are_an_error() {
    for (layers, parts) in [(3, 4), (0, 1), (3, 0), (0, 0)] {
        let expected = SplitError::TooFewLayers { layers, parts };
        assert_eq!(split::uniform(layers, parts), Err(expected.clone()));
        assert_eq!(split::balanced(&vec![1; layers], parts), Err(expected.clone()));
        let costs = vec![LayerCost::default(); layers];
        assert_eq!(split::by_time(&costs, &vec![1; parts], u64::MAX), Err(expected));
    }
    let found = split::uniform(3, 4).unwrap_err().to_string();
    assert_eq!(found, "a model of 3 layers cannot be split into 4 parts with at least one layer each");
}

#[test]
fn regex_weights_count_matching_layers() {
    // An embedding, ten blocks and a head; only the blocks match.
    let weights: Vec<u64> = [vec![0], vec![1; 10], vec![0]].concat();
    assert_eq!(lengths(&split::balanced(&weights, 4).unwrap()), [4, 3, 2, 3]);
    // No layer matches: any cut is optimal, and each part still has a layer.
    assert_eq!(lengths(&split::balanced(&[0; 5], 3).unwrap()), [3, 1, 1]);
}

#[test]
fn balanced_minimizes_the_heaviest_part() {
    let mut random = Random(7);
    for round in 0..400 {
        let layers = 1 + random.below(9) as usize;
        let parts = 1 + random.below(layers as u64) as usize;
        let limit = [3, 20, 1_000_000][round % 3];
        let weights: Vec<u64> = (0..layers).map(|_| random.below(limit)).collect();
        let of = |cut: &Vec<Range<usize>>| -> (u64, u64) {
            let parts = cut.iter().map(|part| weights[part.clone()].iter().sum::<u64>());
            (parts.clone().max().unwrap(), parts.map(|weight| weight * weight).sum())
        };
        // The best cut has the lightest heaviest part, then the most even weights, then the longest first parts. `cuts`
        // lists cuts with longer first parts first.
        let expected = cuts(0..layers, parts).into_iter().min_by_key(of).unwrap();
        assert_eq!(split::balanced(&weights, parts).unwrap(), expected, "{weights:?}");
    }
}

#[test]
fn by_time_minimizes_the_slowest_part_that_fits() {
    let mut random = Random(11);
    let (mut fitting, mut refused) = (0, 0);
    for _ in 0..600 {
        let layers = 1 + random.below(9) as usize;
        let parts = 1 + random.below(layers as u64) as usize;
        let mut cost = || LayerCost {
            forward: random.below(10) as f64,
            backward: random.below(20) as f64,
            state: random.below(50),
            activations: random.below(20),
        };
        let costs: Vec<LayerCost> = (0..layers).map(|_| cost()).collect();
        let size = Size { stages: parts, chunks: 1, micro_batches: 1 + random.below(6) as usize };
        let alive = split::alive(Schedule::OneFOneB, size);
        let limit = random.below(layers as u64 * 60 / parts as u64 + 40);
        let bytes = |cut: &[Range<usize>]| -> u64 {
            let part = |(part, layers): (usize, &Range<usize>)| -> u64 {
                let of = |layer: &LayerCost| layer.state + layer.activations * alive[part] as u64;
                costs[layers.clone()].iter().map(of).sum()
            };
            cut.iter().enumerate().map(part).max().unwrap()
        };
        let slowest = |cut: &[Range<usize>]| {
            let part =
                |layers: &Range<usize>| costs[layers.clone()].iter().map(|c| c.forward + c.backward).sum::<f64>();
            cut.iter().map(part).fold(0.0, f64::max)
        };
        let all = cuts(0..layers, parts);
        let least = all.iter().filter(|cut| bytes(cut) <= limit).map(|cut| slowest(cut)).min_by(f64::total_cmp);
        match (split::by_time(&costs, &alive, limit), least) {
            (Ok(cut), Some(least)) => {
                assert!(bytes(&cut) <= limit, "{costs:?}");
                assert_eq!(slowest(&cut), least, "{costs:?}");
                fitting += 1;
            }
            (Err(SplitError::DoesNotFit { parts: p, limit: l, needed, layers, alive: a }), None) => {
                assert_eq!(Some(needed), all.iter().map(|cut| bytes(cut)).min(), "{costs:?}");
                assert!((p, l) == (parts, limit) && needed > limit && !layers.is_empty() && alive.contains(&a));
                refused += 1;
            }
            (found, expected) => panic!("{found:?}, but {expected:?} for {costs:?} with {alive:?} and {limit}"),
        }
    }
    assert!(fitting > 100 && refused > 100, "{fitting} fit, {refused} do not");
}

#[test]
fn memory_moves_layers_off_the_first_stage() {
    // Four equal layers on two stages: the first stage keeps two micro-batches alive, the second stage keeps one.
    let costs = [LayerCost { forward: 1.0, backward: 2.0, state: 10, activations: 10 }; 4];
    let alive = split::alive(Schedule::OneFOneB, Size { stages: 2, chunks: 1, micro_batches: 8 });
    assert_eq!(alive, [2, 1]);
    assert_eq!(split::by_time(&costs, &alive, 60).unwrap(), [0..2, 2..4]);
    let found = split::by_time(&costs, &alive, 59).unwrap_err().to_string();
    let costs = [LayerCost { activations: 15, ..costs[0] }; 4];
    assert_eq!(split::by_time(&costs, &alive, 75).unwrap(), [0..1, 1..4]);
    assert_eq!(
        found,
        "no split into 2 parts keeps each part within 59 bytes: in the best split, layers 0 to 1 need 60 bytes for 2 micro-batches \
         alive"
    );
}

#[test]
fn an_invalid_time_is_an_error() {
    for seconds in [f64::NAN, f64::INFINITY, -1.0] {
        let costs = [LayerCost::default(), LayerCost { backward: seconds, ..LayerCost::default() }];
        let found = split::by_time(&costs, &[1, 1], 0).unwrap_err();
        assert!(matches!(found, SplitError::NotATime { layer: 1, .. }), "{found}");
    }
}

#[test]
fn live_micro_batches_are_counted_by_part() {
    let size = Size { stages: 4, chunks: 1, micro_batches: 8 };
    assert_eq!(split::alive(Schedule::GPipe, size), [8, 8, 8, 8]);
    assert_eq!(split::alive(Schedule::OneFOneB, size), [4, 3, 2, 1]);
    assert_eq!(split::alive(Schedule::ZeroBubble, size), [4, 4, 4, 4]);
    assert_eq!(split::alive(Schedule::OneFOneB, Size { micro_batches: 2, ..size }), [2, 2, 2, 1]);
    // Before the first backward, stage 0 runs three micro-batches through its first chunk and two through its second.
    let size = Size { stages: 2, chunks: 2, micro_batches: 4 };
    let alive = split::alive(Schedule::Interleaved, size);
    assert_eq!(alive.len(), 4);
    assert!(alive[0] > alive[2] && alive[0] <= 4, "{alive:?}");
}
