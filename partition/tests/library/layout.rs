//! Tests which rank holds which elements.

use candle_core::DType;
use zero_model::{Model, zoo};
use zero_optim::norm::BLOCK;
use zero_partition::{Layout, LayoutOptions, PAGE, TierOptions};
use zero_pipeline::{Placement, ZeroStage};

fn gpt2(width: usize) -> Model {
    let config = zoo::Gpt2Config {
        vocab_size: 97,
        n_positions: 33,
        n_embd: width,
        n_layer: 2,
        n_head: 1,
        ..zoo::Gpt2Config::default()
    };
    zoo::gpt2(&config).build(DType::F32).unwrap()
}

fn mlp(hidden_sizes: &[usize]) -> Model {
    let config = zoo::MlpConfig {
        input_size: 37,
        hidden_sizes: hidden_sizes.to_vec(),
        num_labels: 3,
        hidden_act: zoo::Activation::Relu,
        base: None,
    };
    zoo::mlp(&config).build(DType::F32).unwrap()
}

fn options(zero_stage: ZeroStage, ranks: usize) -> LayoutOptions {
    LayoutOptions {
        zero_stage,
        ranks,
        secondary: None,
        tensor: 1,
        persistence_threshold: 0,
        model_persistence_threshold: usize::MAX,
    }
}

/// Layouts with sizes around the block size, and numbers of ranks that do not divide them.
fn layouts() -> Vec<(Model, Layout)> {
    let models = || vec![gpt2(1), gpt2(31), gpt2(64), mlp(&[]), mlp(&[1]), mlp(&[27, 28, 1000, 500])];
    let mut all = vec![];
    for ranks in [1, 2, 3, 4, 7, 8, 64] {
        for model in models() {
            let layout = Layout::new(&model, &options(ZeroStage::Three, ranks));
            all.push((model, layout));
        }
    }
    all
}

#[test]
fn shards_cover_every_element_once() {
    for (model, layout) in layouts() {
        let mut holders: Vec<Vec<u32>> = model.parameters().iter().map(|p| vec![0; p.elements()]).collect();
        for segment in layout.segments() {
            assert_eq!(segment.bounds.len(), layout.ranks() + 1);
            assert_eq!((segment.bounds[0], segment.bounds[layout.ranks()]), (0, segment.elements()));
            for rank in 0..layout.ranks() {
                let shard = segment.shard(rank);
                assert!(shard.start <= shard.end);
                assert_eq!(segment.counts()[rank], shard.len());
                let mut covered = 0;
                for (parameter, inside, at) in segment.overlaps(shard.clone()) {
                    assert_eq!((inside.len(), at.start), (at.len(), covered), "pieces are contiguous in the shard");
                    covered = at.end;
                    holders[parameter][inside].iter_mut().for_each(|n| *n += 1);
                }
                assert_eq!(covered, shard.len());
            }
        }
        assert!(holders.iter().flatten().all(|&n| n == 1));
        assert_eq!(layout.elements(), model.elements());
    }
}

#[test]
fn a_large_parameter_is_a_segment_of_its_own() {
    let model = mlp(&[600, 600]);
    let layout = Layout::new(&model, &options(ZeroStage::Three, 2));
    let large = model.parameters().iter().position(|p| p.elements() == 600 * 600).unwrap();
    let alone: Vec<_> = layout.segments().iter().filter(|s| s.only_parameter() == Some(large)).collect();
    assert_eq!(alone.len(), 1);
    assert_eq!((alone[0].name.as_str(), alone[0].elements()), (model.parameters()[large].name(), 600 * 600));
    // Small parameters share a segment with the other small parameters of their layer.
    assert_eq!(layout.segments().len(), model.layers().len() + 1);
    // A large parameter that stays gathered also shares a segment.
    let persistent = LayoutOptions { persistence_threshold: usize::MAX, ..options(ZeroStage::Three, 2) };
    assert!(Layout::new(&model, &persistent).segments().iter().all(|s| s.only_parameter().is_none()));
}

/// Shard boundaries are boundaries of blocks of parameters. Each shard's contribution to the gradient norm is therefore
/// a sum of whole blocks, for any number of ranks.
#[test]
fn shard_boundaries_are_block_boundaries() {
    for (_, layout) in layouts() {
        for segment in layout.segments() {
            for &cut in &segment.bounds {
                let on_block = segment.pieces.iter().any(|piece| {
                    cut == piece.range.end || piece.range.contains(&cut) && (cut - piece.range.start) % BLOCK == 0
                });
                assert!(on_block, "{} is cut at {cut}", segment.name);
            }
        }
    }
}

#[test]
fn shards_are_nearly_equal() {
    for (_, layout) in layouts() {
        for segment in layout.segments() {
            for rank in 0..=layout.ranks() {
                let even = segment.elements() * rank / layout.ranks();
                let off = segment.bounds[rank].abs_diff(even);
                assert!(off <= BLOCK / 2, "{} is cut {off} elements off at rank {rank}", segment.name);
            }
        }
    }
}

#[test]
fn a_sub_group_size_of_0_is_the_shard_of_the_largest_parameter() {
    for (ranks, tile) in [(1, 4 * 64 * 64), (2, 2 * 64 * 64), (3, (4 * 64 * 64_usize).div_ceil(3))] {
        let layout = Layout::new(&gpt2(64), &options(ZeroStage::Three, ranks));
        let layout = layout.on_disk(&TierOptions { sub_group_size: 0, optimizer: true, ..TierOptions::MEMORY });
        assert_eq!(layout.tile(), tile.next_multiple_of(PAGE), "{ranks} ranks");
    }
}

