//! Checks that passes respect their limits by walking the programs that they write.

mod gathers;

use zero_partition::passes::{
    GatherOptions, OffloadOptions, PassOptions, RecomputeOptions, ReduceOptions, RefreshOptions, Share, training_step,
};
use zero_pipeline::Instruction::{self, *};
use zero_pipeline::{Item, ModelShape, Program, Schedule, Stages, Tier, Tiers, ZeroStage};

use crate::{layer, segment, validate};

const WTE: usize = 640;
const BLOCK: usize = 1200;
const NORMS: usize = 24;
const LN_F: usize = 20;
const ALL: usize = usize::MAX;

/// Returns an embedding tied to the head, three blocks whose norms stay gathered at stage 3, and a final norm.
fn shape(zero_stage: ZeroStage) -> ModelShape {
    let segment = |elements| segment(zero_stage, elements, elements == NORMS);
    ModelShape {
        layers: vec![
            layer("embed", &[0]),
            layer("block.0", &[1, 2]),
            layer("block.1", &[3, 4]),
            layer("block.2", &[5, 6]),
            layer("ln_f", &[7]),
            layer("head", &[0]),
        ],
        segments: [WTE, BLOCK, NORMS, BLOCK, NORMS, BLOCK, NORMS, LN_F].map(segment).to_vec(),
    }
}

/// Returns options without prefetching, reuse and overlap; each layer is reduced and refreshed by itself.
fn plain() -> PassOptions {
    PassOptions {
        offload: OffloadOptions::PLAIN,
        recompute: RecomputeOptions::none(),
        gather: GatherOptions { prefetch: 0, max_live: ALL, max_reuse_distance: 0, overlap: false },
        reduce: ReduceOptions { bucket: None, overlap: false },
        refresh: RefreshOptions { bucket: None, overlap: false, last: false },
    }
}

fn step(zero_stage: ZeroStage, micro_batches: usize, options: &PassOptions) -> Program {
    let shape = shape(zero_stage);
    let stages = Stages::single(&shape);
    let share = Share { shape: &shape, stages: &stages, stage: 0 };
    let program = training_step(&share, Schedule::OneFOneB, micro_batches, options);
    validate(&[program.clone(), program.clone()], &shape).unwrap_or_else(|e| panic!("{options:?}: {e}\n{program}"));
    program
}

fn count(program: &Program, of: impl Fn(&Instruction) -> bool) -> usize {
    program.instructions.iter().filter(|i| of(i)).count()
}

