//! Adafactor: losses match PyTorch's, the state has the planned bytes in memory and in checkpoints, and a run with a
//! large matrix resumes.

use std::path::{Path, PathBuf};

use zero_engine::{Config, Engine, Layers, zoo};

use crate::optimizers::groups::fifty_steps_agree;
use crate::optimizers::whole_parameters::{ADAFACTOR, text};
use crate::sharding::bytes::{assert_state, state_values};
use crate::world::{batch, engine, world};

#[test]
fn fifty_steps_agree_with_pytorch() {
    let cases = [
        ["GPT2", "torch.optim.Adafactor", "type: Adafactor, params: {lr: 1.0e-3, weight_decay: 0.1}"],
        [
            "Llama",
            "torch.optim.Adafactor, beta2_decay=-0.5, eps=(1e-4, 0.05), d=1.5",
            "type: Adafactor, params: {lr: 1.0e-3, weight_decay: 0.1, beta2_decay: -0.5, eps: [1.0e-4, 0.05], d: 1.5}",
        ],
    ];
    fifty_steps_agree(&["torch", "transformers"], "", &cases);
}

/// The state of a matrix has one value for each row and each column. The state of any other parameter has one value for
/// each element. A checkpoint stores the same number of values.
#[test]
fn bytes_match_the_formula() {
    let root = tempfile::tempdir().unwrap();
    for (ranks, zero_stage, ema) in [(1, 0, false), (2, 0, false), (2, 1, true), (2, 2, false), (4, 3, true)] {
        let folder = root.path().join(format!("{ranks}-{zero_stage}"));
        let averages = if ema { "training: {ema: {decay: 0.9}}" } else { "" };
        let text = text(zero_stage, 1, &format!("{ADAFACTOR}\n{averages}"));
        let of_ranks = world(ranks, |comm| {
            let mut engine = engine(comm, &text);
            engine.train_batch(&batch(0, ranks)).unwrap();
            engine.save_checkpoint(&folder).unwrap();
            let held = assert_state(&engine, &text).optimizer;
            assert_eq!(held, 4 * state_values(engine.zero()), "{text}");
            let of_parameter = |parameter: &zero_model::Parameter| match parameter.shape().dims() {
                [rows, columns] => rows + columns,
                _ => parameter.elements(),
            };
            let model = engine.model();
            let averaged = if ema { model.elements() } else { 0 };
            (held, model.parameters().iter().map(of_parameter).sum::<usize>() + averaged, model.elements() + averaged)
        });
        let (_, states, others) = of_ranks[0];
        let total: u64 = of_ranks.iter().map(|(held, ..)| held).sum();
        let copies = if zero_stage == 0 { ranks } else { 1 };
        assert_eq!(total, (4 * states * copies) as u64, "{text}");
        let step = checkpoint(&folder);
        let shards = std::fs::read_dir(&step).unwrap().map(|file| file.unwrap().path());
        let shards = shards.filter(|file| file.extension().is_some_and(|extension| extension == "safetensors"));
        let saved: u64 = shards.map(|file| data_bytes(&std::fs::read(file).unwrap())).sum();
        let averaged = if ema { others / 2 } else { 0 };
        assert_eq!(saved, 4 * (others + states - averaged) as u64, "{text}");
        let manifest = zero_checkpoint::Manifest::read(&step).unwrap();
        let stored = manifest.parameters.values().map(|entry| entry.stored_values(manifest.states.len()));
        assert_eq!(saved, 4 * stored.sum::<usize>() as u64, "{text}");
        assert_eq!(zero_checkpoint::verify(&step), []);
    }
}

/// Returns the folder of the only checkpoint.
fn checkpoint(root: &Path) -> PathBuf {
    let folders = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let is_step = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("step-");
    let steps: Vec<PathBuf> = folders.filter(is_step).collect();
    assert_eq!(steps.len(), 1, "{steps:?}");
    steps[0].clone()
}

/// Bytes of the tensors of a safetensors file.
fn data_bytes(file: &[u8]) -> u64 {
    let header = u64::from_le_bytes(file[..8].try_into().unwrap());
    file.len() as u64 - 8 - header
}

/// A matrix of more than 4 million elements is saved in several pieces. The first piece contains the row and column
/// factors of the whole matrix.
#[test]
fn a_large_matrix_is_resumed() {
    resumes_a_large_matrix(ADAFACTOR, |layers| layers);
}

/// Resumes a model with a matrix of more than 4 million elements.
pub(crate) fn resumes_a_large_matrix(optimizer: &str, with_optimizer: impl Fn(Layers) -> Layers + Sync) {
    let folder = tempfile::tempdir().unwrap();
    let layers = || {
        with_optimizer(zoo::mlp(&zoo::MlpConfig {
            input_size: 2100,
            hidden_sizes: vec![2050],
            num_labels: 2,
            hidden_act: zoo::Activation::Relu,
            base: None,
        }))
    };
    let batch = |step: usize| {
        let input: Vec<f32> = (0..2 * 2100).map(|i| ((i * 7 + step * 13) % 11) as f32 / 11.0 - 0.4).collect();
        zero_engine::Batch::new(
            candle_core::Tensor::from_vec(input, (2, 2100), &candle_core::Device::Cpu).unwrap(),
            candle_core::Tensor::from_vec(vec![0u32, 1], 2, &candle_core::Device::Cpu).unwrap(),
        )
    };
    let run = |ranks: usize, steps: [usize; 2], more: &str| {
        let text = format!(
            "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {}\n{optimizer}\ntraining: {{reproducible: true}}\nzero_optimization: {{{more}}}",
            2 / ranks
        );
        world(ranks, |comm| {
            let config = Config::with_world_size("test.yaml", &text, ranks).unwrap_or_else(|error| panic!("{error}"));
            let mut engine = Engine::with_communicator(config, layers(), comm).unwrap();
            if steps[0] > 0 {
                engine.resume(folder.path()).unwrap();
            }
            let losses: Vec<f32> =
                (steps[0]..steps[1]).map(|step| engine.train_batch(&batch(step)).unwrap().loss).collect();
            if steps == [0, 2] {
                engine.save_checkpoint(folder.path()).unwrap();
            }
            losses
        })
        .remove(0)
    };
    let whole = run(1, [0, 4], "stage: 0");
    run(2, [0, 2], "stage: 3");
    assert_eq!(zero_checkpoint::verify(&checkpoint(folder.path())), []);
    assert_eq!(run(2, [2, 4], "stage: 1"), whole[2..]);
    assert_eq!(run(1, [2, 4], "stage: 2"), whole[2..]);
}
