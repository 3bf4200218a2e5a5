//! Every rank of a pipeline sets, loads and reads parameters.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use zero_engine::Engine;

use super::{agreed, engine_of, gpt2, text};
use crate::world::{config, train, world};

const TIED: &str = "transformer.wte.weight";

fn names(engine: &Engine) -> Vec<String> {
    engine.model().parameters().iter().map(|p| p.name().to_string()).collect()
}

/// Values that differ from any initialization, exact in bf16 and f16.
fn values(elements: usize, salt: usize) -> Vec<f32> {
    (0..elements).map(|i| ((i * 7 + salt * 5) % 61) as f32 / 128.0 - 0.25).collect()
}

/// Losses of two steps that start from [`values`], on one stage.
fn expected_losses(zero_stage: u8, data: usize, more: &str) -> Vec<u32> {
    let all = world(data, |comm| {
        let mut engine = engine_of(gpt2(40, true), comm, &text(zero_stage, 4, "stages: 1", more));
        set_all(&mut engine);
        losses(&mut engine)
    });
    agreed(all, "one stage")
}

fn set_all(engine: &mut Engine) {
    for (salt, name) in names(engine).iter().enumerate() {
        let elements = engine.model().parameters()[salt].elements();
        engine.set_parameter(name, &values(elements, salt)).unwrap();
    }
}

fn losses(engine: &mut Engine) -> Vec<u32> {
    train(engine, 2).iter().map(|step| step.loss.to_bits()).collect()
}

fn assert_has_values(engine: &mut Engine, what: &str) {
    for (salt, name) in names(engine).iter().enumerate() {
        let found = engine.full_parameter(name).unwrap();
        assert!(found == values(found.len(), salt), "{name}: {what}");
    }
}

#[test]
fn initial_weights_reach_every_stage() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let shapes = world(1, |comm| {
        let engine = engine_of(gpt2(40, true), comm, &text(0, 4, "stages: 1", ""));
        engine.model().parameters().iter().map(|p| (p.name().to_string(), p.shape().clone())).collect::<Vec<_>>()
    });
    let tensor = |(salt, (name, shape)): (usize, &(String, candle_core::Shape))| {
        let values = values(shape.elem_count(), salt);
        (name.clone(), Tensor::from_vec(values, shape.clone(), &Device::Cpu).unwrap())
    };
    let weights: HashMap<String, Tensor> = shapes[0].iter().enumerate().map(tensor).collect();
    candle_core::safetensors::save(&weights, &path).unwrap();
    let section = format!("training: {{initial_weights: {}}}", path.display());
    for zero_stage in 0..=3 {
        for dtype in ["", "\nbf16: {enabled: true}", "\nfp16: {enabled: true}"] {
            for (stages, data) in [(2, 1), (3, 2)] {
                let expected = expected_losses(zero_stage, data, dtype);
                let text = text(zero_stage, 4, &format!("stages: {stages}"), &format!("{section}{dtype}"));
                world(stages * data, |comm| {
                    let mut engine = engine_of(gpt2(40, true), comm, &text);
                    assert_has_values(&mut engine, &text);
                    assert_eq!(losses(&mut engine), expected, "{text}");
                });
            }
        }
    }
}

/// The missing parameters belong to one stage, and all ranks report them.
#[test]
fn initial_weights_that_do_not_fit_are_refused_by_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("little.safetensors");
    let one = Tensor::zeros((61, 40), candle_core::DType::F32, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&HashMap::from([(TIED, one)]), &path).unwrap();
    let text = text(3, 4, "stages: 3", &format!("training: {{initial_weights: {}}}", path.display()));
    let said = world(6, |comm| {
        let made = Engine::with_communicator(config(6, &text), gpt2(40, true), comm);
        made.err().expect("a model without its weights").to_string()
    });
    assert!(agreed(said, &text).contains("` is missing; "));
}

#[test]
fn every_rank_sets_and_reads_every_parameter() {
    for zero_stage in 0..=3 {
        for (stages, data, schedule) in [(2, 2, "1f1b"), (3, 1, "interleaved_1f1b"), (3, 2, "zb_h1")] {
            let expected = expected_losses(zero_stage, data, "");
            let text = text(zero_stage, 4, &format!("stages: {stages}, schedule: {schedule}"), "");
            let all = world(stages * data, |comm| {
                let mut engine = engine_of(gpt2(40, true), comm, &text);
                set_all(&mut engine);
                assert_has_values(&mut engine, &text);
                let local: Vec<_> = names(&engine).iter().map(|n| engine.local_parameter(n).unwrap()).collect();
                assert!(engine.set_parameter(TIED, &[0.0]).is_err());
                assert!(engine.local_parameter("transformer.h.9.ln_1.weight").is_err());
                assert!(engine.full_parameter("transformer.h.9.ln_1.weight").is_err());
                // A tied parameter is also set on the stages that hold a copy. Otherwise the head would compute with
                // the old values.
                assert_eq!(losses(&mut engine), expected, "{text}");
                let elements = engine.model().parameters().iter().map(|p| p.elements()).collect::<Vec<_>>();
                (local, elements)
            });
            for (salt, &elements) in all[0].1.iter().enumerate() {
                let whole = values(elements, salt);
                let mut times = vec![0; elements];
                for (local, _) in &all {
                    let (start, part) = &local[salt];
                    assert!(*part == whole[*start..start + part.len()], "parameter {salt} in {text}");
                    times[*start..start + part.len()].iter_mut().for_each(|n| *n += 1);
                }
                // The replicas of the owning stage update the parameter. Each of them updates all of it, or only its
                // own shard.
                let by = if zero_stage == 0 { data } else { 1 };
                assert!(times.iter().all(|&n| n == by), "parameter {salt} in {text}");
            }
        }
    }
}
