//! Operations and random numbers are bit-identical on every processor: the tests compare them with the files in
//! `golden`, which were recorded on x86-64. After an intended change of bits, run `UPDATE_GOLDEN=1 cargo test
//! --workspace --test ops golden`.
//!
//! Products of two bf16 operands are rounded differently on a processor with AMX. Their digests are skipped there and
//! must be recorded on a processor without it, for example with `qemu-x86_64`.

#[path = "../../../optim/tests/golden/record.rs"]
mod record;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::init::{FanInOut, NonLinearity, NormalOrUniform};
use candle_nn::{Init, Module};
use record::Record;
use zero_ops as ops;
use zero_ops::random::Stream;
use zero_ops::{Activation, AttentionSpan, Conv1D, Linear, RopeScaling, TILE_UNIT, TiledMlp};
use zero_ops::{Pass, init};

use crate::check::{bits, candle_rounds, ids, normal, position_ids, run};

const AMX: &str = "products of two bf16 operands go through AMX here";

type Op = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// Rows, inputs and outputs of products. For each of the three there are cases with 1, with less and more than the size
/// of a tile, and with more than the size of a block.
const PRODUCTS: [[usize; 3]; 9] = [
    [1, 1, 1],
    [1, 600, 5],
    [3, 17, 49],
    [8, 48, 96],
    [9, 31, 47],
    [16, 64, 24],
    [65, 33, 130],
    [260, 7, 800],
    [37, 1100, 55],
];