#[test]
fn a_tied_parameter_is_alone_in_its_segment() {
    let model = gpt2(64);
    let layout = Layout::new(&model, &options(ZeroStage::Three, 2));
    let names: Vec<&str> = layout.segments().iter().map(|s| s.name.as_str()).collect();
    assert_eq!(
        names,
        ["transformer", "transformer.wte.weight", "transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    );
    let tied = &layout.segments()[1];
    assert_eq!(tied.pieces.len(), 1);
    assert_eq!(model.parameters()[tied.pieces[0].parameter].name(), "transformer.wte.weight");
    // The first layer needs the tied embedding and the positions; the head needs only the embedding.
    let needs: Vec<&[usize]> = layout.shape().layers.iter().map(|layer| layer.segments.as_slice()).collect();
    assert_eq!(needs, [&[0, 1][..], &[2], &[3], &[4], &[1]]);
}

#[test]
fn small_parameters_stay_gathered_at_stage_3() {
    let model = gpt2(64);
    let persistent = |zero_stage, persistence_threshold, model_persistence_threshold| {
        let options = LayoutOptions { persistence_threshold, model_persistence_threshold, ..options(zero_stage, 2) };
        let layout = Layout::new(&model, &options);
        let parameters = layout.segments().iter().filter(|s| s.placements.parameters == Placement::Replicated);
        let mut names: Vec<String> = parameters
            .flat_map(|s| s.pieces.iter().map(|p| model.parameters()[p.parameter].name().to_string()))
            .collect();
        names.sort();
        names
    };
    let small = |limit: usize| {
        let small = model.parameters().iter().filter(|p| p.elements() <= limit);
        let mut names: Vec<String> = small.map(|p| p.name().to_string()).collect();
        names.sort();
        names
    };
    assert!(persistent(ZeroStage::Three, 0, usize::MAX).is_empty());
    assert!(persistent(ZeroStage::Three, 63, usize::MAX).is_empty());
    let norms_and_biases = persistent(ZeroStage::Three, 64, usize::MAX);
    assert_eq!(norms_and_biases, small(64), "a parameter as large as the threshold stays gathered");
    assert_eq!(norms_and_biases.len(), 2 * 6 + 2);
    assert_eq!(persistent(ZeroStage::Three, 256, usize::MAX), small(256));
    assert_eq!(persistent(ZeroStage::Three, usize::MAX, usize::MAX).len(), model.parameters().len());
    // Parameters are selected in the order of construction, up to the threshold of the model.
    assert_eq!(
        persistent(ZeroStage::Three, 64, 3 * 64),
        ["transformer.h.0.attn.c_proj.bias", "transformer.h.0.ln_1.bias", "transformer.h.0.ln_1.weight"]
    );
    assert!(persistent(ZeroStage::Three, 64, 63).is_empty());
    // Below stage 3, all parameters are replicated, so none is gathered.
    assert_eq!(persistent(ZeroStage::Two, 0, usize::MAX).len(), model.parameters().len());
}

#[test]
fn a_zero_stage_places_every_segment() {
    let model = gpt2(64);
    for number in 0..=3 {
        let zero_stage = ZeroStage::from_number(number).unwrap();
        let layout = Layout::new(&model, &options(zero_stage, 3));
        assert!(layout.segments().iter().all(|s| s.placements == zero_stage.placements()));
        let shapes = layout.shape().segments.iter();
        assert!(shapes.zip(layout.segments()).all(|(a, b)| (a.elements, a.placements) == (b.elements(), b.placements)));
    }
}

/// A persistent parameter still has sharded gradients and optimizer state.
#[test]
fn persistence_applies_only_to_parameters() {
    let options = LayoutOptions { persistence_threshold: 64, ..options(ZeroStage::Three, 2) };
    let layout = Layout::new(&gpt2(64), &options);
    for segment in layout.segments() {
        assert_eq!(segment.placements.gradients, Placement::Sharded);
        assert_eq!(segment.placements.optimizer, Placement::Sharded);
        let kept = segment.name.ends_with("(persistent)");
        assert_eq!(segment.placements.parameters == Placement::Replicated, kept, "{}", segment.name);
    }
}

/// The secondary shards of a near group hold each element once. Their boundaries are boundaries of shards.
#[test]
fn secondary_shards_are_consecutive_shards() {
    for (ranks, near) in [(4, 2), (8, 2), (8, 4), (6, 3)] {
        let options =
            LayoutOptions { secondary: Some(near), persistence_threshold: 64, ..options(ZeroStage::Three, ranks) };
        let layout = Layout::new(&gpt2(64), &options);
        assert_eq!(layout.secondary(), Some(near));
        for (segment, shape) in layout.segments().iter().zip(&layout.shape().segments) {
            let is_sharded = segment.placements.parameters == Placement::Sharded;
            assert_eq!((segment.has_secondary(), shape.has_secondary), (is_sharded, is_sharded));
            if !is_sharded {
                assert!((0..ranks).all(|rank| segment.secondary_shard(rank).is_empty()));
                continue;
            }
            assert_eq!(segment.secondary_counts().iter().sum::<usize>(), segment.elements());
            for rank in 0..ranks {
                let (place, of) = (rank % near, ranks / near);
                let expected = segment.shard(place * of).start..segment.shard(place * of + of - 1).end;
                assert_eq!(segment.secondary_shard(rank), expected);
                assert_eq!(segment.secondary_counts()[place], expected.len());
            }
        }
    }
    for stage in [ZeroStage::Zero, ZeroStage::Two] {
        let layout = Layout::new(&gpt2(64), &LayoutOptions { secondary: Some(2), ..options(stage, 4) });
        assert!(!layout.segments().iter().any(zero_partition::Segment::has_secondary));
    }
}
