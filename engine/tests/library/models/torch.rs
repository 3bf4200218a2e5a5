//! Compares the engine with PyTorch: a GPT of 10.8M parameters trains 20 steps from the same weights on the same
//! tokens.
//!
//! PyTorch recorded the expected trajectory. With `ZERO_TRAIN_PEER_OUT=FOLDER` the test writes weights, tokens and
//! settings to the folder. `scripts/peer_trajectory.py FOLDER` trains on them and prints the fixture.

use crate::world;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use world::world;
use zero_engine::{Batch, Config, Engine, zoo};

const LAYERS: usize = 6;
const WIDTH: usize = 384;
const HEADS: usize = 6;
const TIME: usize = 256;
const VOCABULARY: usize = 256;
const MICRO_BATCH: usize = 4;
const LR: f64 = 3e-4;
const WEIGHT_DECAY: f64 = 0.01;
const STEPS: usize = 20;
/// Relative tolerance of a loss. Different rounding leads to differences of about 1e-6 after 20 steps.
const TOLERANCE: f64 = 1e-5;

/// The settings of PyTorch's run, which the fixture records.
fn settings() -> Value {
    json!({
        "n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": TIME, "vocab_size": VOCABULARY,
        "batch_size": MICRO_BATCH, "steps": STEPS, "lr": LR, "betas": [0.9, 0.999], "eps": 1e-8,
        "weight_decay": WEIGHT_DECAY, "clip": 1.0
    })
}

fn config() -> Config {
    let text = format!(
        "train_micro_batch_size_per_gpu: {MICRO_BATCH}\ngradient_clipping: 1.0\n\
         optimizer: {{type: AdamW, params: {{lr: {LR}, betas: [0.9, 0.999], eps: 1.0e-8, weight_decay: {WEIGHT_DECAY}}}}}\n\
         training: {{seed: 1234, weight_decay_on: all}}"
    );
    Config::with_world_size("torch.yaml", text, 1).unwrap_or_else(|e| panic!("{e}"))
}

fn model() -> zero_engine::Layers {
    zoo::gpt2(&zoo::Gpt2Config {
        vocab_size: VOCABULARY,
        n_positions: TIME,
        n_embd: WIDTH,
        n_layer: LAYERS,
        n_head: HEADS,
        ..zoo::Gpt2Config::default()
    })
}

/// Returns tokens that advance by 1 to 8 through the vocabulary, drawn by a linear congruential generator. The loss can
/// fall from ln 256 to ln 8.
fn tokens(count: usize) -> Vec<u16> {
    let (mut state, mut token) = (1u32, 0u32);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        token = (token + 1 + (state >> 29)) % VOCABULARY as u32;
        token as u16
    };
    (0..count).map(next).collect()
}

/// Returns the batch of a step. Rows are numbered over all steps: row `i` is `tokens[i·TIME..]`, with targets shifted
/// by one. After the last full row, the rows start again from the first.
fn batch(tokens: &[u16], step: usize) -> Batch {
    let rows = (tokens.len() - 1) / TIME;
    let pick = |shift: usize| {
        let row = |i: usize| tokens[(i % rows) * TIME + shift..][..TIME].iter().map(|&t| u32::from(t));
        let ids: Vec<u32> = (step * MICRO_BATCH..(step + 1) * MICRO_BATCH).flat_map(row).collect();
        Tensor::from_vec(ids, (MICRO_BATCH, TIME), &Device::Cpu).unwrap()
    };
    Batch::new(pick(0), pick(1))
}

/// Trains on one rank and compares each loss.
fn compare(engine: &mut Engine, tokens: &[u16], expected: &[f64]) {
    let mut largest = 0f64;
    for (step, expected) in expected.iter().enumerate() {
        let taken = engine.train_batch(&batch(tokens, step)).unwrap();
        let off = (f64::from(taken.loss) - expected).abs() / expected;
        let ms = taken.duration.as_secs_f64() * 1e3;
        println!("step {:2}: {:.6}, PyTorch {expected:.6}, off by {off:.1e}, {ms:.0} ms", step + 1, taken.loss);
        largest = largest.max(off);
    }
    println!("largest relative difference: {largest:.1e}");
    assert!(largest <= TOLERANCE, "losses differ by {largest:e}");
}

fn losses(of: &Value) -> Vec<f64> {
    of.as_array().expect("losses").iter().map(|loss| loss.as_f64().expect("a number")).collect()
}

