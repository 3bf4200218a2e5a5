//! `training.initial_weights`: under every layout, each rank starts from the values in the files, or reports why they
//! do not fit.

use crate::world;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use world::{config, gpt2, world};
use zero_engine::Engine;

type Weights = BTreeMap<String, Tensor>;
/// All parameters of a rank, or the error from creating its engine.
type Started = Result<Vec<(String, Vec<f32>)>, String>;

/// Returns values for each parameter of the small model. They differ from any initialization and are exact in bf16 and
/// f16.
fn weights() -> Weights {
    let shapes = world(1, |comm| {
        let engine = Engine::with_communicator(config(1, "train_batch_size: 1"), gpt2(), comm).unwrap();
        let parameters = engine.model().parameters().iter();
        parameters.map(|p| (p.name().to_string(), p.shape().dims().to_vec())).collect::<Vec<_>>()
    });
    let values = |(index, (name, shape)): (usize, &(String, Vec<usize>))| {
        let elements: usize = shape.iter().product();
        let values: Vec<f32> = (0..elements).map(|i| ((i * 7 + index) % 61) as f32 / 64.0 - 0.5).collect();
        (name.clone(), Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap())
    };
    shapes[0].iter().enumerate().map(values).collect()
}

fn write(folder: &Path, name: &str, weights: &Weights) -> PathBuf {
    let path = folder.join(name);
    let weights: HashMap<&str, Tensor> = weights.iter().map(|(name, w)| (name.as_str(), w.clone())).collect();
    candle_core::safetensors::save(&weights, &path).unwrap();
    path
}

/// Returns each rank's parameters in a new engine, or its error.
fn started(ranks: usize, sources: &str, more: &str) -> Vec<Started> {
    let text = format!("train_micro_batch_size_per_gpu: 1\ntraining: {{initial_weights: {sources}}}\n{more}");
    world(ranks, |comm| {
        let mut engine =
            Engine::with_communicator(config(ranks, &text), gpt2(), comm).map_err(|error| error.to_string())?;
        let names: Vec<String> = engine.model().parameters().iter().map(|p| p.name().to_string()).collect();
        Ok(names.into_iter().map(|name| (name.clone(), engine.full_parameter(&name).unwrap())).collect())
    })
}

#[test]
fn every_layout_starts_from_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let weights = weights();
    for (dtype, name) in [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")] {
        let converted = weights.iter().map(|(name, w)| (name.clone(), w.to_dtype(dtype).unwrap())).collect();
        let path = write(folder.path(), &format!("{name}.safetensors"), &converted);
        for more in ["", "bf16: {enabled: true}", "fp16: {enabled: true}"] {
            for zero_stage in 0..=3 {
                let zero =
                    format!("zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 64}}");
                for rank in started(3, &path.display().to_string(), &format!("{zero}\n{more}")) {
                    for (parameter, values) in rank.unwrap() {
                        let expected = weights[&parameter].flatten_all().unwrap().to_vec1::<f32>().unwrap();
                        assert!(values == expected, "{parameter} of {name}, stage {zero_stage}, {more}");
                    }
                }
            }
        }
    }
}

#[test]
fn weights_may_span_several_files() {
    let folder = tempfile::tempdir().unwrap();
    let weights = weights();
    let (mut one, mut other) = (Weights::new(), Weights::new());
    for (index, (name, tensor)) in weights.iter().enumerate() {
        let part = if index % 2 == 0 { &mut one } else { &mut other };
        part.insert(name.clone(), tensor.clone());
    }
    write(folder.path(), "model-00001-of-00002.safetensors", &one);
    write(folder.path(), "model-00002-of-00002.safetensors", &other);
    let values = started(2, &format!("{}/*.safetensors", folder.path().display()), "");
    for (parameter, values) in values.into_iter().flat_map(Result::unwrap) {
        assert!(values == weights[&parameter].flatten_all().unwrap().to_vec1::<f32>().unwrap(), "{parameter}");
    }
}

#[test]
fn unsuitable_files_are_rejected_by_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let changed = |name: &str, change: &dyn Fn(&mut Weights)| {
        let mut weights = weights();
        change(&mut weights);
        write(folder.path(), name, &weights).display().to_string()
    };
    let norm = "transformer.ln_f.weight";
    let whole = changed("whole.safetensors", &|_| {});
    let cut = changed("cut.safetensors", &|_| {});
    let bytes = fs::read(&cut).unwrap();
    fs::write(&cut, &bytes[..bytes.len() - 100]).unwrap();
    let header = folder.path().join("header.safetensors");
    fs::write(&header, u64::MAX.to_le_bytes()).unwrap();
    let again = write(folder.path(), "again.safetensors", &weights()).display().to_string();
    let integers = |weights: &mut Weights| {
        let tensor = weights[norm].to_dtype(DType::U32).unwrap();
        weights.insert(norm.into(), tensor);
    };
    let narrow = |weights: &mut Weights| {
        let tensor = weights[norm].narrow(0, 0, 31).unwrap();
        weights.insert(norm.into(), tensor);
    };
    let strange = |weights: &mut Weights| {
        let tensor = weights[norm].clone();
        weights.insert("transformer.h.0.attn.bias".into(), tensor);
    };
    let cases = [
        (
            changed("missing.safetensors", &|w| drop(w.remove(norm))),
            "missing.safetensors is incompatible: `transformer.ln_f.weight` is missing",
        ),
        (changed("strange.safetensors", &strange), "`transformer.h.0.attn.bias` is not in the model"),
        (
            changed("narrow.safetensors", &narrow),
            "`transformer.ln_f.weight` has shape [31] in the file and [32] in the model",
        ),
        (
            changed("integers.safetensors", &integers),
            "`transformer.ln_f.weight` has dtype U32; only F32, BF16 and F16 are supported",
        ),
        (format!("[{whole}, {again}]"), "is the same parameter as"),
        (cut, "cut.safetensors is damaged: the file has "),
        (header.display().to_string(), "the header claims to have 18446744073709551615 bytes"),
        (folder.path().join("nowhere.safetensors").display().to_string(), "No such file"),
    ];
    for (source, reason) in cases {
        for rank in started(2, &source, "zero_optimization: {stage: 3, stage3_param_persistence_threshold: 64}") {
            let error = rank.expect_err(&source);
            assert!(error.contains(reason), "{source}: {error}");
        }
    }
}