/// Returns normal numbers that are scaled by 13 different powers of two.
fn wide(name: &str, shape: &[usize]) -> Tensor {
    let mut values: Vec<f32> = bits(&normal(name, shape)).into_iter().map(f32::from_bits).collect();
    values.iter_mut().enumerate().for_each(|(i, value)| *value *= f32::from_bits((121 + i as u32 % 13) << 23));
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Returns each operation with its inputs: first the operations that multiply matrices, then the others.
fn operations() -> [Vec<(String, Vec<Tensor>, Op)>; 2] {
    let mut products: Vec<(String, Vec<Tensor>, Op)> = vec![];
    let mut others: Vec<(String, Vec<Tensor>, Op)> = vec![];
    for [rows, inputs, outputs] in PRODUCTS {
        let x = || normal("x", &[rows, inputs]);
        let (w, b) = (|shape: &[usize]| normal("w", shape), || normal("b", &[outputs]));
        let size = format!("{rows}x{inputs}x{outputs}");
        let mut add = |name: &str, inputs, op: Op| products.push((format!("{name} {size}"), inputs, op));
        let linear = |t: &[Tensor]| Linear::from_tensors(t[1].clone(), t.get(2).cloned()).forward(&t[0]);
        add("linear", vec![x(), w(&[outputs, inputs]), b()], Box::new(linear));
        add("linear without bias", vec![x(), w(&[outputs, inputs])], Box::new(linear));
        let conv = |t: &[Tensor]| Conv1D::from_tensors(t[1].clone(), t[2].clone());
        add("conv1d", vec![x(), w(&[inputs, outputs]), b()], Box::new(move |t| conv(t).forward(&t[0])));
        add("conv1d and gelu", vec![x(), w(&[inputs, outputs]), b()], Box::new(move |t| conv(t).forward_gelu(&t[0])));
    }
    let n = |name: &str, shape: &[usize]| normal(name, shape);
    let mut add = |name: &str, inputs, op: Op| products.push((name.into(), inputs, op));
    let conv = |t: &[Tensor], w: usize| Conv1D::from_tensors(t[w].clone(), t[w + 1].clone());
    let mlp = || vec![n("x", &[70, 20]), n("w", &[20, 50]), n("b", &[50]), n("w2", &[50, 12]), n("b2", &[12])];
    add("conv1d, gelu, conv1d", mlp(), Box::new(move |t| conv(t, 1).forward_gelu_then(&t[0], &conv(t, 3))));
    add(
        "tiled mlp",
        mlp().into_iter().enumerate().map(|(i, x)| if i == 0 { n("x", &[3 * TILE_UNIT + 5, 20]) } else { x }).collect(),
        Box::new(move |t| TiledMlp::new(conv(t, 1), Activation::GeluNew, conv(t, 3), TILE_UNIT)?.forward(&t[0])),
    );
    for (heads, time) in [(6, 70), (16, 150), (64, 33)] {
        let qkv = || vec![n("q", &[2, time, 4, heads]), n("k", &[2, time, 2, heads]), n("v", &[2, time, 2, heads])];
        add(&format!("attention {time}x{heads}"), qkv(), Box::new(|t| ops::causal_attention(&t[0], &t[1], &t[2])));
        let window = AttentionSpan::default().window(20);
        add(
            &format!("attention within a window {time}x{heads}"),
            qkv(),
            Box::new(move |t| ops::causal_attention_within(&t[0], &t[1], &t[2], &window)),
        );
        let documents: Vec<u32> = (0..2 * time as u32).map(|i| i / 23).collect();
        let positions = Tensor::from_vec(position_ids(&documents, time), (2, time), &Device::Cpu).unwrap();
        let documents = AttentionSpan::default().position_ids(positions);
        add(
            &format!("packed attention within documents {time}x{heads}"),
            vec![n("x", &[2, time, 3 * 2 * heads])],
            Box::new(move |t| ops::causal_attention_packed_within(&t[0], 2, &documents)),
        );
    }
    let targets = ids("targets", &[150], 77);
    add(
        "head and cross-entropy",
        vec![n("x", &[150, 20]), n("w", &[77, 20])],
        Box::new(move |t| ops::linear_cross_entropy(&t[0], &t[1], &targets, 0.7)),
    );

    let mut add = |name: &str, inputs, op: Op| others.push((name.into(), inputs, op));
    for size in [37, 770] {
        let (x, w, b) = (wide("x", &[7, size]), n("w", &[size]), n("b", &[size]));
        let branch = n("branch", &[7, size]);
        let layer = |t: &[Tensor], w: usize| ops::LayerNorm::from_tensors(t[w].clone(), t[w + 1].clone(), 1e-5);
        let rms = |t: &[Tensor], w: usize| ops::RmsNorm::from_tensor(t[w].clone(), 1e-5);
        let offsets = move |t: &[Tensor], w: usize| rms(t, w).of_offsets();
        let both = |(total, norm): (Tensor, Tensor)| total + norm;
        let [layer_inputs, rms_inputs] = [vec![x.clone(), w.clone(), b.clone()], vec![x.clone(), w.clone()]];
        add(&format!("layer norm {size}"), layer_inputs, Box::new(move |t| layer(t, 1).forward(&t[0])));
        add(
            &format!("rms norm of offsets {size}"),
            rms_inputs.clone(),
            Box::new(move |t| offsets(t, 1).forward(&t[0])),
        );
        add(&format!("rms norm {size}"), rms_inputs, Box::new(move |t| rms(t, 1).forward(&t[0])));
        add(
            &format!("residual and layer norm {size}"),
            vec![x.clone(), branch.clone(), w.clone(), b],
            Box::new(move |t| both(layer(t, 2).forward_residual(&t[0], &t[1])?)),
        );
        add(
            &format!("residual and rms norm of offsets {size}"),
            vec![x.clone(), branch.clone(), w.clone()],
            Box::new(move |t| both(offsets(t, 2).forward_residual(&t[0], &t[1])?)),
        );
        add(
            &format!("residual and rms norm {size}"),
            vec![x, branch, w],
            Box::new(move |t| both(rms(t, 2).forward_residual(&t[0], &t[1])?)),
        );
    }
    let x = || vec![wide("x", &[3, 337])];
    add("gelu", x(), Box::new(|t| ops::gelu(&t[0])));
    add("gelu erf", x(), Box::new(|t| ops::gelu_erf(&t[0])));
    add("relu", x(), Box::new(|t| ops::relu(&t[0])));
    add("silu", x(), Box::new(|t| ops::silu(&t[0])));
    add("swiglu", vec![wide("x", &[3, 337]), n("up", &[3, 337])], Box::new(|t| ops::swiglu(&t[0], &t[1])));
    add("geglu", vec![wide("x", &[3, 337]), n("up", &[3, 337])], Box::new(|t| ops::geglu(&t[0], &t[1])));
    add("scaled", x(), Box::new(|t| ops::scaled(&t[0], 0.7)));
    add("columns", x(), Box::new(|t| ops::columns(&t[0], 30..201)));
    let pass = Pass { training: true, seed: 5, step: 1, sample: 3, layer: 2 };
    add("dropout", vec![n("x", &[3, 337])], Box::new(move |t| ops::dropout(&t[0], 0.3, "d", &pass)));
    let rows = ids("rows", &[90], 9);
    add(
        "embedding",
        vec![n("table", &[9, 37])],
        Box::new(move |t| ops::Embedding::from_tensor(t[0].clone()).forward(&rows)),
    );
    let rows = ids("rows", &[90], 9);
    add(
        "scaled embedding",
        vec![n("table", &[9, 37])],
        Box::new(move |t| ops::Embedding::from_tensor(t[0].clone()).times(37f64.sqrt()).forward(&rows)),
    );
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 40,
    };
    let long = RopeScaling::LongRope {
        short_factor: vec![1.0, 1.5, 2.5],
        long_factor: vec![3.0, 4.5, 6.5],
        factor: None,
        attention_factor: Some(1.25),
        original_max_position_embeddings: 40,
    };
    for (name, rotary) in [
        ("rotary", ops::Rotary::new(10, 70, 1e4)),
        ("scaled rotary", ops::Rotary::scaled(10, 70, 5e5, &scaling)),
        ("long rotary of a part", ops::Rotary::scaled(6, 70, 5e5, &long).and_then(|rotary| rotary.of_heads(10))),
    ] {
        let rotary = rotary.unwrap();
        add(name, vec![n("x", &[2, 70, 3, 10])], Box::new(move |t| rotary.apply(&t[0])));
    }
    let targets = ids("targets", &[13], 401);
    add("cross-entropy", vec![wide("logits", &[13, 401])], Box::new(move |t| ops::cross_entropy(&t[0], &targets)));
    [products, others]
}