#[test]
fn every_stage_and_setting_makes_a_valid_program() {
    for micro_batches in 1..=4 {
        for overlap in [false, true] {
            for bucket in [None, Some(1), Some(BLOCK + NORMS), Some(ALL)] {
                let reduce = ReduceOptions { bucket, overlap };
                let refresh = RefreshOptions { bucket, overlap, last: false };
                for zero_stage in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two] {
                    step(zero_stage, micro_batches, &PassOptions { reduce, refresh, ..plain() });
                }
                for prefetch in [0, 1, BLOCK, BLOCK + WTE, ALL] {
                    for max_live in [0, BLOCK, 2 * BLOCK, ALL] {
                        for max_reuse_distance in [0, BLOCK, ALL] {
                            let gather = GatherOptions { prefetch, max_live, max_reuse_distance, overlap };
                            step(ZeroStage::Three, micro_batches, &PassOptions { gather, reduce, refresh, ..plain() });
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn reductions_stay_within_their_bucket() {
    for zero_stage in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        let shape = shape(zero_stage);
        for overlap in [false, true] {
            for limit in [1, NORMS, BLOCK, BLOCK + NORMS, 2 * BLOCK + 2 * NORMS, ALL] {
                let reduce = ReduceOptions { bucket: Some(limit), overlap };
                let program = step(zero_stage, 2, &PassOptions { reduce, ..plain() });
                let buckets = buckets(&program);
                for bucket in &buckets {
                    let elements: usize = bucket.iter().map(|&s| shape.segments[s].elements).sum();
                    assert!(elements <= limit || bucket.len() == 1, "{bucket:?} has {elements}, {limit} allowed");
                }
                // Each segment is reduced once per micro-batch if gradients are sharded, else once; last layer first.
                let rounds = if zero_stage >= ZeroStage::Two { 2 } else { 1 };
                assert_eq!(buckets.concat(), [7, 5, 6, 3, 4, 1, 2, 0].repeat(rounds));
            }
            let reduce = ReduceOptions { bucket: Some(ALL), overlap };
            let whole = buckets(&step(zero_stage, 1, &PassOptions { reduce, ..plain() }));
            assert_eq!(whole, [vec![7, 5, 6, 3, 4, 1, 2, 0]], "one bucket for all segments");
            let by_layer = buckets(&step(zero_stage, 1, &plain()));
            assert_eq!(by_layer, [vec![7], vec![5, 6], vec![3, 4], vec![1, 2], vec![0]], "auto: one bucket per layer");
        }
    }
}

fn buckets(program: &Program) -> Vec<Vec<usize>> {
    let of = |i: &Instruction| if let Reduce { segments, .. } = i { Some(segments.clone()) } else { None };
    program.instructions.iter().filter_map(of).collect()
}

#[test]
fn refreshes_stay_within_their_bucket() {
    for zero_stage in [ZeroStage::One, ZeroStage::Two] {
        let shape = shape(zero_stage);
        for overlap in [false, true] {
            let buckets = [None, Some(1), Some(BLOCK + NORMS), Some(ALL)];
            for (bucket, last) in buckets.into_iter().flat_map(|bucket| [(bucket, false), (bucket, true)]) {
                let refresh = RefreshOptions { bucket, overlap, last };
                let program = step(zero_stage, 1, &PassOptions { refresh, ..plain() });
                let of = |i: &Instruction| if let Refresh { segments } = i { Some(segments.clone()) } else { None };
                let refreshes: Vec<_> = program.instructions.iter().filter_map(of).collect();
                for segments in &refreshes {
                    let elements: usize = segments.iter().map(|&s| shape.segments[s].elements).sum();
                    assert!(segments.len() == 1 || elements <= bucket.unwrap_or(ALL), "{segments:?} has {elements}");
                }
                if bucket.is_none() {
                    assert_eq!(refreshes, [&[0][..], &[1, 2], &[3, 4], &[5, 6], &[7]], "auto: one bucket per layer");
                }
                assert_eq!(refreshes.concat(), [0, 1, 2, 3, 4, 5, 6, 7]);
                if last {
                    let first = program.instructions.iter().position(|i| of(i).is_some()).unwrap();
                    assert_eq!(program.instructions[first..].iter().filter(|i| matches!(i, Update { .. })).count(), 0);
                }
            }
        }
    }
    // After the updates, only persistent segments differ between ranks at stage 3, and none at stage 0.
    let of = |zero_stage| count(&step(zero_stage, 1, &plain()), |i| matches!(i, Refresh { .. }));
    assert_eq!((of(ZeroStage::Zero), of(ZeroStage::Three)), (0, 3));
}

#[test]
fn without_overlap_everything_is_awaited_where_it_starts() {
    for zero_stage in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        let gather = GatherOptions { prefetch: ALL, ..plain().gather };
        let program = step(zero_stage, 2, &PassOptions { gather, ..plain() });
        for pair in program.instructions.windows(2) {
            let awaited = match (&pair[0], &pair[1]) {
                (Gather { segments }, next) => *next == AwaitGather { segments: segments.clone() },
                (Reduce { segments, micro_batch }, next) => {
                    *next == AwaitReduce { segments: segments.clone(), micro_batch: *micro_batch }
                }
                (Refresh { segments }, next) => *next == AwaitRefresh { segments: segments.clone() },
                _ => true,
            };
            assert!(awaited, "`{}` is followed by `{}`", pair[0], pair[1]);
        }
    }
}

#[test]
fn with_overlap_a_reduction_runs_during_the_next_backward() {
    let reduce = ReduceOptions { bucket: None, overlap: true };
    let program = step(ZeroStage::Two, 1, &PassOptions { reduce, ..plain() });
    let at = |wanted: Instruction| program.instructions.iter().position(|i| *i == wanted).unwrap();
    for (segments, layer) in [(vec![7], 3), (vec![5, 6], 2), (vec![3, 4], 1), (vec![1, 2], 0)] {
        let start = at(Reduce { segments: segments.clone(), micro_batch: 0 });
        let end = at(AwaitReduce { segments, micro_batch: 0 });
        let backward = at(Backward { layer, micro_batch: 0 });
        assert!(start < backward && backward < end, "\n{program}");
    }
}

#[test]
fn gradients_are_written_during_the_next_backward() {
    let mut shape = shape(ZeroStage::Two);
    for segment in &mut shape.segments {
        segment.tiers = Tiers { gradients: Tier::Nvme, optimizer: Tier::Nvme, tiles: 1, ..Tiers::default() };
    }
    let stages = Stages::single(&shape);
    let share = Share { shape: &shape, stages: &stages, stage: 0 };
    for micro_batches in 1..=3 {
        let options = PassOptions { reduce: ReduceOptions { bucket: None, overlap: true }, ..plain() };
        let program = training_step(&share, Schedule::OneFOneB, micro_batches, &options);
        assert_eq!(validate(&[program.clone(), program.clone()], &shape), Ok(()), "{program}");
        // For each write in flight, track whether a backward has run since its start.
        let (mut writing, mut behind_a_backward, mut others) = (vec![], 0, 0);
        for instruction in &program.instructions {
            match instruction {
                Offload { item: item @ Item::Gradients { .. } } => writing.push((*item, false)),
                Backward { .. } => writing.iter_mut().for_each(|(_, seen)| *seen = true),
                AwaitOffload { item: item @ Item::Gradients { .. } } => {
                    let at = writing.iter().position(|(other, _)| other == item).unwrap();
                    if writing.remove(at).1 { behind_a_backward += 1 } else { others += 1 }
                }
                _ => {}
            }
        }
        assert_eq!(behind_a_backward + others, micro_batches * shape.segments.len());
        // Every write overlaps with a backward, except at the end of the step, before the norm.
        assert!(others <= 4, "{others} of {} are waited for at once:\n{program}", behind_a_backward + others);
    }
}
