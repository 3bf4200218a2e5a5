//! Checks which parameters the passes gather, how early, and how long they stay gathered.

use zero_partition::passes::{GatherOptions, PassOptions, RecomputeOptions, Share, evaluation, training_step};
use zero_pipeline::Instruction::{self, *};
use zero_pipeline::{ModelShape, Placement, Program, Schedule, Stages, ZeroStage};

use super::{ALL, BLOCK, LN_F, NORMS, WTE, plain, shape, step};
use crate::{validate, with_secondary};

/// Returns a step at stage 3 with these gather options.
fn gathering(micro_batches: usize, gather: GatherOptions) -> Program {
    step(ZeroStage::Three, micro_batches, &PassOptions { gather, ..plain() })
}

/// Numbers of elements at the time when a layer computes.
struct Moment {
    /// In flight.
    ahead: usize,
    /// Gathered or in flight.
    live: usize,
    /// Read by the layer.
    needed: usize,
}

/// Walks a program and records the moment of every compute instruction.
fn moments(program: &Program, shape: &ModelShape) -> Vec<Moment> {
    let elements = |s: usize| shape.segments[s].elements;
    let (mut ahead, mut there) = (0, 0);
    let mut moments = vec![];
    for instruction in &program.instructions {
        let sum = |segments: &[usize]| segments.iter().map(|&s| elements(s)).sum::<usize>();
        match instruction {
            Gather { segments } => ahead += sum(segments),
            AwaitGather { segments } => {
                ahead -= sum(segments);
                there += sum(segments);
            }
            Release { segment } => there -= elements(*segment),
            Forward { .. } | Backward { .. } => {
                let needed = read_by(shape, instruction).map(elements).sum();
                moments.push(Moment { ahead, live: ahead + there, needed });
            }
            _ => {}
        }
    }
    assert_eq!((ahead, there), (0, 0), "a segment is still gathered or in flight");
    moments
}

/// Returns the sharded segments that a forward or backward reads.
fn read_by<'a>(shape: &'a ModelShape, compute: &Instruction) -> impl Iterator<Item = usize> + 'a {
    let sharded = |s: &usize| shape.segments[*s].placements.parameters == Placement::Sharded;
    let segments = match *compute {
        Forward { layer, .. } => &shape.layers[layer].segments[..],
        Backward { layer, .. } => &shape.layers[layer].read_backward,
        _ => &[],
    };
    segments.iter().copied().filter(sharded)
}

/// Returns the segments of all gathers, in their order.
fn gathers(program: &Program) -> Vec<usize> {
    let of = |i: &Instruction| if let Gather { segments } = i { segments.clone() } else { vec![] };
    program.instructions.iter().flat_map(of).collect()
}

#[test]
fn without_prefetch_each_gather_is_right_before_its_use() {
    for overlap in [false, true] {
        let program = gathering(2, GatherOptions { overlap, ..plain().gather });
        let shape = shape(ZeroStage::Three);
        for (index, instruction) in program.instructions.iter().enumerate() {
            let Gather { segments } = instruction else { continue };
            let mut rest = program.instructions[index..].iter();
            let next = rest.find(|i| !matches!(i, Gather { .. } | AwaitGather { .. }));
            let reads = |segment: &usize| next.is_some_and(|i| read_by(&shape, i).any(|s| s == *segment));
            assert!(segments.iter().all(reads), "{segments:?} for {next:?}");
        }
        assert!(moments(&program, &shape).iter().all(|m| m.ahead == 0 && m.live == m.needed));
    }
}

#[test]
fn prefetching_starts_the_next_gather_before_the_layer_computes() {
    let shape = shape(ZeroStage::Three);
    let program = gathering(1, GatherOptions { prefetch: BLOCK, overlap: true, ..plain().gather });
    let mut there = vec![false; shape.segments.len()];
    let computes = program.instructions.iter().filter(|i| matches!(i, Forward { .. } | Backward { .. }));
    let mut following = computes.skip(1);
    for instruction in &program.instructions {
        match instruction {
            Gather { segments } => segments.iter().for_each(|&segment| there[segment] = true),
            Forward { .. } | Backward { .. } => {
                if let Some(next) = following.next() {
                    assert!(
                        read_by(&shape, next).all(|s| there[s]),
                        "not every segment of `{next}` was started\n{program}"
                    );
                }
            }
            Release { segment } => there[*segment] = false,
            _ => {}
        }
    }
}