/// Returns the words of these tensors. Rejects NaN, because the processor chooses which NaN an operation produces.
fn words<'a>(what: &str, tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<u32> {
    let words: Vec<u32> = tensors.into_iter().flat_map(bits).collect();
    assert!(words.iter().all(|&word| f32::from_bits(word).is_finite()), "{what} has numbers that are not finite");
    words
}

#[test]
fn operations_and_gradients() {
    let mut record = Record::default();
    let [products, others] = operations();
    let all = products.into_iter().map(|op| (true, op)).chain(others.into_iter().map(|op| (false, op)));
    for (multiplies, (name, inputs, op)) in all {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let name = format!("{name}, {}", dtype.as_str());
            if dtype == DType::BF16 && multiplies && ops::Isa::current().has_amx() {
                record.skip(name, AMX);
                continue;
            }
            if name.starts_with("residual") && !candle_rounds(dtype) {
                record.skip(name, "candle adds the gradients of both ways up, and does not round here");
                continue;
            }
            let inputs: Vec<Tensor> = inputs.iter().map(|x| x.to_dtype(dtype).unwrap()).collect();
            let (y, grads) = run(&inputs, &op);
            record.add(&name, words(&name, grads.iter().chain([&y])));
        }
    }
    record.compare(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ops/golden/operations.txt"));
}

#[test]
fn random_numbers() {
    let mut record = Record::default();
    let stream = Stream::new(0x1234_5678_9abc_def0, "golden", 1 << 40);
    record.add("words", (0..500).flat_map(|block| stream.words(block << 30)));
    let mut values = vec![0.0f32; 10_007];
    // The last range also crosses block 2³², where the lowest 32-bit word of the counter overflows.
    for start in [0, 3, (1 << 34) - 5001] {
        stream.fill_normal(start, &mut values);
        record.add(format!("normal from {start}"), values.iter().map(|value| value.to_bits()));
        stream.fill_uniform(start, &mut values);
        record.add(format!("uniform from {start}"), values.iter().map(|value| value.to_bits()));
    }
    let kaiming = |dist| Init::Kaiming { dist, fan: FanInOut::FanIn, non_linearity: NonLinearity::ReLU };
    for (name, init) in [
        ("kaiming, normal", kaiming(NormalOrUniform::Normal)),
        ("kaiming, uniform", kaiming(NormalOrUniform::Uniform)),
        ("normal with mean and deviation", Init::Randn { mean: 0.3, stdev: 0.02 }),
        ("uniform between two numbers", Init::Uniform { lo: -0.3, up: 0.7 }),
    ] {
        init::fill(&init, &(10, 100).into(), "weight", 3, 17, &mut values[..900]);
        record.add(name, values[..900].iter().map(|value| value.to_bits()));
    }
    record.compare(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ops/golden/random.txt"));
}
