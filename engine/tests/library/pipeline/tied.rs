//! A tied parameter across stages: all copies stay equal, and one stage owns the parameter.

use std::collections::BTreeMap;

use candle_core::Tensor;
use candle_nn::VarBuilder;
use zero_checkpoint::Manifest;
use zero_engine::{Activations, Engine, Kind, Layer, Layers, Pass, ops};

use super::{SCHEDULES, assert_same, engine_of, gpt2, run_of, text};
use crate::world::{train, world};

/// A layer with a residual connection, made of plain candle operations.
struct Residual(candle_nn::Linear);

impl Layer for Residual {
    fn run(&self, x: &Activations, _: &Pass) -> candle_core::Result<Activations> {
        let x = x.single()?;
        Ok((x + candle_nn::Module::forward(&self.0, x)?.tanh()?)?.into())
    }
}

/// Six layers, four of which share one weight. With two stages of two chunks each, the weight moves back and forth
/// between the stages.
fn four_users() -> Layers {
    let residual = |_, vb: VarBuilder| Ok(Residual(candle_nn::linear(40, 40, vb)?));
    let layers = Layers::new()
        .layer("embed", |vb: VarBuilder| candle_nn::embedding(61, 40, vb))
        .layers("residual", 4, residual)
        .layer("head", |vb: VarBuilder| candle_nn::linear(40, 61, vb))
        .loss(ops::cross_entropy);
    (1..4).fold(layers, |layers, i| layers.tie("residual.0.weight", format!("residual.{i}.weight")))
}

#[test]
fn a_parameter_tied_four_times_matches_one_stage_bit_for_bit() {
    for zero_stage in 0..=3 {
        for data in [1, 2] {
            let of = |stages: usize, schedule: &str| {
                let pipeline = format!("stages: {stages}, schedule: {schedule}, partition_method: uniform");
                run_of(four_users, stages * data, 3, &text(zero_stage, 4, &pipeline, ""))
            };
            let expected = of(1, "1f1b");
            for (stages, schedules) in [(2, &SCHEDULES[..]), (3, &SCHEDULES[..]), (6, &["1f1b", "zb_h1"])] {
                for schedule in schedules {
                    let what = format!("{schedule}, {stages} × {data}, ZeRO {zero_stage}");
                    assert_same(&expected, &of(stages, schedule), &what);
                }
            }
        }
    }
}

/// Returns the bits of a parameter, or of this rank's shard of it if the parameter is sharded, and the index of the
/// first element.
fn held(engine: &Engine, name: &str, zero_stage: u8) -> Option<(usize, Vec<u32>)> {
    let zero = engine.zero();
    let id = engine.model().parameters().iter().position(|p| p.name() == name).unwrap();
    let range = zero.held_ranges(Kind::Parameter).into_iter().find(|range| range.parameter == id)?;
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let parameter = &engine.model().parameters()[id];
    let leaf = || parameter.leaf().flatten_all()?.to_vec1::<f32>();
    Some(match zero_stage {
        3 => (range.elements.start, bits(zero.read(Kind::Parameter, &range).unwrap())),
        _ => (0, bits(leaf().unwrap())),
    })
}

#[test]
fn copies_of_tied_parameters_stay_bit_identical() {
    const NAME: &str = "transformer.wte.weight";
    for zero_stage in 0..=3u8 {
        for data in [1, 2] {
            for stages in [2, 3] {
                let schedule = SCHEDULES[(usize::from(zero_stage) + stages + data) % 4];
                let text = text(zero_stage, 2, &format!("stages: {stages}, schedule: {schedule}"), "");
                let all = world(stages * data, |comm| {
                    let mut engine = engine_of(gpt2(40, true), comm, &text);
                    let first = held(&engine, NAME, zero_stage);
                    train(&mut engine, 5);
                    let segment = engine.zero().layout().segments().iter().position(|s| s.name == NAME).unwrap();
                    let holds = engine.zero().stages().holds(engine.zero().groups().at().stage, segment);
                    (
                        engine.replica(),
                        holds,
                        first,
                        held(&engine, NAME, zero_stage),
                        engine.full_parameter(NAME).unwrap(),
                    )
                });
                assert_eq!(all.iter().filter(|rank| rank.1).count(), 2 * data, "the first and the last stage hold it");
                let mut copies: BTreeMap<usize, Vec<_>> = BTreeMap::new();
                for (replica, holds, first, last, full) in all {
                    assert_eq!((holds, holds), (first.is_some(), last.is_some()), "{text}");
                    let (Some(first), Some(last)) = (first, last) else { continue };
                    assert!(first != last, "five steps did not change the parameter: {text}");
                    let part: Vec<u32> = full[last.0..last.0 + last.1.len()].iter().map(|x| x.to_bits()).collect();
                    assert!(last.1 == part, "a copy differs from the parameter: {text}");
                    // At stage 3, each replica has another shard, so compare copies of the same shard.
                    copies.entry(if zero_stage < 3 { 0 } else { replica }).or_default().push((first, last));
                }
                for copies in copies.into_values() {
                    assert!(copies.len() >= 2 && copies.iter().all(|copy| *copy == copies[0]), "{text}");
                }
            }
        }
    }
}