#[test]
fn prefetching_stays_within_its_bucket() {
    let shape = shape(ZeroStage::Three);
    let mut most = vec![];
    for prefetch in [0, LN_F, WTE, BLOCK, BLOCK + WTE, 3 * BLOCK, ALL] {
        let program = gathering(2, GatherOptions { prefetch, overlap: true, ..plain().gather });
        let ahead = moments(&program, &shape).iter().map(|m| m.ahead).max().unwrap();
        most.push(ahead);
    }
    // A bucket smaller than a block prefetches one block; larger buckets are filled completely. Without a limit, the
    // peak is during the backward of the embedding, which reads no parameters: the whole next forward is in flight.
    assert_eq!(most, [0, BLOCK, BLOCK, BLOCK, BLOCK + WTE, 3 * BLOCK, 3 * BLOCK + WTE + LN_F]);
}

/// The segments of a layer are gathered in one collective, even if the prefetch bucket holds only some of them.
#[test]
fn the_next_layer_is_always_prefetched() {
    let mut shape = shape(ZeroStage::Three);
    // Two sharded segments in each block.
    for segment in &mut shape.segments {
        segment.placements.parameters = Placement::Sharded;
    }
    let stages = Stages::single(&shape);
    let share = Share { shape: &shape, stages: &stages, stage: 0 };
    for prefetch in [0, 1, NORMS, BLOCK + NORMS, 2 * (BLOCK + NORMS)] {
        for max_live in [BLOCK + NORMS, 2 * (BLOCK + NORMS), ALL] {
            let gather = GatherOptions { prefetch, max_live, overlap: true, ..plain().gather };
            let program = training_step(&share, Schedule::OneFOneB, 1, &PassOptions { gather, ..plain() });
            assert_eq!(validate(&[program.clone(), program.clone()], &shape), Ok(()), "{program}");
            let groups = program.instructions.iter().filter_map(|i| match i {
                Gather { segments } => Some(&segments[..]),
                _ => None,
            });
            let layers = [&[0][..], &[1, 2], &[3, 4], &[5, 6], &[7]];
            assert!(groups.clone().all(|group| layers.contains(&group)), "a gather is of a layer:\n{program}");
            // While the first block computes, the second is in flight, unless both exceed the limit.
            let forward = Forward { layer: 1, micro_batch: 0 };
            let at = program.instructions.iter().position(|i| *i == forward).unwrap();
            let is_started = program.instructions[..at].contains(&Gather { segments: vec![3, 4] });
            assert_eq!(is_started, prefetch > 0 && max_live >= 2 * (BLOCK + NORMS), "{prefetch} {max_live}");
        }
    }
}

#[test]
fn live_parameters_stay_within_their_limit() {
    let shape = shape(ZeroStage::Three);
    for max_live in [0, WTE, BLOCK, BLOCK + WTE, 2 * BLOCK, 3 * BLOCK, ALL] {
        let options = GatherOptions { prefetch: ALL, max_live, max_reuse_distance: 0, overlap: true };
        for moment in moments(&gathering(2, options), &shape) {
            // A layer that exceeds the limit is gathered alone.
            assert!(moment.live <= max_live.max(moment.needed), "{} live, {max_live} allowed", moment.live);
        }
        // A layer that was not prefetched does not evict segments kept for reuse.
        let options = GatherOptions { max_reuse_distance: ALL, ..options };
        for moment in moments(&gathering(2, options), &shape) {
            assert!(moment.live <= max_live.saturating_add(moment.needed), "{} live, {max_live} allowed", moment.live);
        }
    }
}

#[test]
fn inner_layers_are_gathered_twice_per_micro_batch() {
    let shape = shape(ZeroStage::Three);
    for micro_batches in 1..=4 {
        for prefetch in [0, BLOCK, ALL] {
            let program = gathering(micro_batches, GatherOptions { prefetch, overlap: true, ..plain().gather });
            // The parameters of the last layer stay gathered from its forward to its backward, which comes next. The
            // backward of the first layer reads no parameters.
            assert_eq!(gathers(&program).len(), (2 * shape.layers.len() - 2) * micro_batches);
            // The tied embedding is gathered once for the first layer and once for the last.
            let tied = gathers(&program).into_iter().filter(|&s| s == 0).count();
            assert_eq!(tied, 2 * micro_batches);
            // Persistent segments are never gathered.
            assert!(gathers(&program).iter().all(|&s| shape.segments[s].elements != NORMS));
        }
    }
    let stages = Stages::single(&shape);
    let program = evaluation(&Share { shape: &shape, stages: &stages, stage: 0 }, 3, &plain());
    assert_eq!(validate(std::slice::from_ref(&program), &shape), Ok(()));
    assert_eq!(
        gathers(&program),
        [0, 1, 3, 5, 7, 0, 1, 3, 5, 7, 0, 1, 3, 5, 7, 0],
        "kept from the head to the embedding"
    );
}

