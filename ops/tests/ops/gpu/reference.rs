//! Writes attention and the head of a language model in bf16 (inputs, results and gradients) to files, which
//! `scripts/card/reference.py` compares with PyTorch in f64. Each case runs twice, and the two results must be
//! bit-identical.

use std::collections::HashMap;
use std::env;
use std::path::PathBuf;

use super::{Into, gpu, trained};
use crate::check::{normal, position_ids, same_bits};
use candle_core::{DType, Result, Tensor};
use zero_ops::random::Stream;
use zero_ops::{AttentionSpan, causal_attention_within, linear_cross_entropy};

/// Environment variable with the folder of the files.
const FOLDER: &str = "ZERO_TRAIN_REFERENCE";
/// Environment variable: any value selects sizes for the emulated GPU.
const SMALL: &str = "ZERO_TRAIN_REFERENCE_SMALL";

/// One case of attention.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    batch: usize,
    time: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    documents: bool,
}

const fn case(name: &'static str, [batch, time, heads, kv_heads, size]: [usize; 5], documents: bool) -> Case {
    Case { name, batch, time, heads, kv_heads, size, documents }
}

const LARGE: [Case; 5] = [
    case("short", [2, 1024, 12, 12, 64], false),
    case("short-documents", [2, 1024, 12, 4, 64], true),
    case("wide", [1, 1024, 16, 4, 128], true),
    case("long", [1, 4096, 12, 12, 64], true),
    case("long-wide", [1, 4096, 8, 2, 128], false),
];
const TINY: [Case; 3] = [
    case("short", [2, 40, 2, 2, 64], false),
    case("long", [1, 150, 2, 1, 64], true),
    case("long-wide", [1, 100, 2, 1, 128], true),
];

/// Returns standard normal numbers from this run's seed.
fn numbers(name: &str, shape: &[usize]) -> Result<Tensor> {
    let seed = env::var("ZERO_TRAIN_TEST_SEED").map_or(11, |text| text.parse().expect("a whole number"));
    let mut values = vec![0.0; shape.iter().product()];
    Stream::new(seed, name, 0).fill_normal(0, &mut values);
    Tensor::from_vec(values, shape, &candle_core::Device::Cpu)?.to_dtype(DType::BF16)
}

/// Returns a document number for each position. Documents have 37 or 148 positions. A document that reaches the end of
/// a third of the row is shorter.
fn documents(batch: usize, time: usize) -> Result<Tensor> {
    let number = |at: usize| u32::from((at / 37 * 37).is_multiple_of(5)) + (at / (time / 3 + 1)) as u32 * 2;
    let row: Vec<u32> = (0..time).map(number).collect();
    Tensor::from_vec(row.repeat(batch), (batch, time), &candle_core::Device::Cpu)
}

/// Runs `run` twice, checks that the results are bit-identical, and writes inputs and results to the file `name` in
/// the folder.
fn written(
    name: &str,
    tensors: &[(&str, &Tensor)],
    run: impl Fn() -> Result<(Tensor, Vec<Tensor>)>,
    of: &[&str],
) -> Result<()> {
    let (first, second) = (run()?, run()?);
    same_bits(&format!("{name}: result"), &second.0, &first.0);
    for ((what, got), want) in of.iter().zip(&second.1).zip(&first.1) {
        same_bits(&format!("{name}: {what}"), got, want);
    }
    let mut all: HashMap<&str, Tensor> = tensors.iter().map(|&(name, tensor)| (name, tensor.clone())).collect();
    // The factor by which `trained` multiplies the result.
    all.insert("upstream", normal("weights of the result", first.0.dims()).to_dtype(first.0.dtype())?);
    all.insert("out", first.0);
    all.extend(of.iter().copied().zip(first.1));
    let folder = PathBuf::from(env::var_os(FOLDER).expect(FOLDER));
    candle_core::safetensors::save(&all, folder.join(name).with_extension("safetensors"))
}

#[test]
#[ignore = "writes files for scripts/card/reference.py"]
fn attention_and_head_for_pytorch() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let small = env::var_os(SMALL).is_some();
    for of in if small { &TINY[..] } else { &LARGE } {
        let Case { name, batch, time, heads, kv_heads, size, .. } = *of;
        let [q, k, v] = [("q", heads), ("k", kv_heads), ("v", kv_heads)]
            .map(|(tensor, heads)| numbers(&format!("{name} {tensor}"), &[batch, time, heads, size]));
        let inputs = [q?, k?, v?];
        let documents = documents(batch, time)?;
        let positions = position_ids(&documents.flatten_all()?.to_vec1()?, time);
        let span = match of.documents {
            true => AttentionSpan::default().position_ids(Tensor::from_vec(
                positions,
                (batch, time),
                &candle_core::Device::Cpu,
            )?),
            false => AttentionSpan::default(),
        };
        let mut tensors = vec![("q", &inputs[0]), ("k", &inputs[1]), ("v", &inputs[2])];
        if of.documents {
            tensors.push(("documents", &documents));
        }
        let op = |t: &[Tensor]| causal_attention_within(&t[0], &t[1], &t[2], &span);
        written(
            &format!("attention-{name}"),
            &tensors,
            || trained(&gpu, &inputs, Into::Store, op),
            &["dq", "dk", "dv"],
        )?;
    }
    let (rows, classes, width) = if small { (24, 130, 32) } else { (1024, 50257, 768) };
    // The weights give logits of about the size that a trained model has.
    let inputs = [numbers("head x", &[rows, width])?, (numbers("head weight", &[classes, width])? * 0.05)?];
    let targets = crate::check::ids("head targets", &[rows], classes as u32);
    let op = |t: &[Tensor]| linear_cross_entropy(&t[0], &t[1], &targets.to_device(t[0].device())?, 2.0);
    let tensors = [("x", &inputs[0]), ("weight", &inputs[1]), ("targets", &targets)];
    written("head", &tensors, || trained(&gpu, &inputs, Into::Store, op), &["dx", "dweight"])
}