#[test]
fn losses_agree_with_the_recorded_run_of_pytorch() {
    let tokens = tokens(STEPS * MICRO_BATCH * TIME + 1);
    world(1, |comm| {
        let mut engine = Engine::with_communicator(config(), model(), comm).unwrap();
        assert_eq!(engine.model().elements(), 10_844_160);
        if let Some(folder) = std::env::var_os("ZERO_TRAIN_PEER_OUT") {
            write_for_pytorch(&mut engine, &tokens, Path::new(&folder));
            return;
        }
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/torch_10m.json");
        let fixture: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        assert_eq!(fixture["settings"], settings(), "the fixture was made with other settings");
        let expected = losses(&fixture["losses"]);
        assert_eq!(expected.len(), STEPS);
        assert!(expected[STEPS - 1] < 0.7 * expected[0], "the loss does not fall");
        compare(&mut engine, &tokens, &expected);
    });
}

fn write_for_pytorch(engine: &mut Engine, tokens: &[u16], folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let parameters: Vec<_> =
        engine.model().parameters().iter().map(|p| (p.name().to_string(), p.shape().clone())).collect();
    let tensor = |(name, shape): (String, _)| {
        let values = Tensor::from_vec(engine.full_parameter(&name).unwrap(), shape, &Device::Cpu).unwrap();
        (name, values)
    };
    let weights: HashMap<String, Tensor> = parameters.into_iter().map(tensor).collect();
    candle_core::safetensors::save(&weights, folder.join("weights.safetensors")).unwrap();
    fs::write(folder.join("tokens.u16.bin"), tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    fs::write(folder.join("settings.json"), settings().to_string()).unwrap();
    println!("now: python scripts/peer_trajectory.py {} > engine/tests/fixtures/torch_10m.json", folder.display());
}

/// Compares with a run of another trainer that names parameters differently. `ZERO_TRAIN_PEERS` names a folder with the
/// initial weights (`data/init_10m.safetensors`, tied head, linear weights as [outputs, inputs]), the tokens
/// (`data/v256.u16.bin`), and the log (`single.log`). One line of the log is `RESULT {"losses": […], …}`.
#[test]
fn losses_agree_with_another_trainers_run() {
    let Some(folder) = std::env::var_os("ZERO_TRAIN_PEERS") else {
        println!("skipped: ZERO_TRAIN_PEERS does not name the folder of a run to compare with");
        return;
    };
    let folder = Path::new(&folder);
    let weights = candle_core::safetensors::load(folder.join("data/init_10m.safetensors"), &Device::Cpu).unwrap();
    let tokens = fs::read(folder.join("data/v256.u16.bin")).unwrap();
    let tokens: Vec<u16> = tokens.as_chunks().0.iter().map(|&pair| u16::from_le_bytes(pair)).collect();
    let log = fs::read_to_string(folder.join("single.log")).unwrap();
    let result = log.lines().rev().find_map(|line| line.strip_prefix("RESULT ")).expect("a line with the result");
    let expected = losses(&serde_json::from_str::<Value>(result).unwrap()["losses"]);
    if let Some(threads) = std::env::var("ZERO_TRAIN_THREADS").ok().and_then(|n| n.parse().ok()) {
        zero_engine::ops::set_threads(threads);
    }
    world(1, |comm| {
        let mut engine = Engine::with_communicator(config(), model(), comm).unwrap();
        let names: Vec<String> = engine.model().parameters().iter().map(|p| p.name().to_string()).collect();
        assert_eq!(names.len(), weights.len());
        for name in names {
            let (theirs, transposed) = peers_name(&name);
            let values = &weights[&theirs];
            let values = if transposed { values.t().unwrap() } else { values.clone() };
            let values = values.contiguous().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            engine.set_parameter(&name, &values).unwrap();
        }
        compare(&mut engine, &tokens, &expected);
    });
}

/// Returns the peer's name of a parameter, and whether the peer stores it transposed.
fn peers_name(name: &str) -> (String, bool) {
    let name = name.strip_prefix("transformer.").expect("GPT-2's prefix");
    let replaced = [
        ("h.", "blocks."),
        (".ln_1.", ".ln1."),
        (".ln_2.", ".ln2."),
        (".attn.c_attn.", ".qkv."),
        (".attn.c_proj.", ".proj."),
        (".mlp.c_fc.", ".fc."),
        (".mlp.c_proj.", ".out."),
        ("ln_f.", "lnf."),
    ];
    let theirs = replaced.iter().fold(name.to_string(), |name, (ours, theirs)| name.replacen(ours, theirs, 1));
    (theirs, name.contains(".c_") && name.ends_with(".weight"))
}