/// With secondary shards, the program has the same gathers, with the same overlap, as without them. Only the first
/// gather of each segment reads all shards.
#[test]
fn segments_are_gathered_from_all_shards_once_a_step() {
    let shape = with_secondary(shape(ZeroStage::Three));
    let stages = Stages::single(&shape);
    let share = Share { shape: &shape, stages: &stages, stage: 0 };
    let from_all = |program: Program| Program {
        instructions: program
            .instructions
            .into_iter()
            .map(|instruction| match instruction {
                GatherSecondary { segments } => Gather { segments },
                AwaitGatherSecondary { segments } => AwaitGather { segments },
                other => other,
            })
            .collect(),
        ..program
    };
    for micro_batches in 1..=3 {
        for recompute in
            [RecomputeOptions::none(), RecomputeOptions { layers: vec![true; 6], interval: 1, on_disk: false }]
        {
            for prefetch in [0, BLOCK, ALL] {
                let gather = GatherOptions { prefetch, overlap: prefetch > 0, ..plain().gather };
                let options = PassOptions { gather, recompute: recompute.clone(), ..plain() };
                let program = training_step(&share, Schedule::OneFOneB, micro_batches, &options);
                assert_eq!(validate(&[program.clone(), program.clone()], &shape), Ok(()), "{program}");
                assert_eq!(gathers(&program), [0, 1, 3, 5, 7], "{program}");
                assert_eq!(from_all(program), step(ZeroStage::Three, micro_batches, &options));
            }
        }
    }
    let program = evaluation(&share, 2, &plain());
    assert_eq!(validate(std::slice::from_ref(&program), &shape), Ok(()));
    assert_eq!(gathers(&program), [0, 1, 3, 5, 7]);
    let of_secondary = |i: &Instruction| if let GatherSecondary { segments } = i { segments.clone() } else { vec![] };
    let again: Vec<usize> = program.instructions.iter().flat_map(of_secondary).collect();
    assert_eq!(again, [0, 1, 3, 5, 7, 0], "the second micro-batch");
}

#[test]
fn segments_reused_soon_stay_gathered() {
    let of = |max_reuse_distance| gathers(&gathering(1, GatherOptions { max_reuse_distance, ..plain().gather }));
    // Between a layer's forward and its backward, each later layer is used twice.
    assert_eq!(of(0), [0, 1, 3, 5, 7, 0, 7, 5, 3, 1]);
    assert_eq!(of(2 * WTE - 1), of(0));
    assert_eq!(of(2 * WTE), [0, 1, 3, 5, 7, 0, 5, 3, 1], "the final norm stays gathered");
    assert_eq!(of(2 * WTE + 2 * LN_F), [0, 1, 3, 5, 7, 0, 3, 1], "the last block stays gathered too");
    assert_eq!(of(ALL), [0, 1, 3, 5, 7], "everything stays gathered");
    // The live limit still applies: a block is released once the next one is gathered.
    let options = GatherOptions { max_reuse_distance: ALL, max_live: 2 * BLOCK, ..plain().gather };
    let limited = gathers(&gathering(1, options));
    assert!(limited.len() > of(ALL).len() && limited.len() < of(0).len(), "{limited:?}");
}

#[test]
fn nothing_is_gathered_when_parameters_change() {
    let shape = shape(ZeroStage::Three);
    let options = GatherOptions { prefetch: ALL, max_live: ALL, max_reuse_distance: ALL, overlap: true };
    let program = gathering(3, options);
    let first_update = program.instructions.iter().position(|i| matches!(i, Update { .. })).unwrap();
    let (before, after) = program.instructions.split_at(first_update);
    let before = Program { instructions: before.to_vec(), micro_batches: 3 };
    moments(&before, &shape); // asserts that all segments are released
    assert!(after.iter().all(|i| !matches!(i, Gather { .. } | AwaitGather { .. } | Release { .. })));
}