#[test]
fn a_checkpoint_stores_each_element_once_by_its_owner() {
    let root = tempfile::tempdir().unwrap();
    for zero_stage in 0..=3 {
        for (stages, data, schedule) in [(2, 2, "interleaved_1f1b"), (3, 1, "1f1b"), (3, 2, "zb_h1")] {
            let text = text(zero_stage, 2, &format!("stages: {stages}, schedule: {schedule}"), "");
            let root = root.path().join(format!("{zero_stage}-{stages}-{data}"));
            let mut all = world(stages * data, |comm| {
                let mut engine = engine_of(gpt2(40, true), comm, &text);
                train(&mut engine, 1);
                let folder = engine.save_checkpoint(&root).unwrap();
                let zero = engine.zero();
                let owner = |parameter: usize| {
                    let with = |s: &zero_partition::Segment| s.pieces.iter().any(|p| p.parameter == parameter);
                    zero.stages().owner(zero.layout().segments().iter().position(with).unwrap())
                };
                let all = engine.model().parameters().iter().enumerate();
                let owners: BTreeMap<_, _> = all.map(|(p, named)| (named.name().to_string(), owner(p))).collect();
                (folder, owners, engine.model().elements())
            });
            let (folder, owners, elements) = all.swap_remove(0);
            assert_eq!(owners["transformer.wte.weight"], 0, "its first user is the embedding");
            let manifest = Manifest::read(&folder).unwrap();
            assert_eq!(manifest.parameters.len(), owners.len());
            let load = |shard: &zero_checkpoint::ShardEntry| -> BTreeMap<String, Tensor> {
                let all = candle_core::safetensors::load(folder.join(&shard.file), &candle_core::Device::Cpu);
                all.unwrap().into_iter().collect()
            };
            let shards: Vec<_> = manifest.shards.iter().map(load).collect();
            assert_eq!(shards.len(), stages * data);
            for (name, parameter) in &manifest.parameters {
                for piece in &parameter.pieces {
                    assert_eq!(piece.shard / data, owners[name], "{name} in {text}");
                    let tensor = &shards[piece.shard][&format!("{name}@{}", piece.start)];
                    assert_eq!(tensor.elem_count(), piece.end - piece.start);
                }
            }
            // The checkpoint contains the parameters and two states of each, and nothing else.
            let written: usize = shards.iter().flat_map(BTreeMap::values).map(Tensor::elem_count).sum();
            assert_eq!(written, 3 * elements, "{text}");
        }
    }
}

#[test]
fn memory_of_messages_is_released() {
    for zero_stage in 0..=3 {
        for schedule in SCHEDULES {
            let text = text(zero_stage, 4, &format!("stages: 2, schedule: {schedule}"), "");
            let left = world(4, |comm| {
                let mut engine = engine_of(gpt2(40, true), comm, &text);
                train(&mut engine, 3);
                let ledger = engine.zero().ledger();
                let used = ledger.now(zero_partition::Category::Staging) - engine.zero().idle_bytes();
                (used, ledger.peak(zero_partition::Category::Staging) > 0)
            });
            assert_eq!(left, [(0, true); 4], "{schedule}, ZeRO {zero_stage}");
        }
    }
}
