//! Profiles a GPT step: forward and backward of the 10.8M GPT (6 layers of width 384, sequence length 256, batch 8,
//! vocabulary 8192, tied), with gradients in a sink, and each of its operations alone at the same shapes.
//!
//! Run `cargo bench -p zero-model --bench step`. `ZERO_THREADS` sets the number of threads (default 1). With glibc, set
//! `MALLOC_TRIM_THRESHOLD_=4294967296` and `MALLOC_MMAP_THRESHOLD_=4294967296` as the engine does. Otherwise the
//! benchmark measures page faults.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Module;
use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use zero_model::random::Stream;
use zero_model::sink::Gradients;
use zero_model::zoo::{Gpt2Config, gpt2};
use zero_model::{Activations, Model, Pass, ops};

const BATCH: usize = 8;
const TIME: usize = 256;
const WIDTH: usize = 384;
const HEADS: usize = 6;
const VOCABULARY: usize = 8192;

fn normal(shape: &[usize]) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    Stream::new(1, "bench", 0).fill_normal(0, &mut values);
    Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor")
}

fn tokens() -> Tensor {
    let ids: Vec<u32> = (0..BATCH * TIME).map(|i| (i * 7919 % VOCABULARY) as u32).collect();
    Tensor::from_vec(ids, (BATCH, TIME), &Device::Cpu).expect("a tensor")
}

/// Runs forward and backward. Gradients are written to `buffer`.
fn step(model: &Model, ids: &Tensor, buffer: Vec<f32>) -> Result<(f32, Vec<f32>)> {
    let pass = |layer| Pass { training: true, seed: 1, step: 1, sample: 0, layer };
    let body = &model.layers()[..model.layers().len() - 1];
    let mut x = Activations::from(ids.clone());
    for (layer, built) in (0..).zip(body) {
        x = built.run(&x, &pass(layer))?;
    }
    let mut end = 0;
    let mut sink = Gradients::default();
    sink.add_buffer(
        buffer,
        model.parameters().iter().map(|p| {
            let start = end;
            end += p.elements();
            (p.leaf().id(), start..end, false)
        }),
    );
    let (sink, loss) = sink.capture(|| {
        let loss = model.loss(&x, std::slice::from_ref(ids), &pass(body.len() as u32), 1.0)?;
        loss.backward()?;
        loss.to_scalar()
    });
    Ok((loss?, sink.into_buffers().remove(0)))
}

fn gpt(c: &mut Criterion) {
    let config = Gpt2Config {
        vocab_size: VOCABULARY,
        n_positions: TIME,
        n_embd: WIDTH,
        n_layer: 6,
        n_head: HEADS,
        ..Gpt2Config::default()
    };
    let model = gpt2(&config).build(DType::F32).expect("a model");
    for parameter in model.parameters() {
        let mut values = vec![0.0; parameter.elements()];
        parameter.initialise(1, 0, &mut values);
        parameter.fill_from_floats(values).expect("values that fit");
    }
    let ids = tokens();
    let mut buffer = vec![0.0; model.elements()];
    c.bench_function("gpt step", |b| {
        b.iter(|| {
            let (loss, gradients) = step(&model, &ids, std::mem::take(&mut buffer)).expect("a step");
            buffer = gradients;
            black_box(loss)
        });
    });
}

/// Times the forward and the backward of one operation separately.
fn operation(c: &mut Criterion, name: &str, shapes: &[&[usize]], op: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let vars: Vec<Var> = shapes.iter().map(|s| Var::from_tensor(&normal(s)).expect("a variable")).collect();
    let leaves: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    c.bench_function(&format!("{name} forward"), |b| b.iter(|| op(&leaves).expect("a result")));
    let y = op(&leaves).expect("a result");
    let upstream = normal(y.dims());
    // The graph is reused, so this times only the backward.
    c.bench_function(&format!("{name} backward"), |b| {
        b.iter(|| zero_model::backward_from(&[(y.clone(), upstream.clone())]).expect("gradients"));
    });
}

fn operations(c: &mut Criterion) {
    let inner = 4 * WIDTH;
    let conv = |t: &[Tensor]| ops::Conv1D::from_tensors(t[1].clone(), t[2].clone()).forward(&t[0]);
    operation(c, "c_attn", &[&[BATCH, TIME, WIDTH], &[WIDTH, 3 * WIDTH], &[3 * WIDTH]], conv);
    operation(c, "attn.c_proj", &[&[BATCH, TIME, WIDTH], &[WIDTH, WIDTH], &[WIDTH]], conv);
    operation(c, "c_fc", &[&[BATCH, TIME, WIDTH], &[WIDTH, inner], &[inner]], conv);
    operation(c, "c_fc and gelu", &[&[BATCH, TIME, WIDTH], &[WIDTH, inner], &[inner]], |t| {
        ops::Conv1D::from_tensors(t[1].clone(), t[2].clone()).forward_gelu(&t[0])
    });
    operation(c, "mlp.c_proj", &[&[BATCH, TIME, inner], &[inner, WIDTH], &[WIDTH]], conv);
    operation(c, "layer norm", &[&[BATCH, TIME, WIDTH], &[WIDTH], &[WIDTH]], |t| {
        ops::LayerNorm::from_tensors(t[1].clone(), t[2].clone(), 1e-5).forward(&t[0])
    });
    operation(c, "rms norm", &[&[BATCH, TIME, WIDTH], &[WIDTH]], |t| {
        ops::RmsNorm::from_tensor(t[1].clone(), 1e-5).forward(&t[0])
    });
    operation(c, "gelu", &[&[BATCH, TIME, inner]], |t| ops::gelu(&t[0]));
    operation(c, "swiglu", &[&[BATCH, TIME, inner], &[BATCH, TIME, inner]], |t| ops::swiglu(&t[0], &t[1]));
    operation(c, "packed attention", &[&[BATCH, TIME, 3 * WIDTH]], |t| ops::causal_attention_packed(&t[0], HEADS));
    let rotary = ops::Rotary::new(WIDTH / HEADS, TIME, 1e4).expect("an even size");
    operation(c, "rotary", &[&[BATCH, TIME, HEADS, WIDTH / HEADS]], |t| rotary.apply(&t[0]));
    let ids = tokens();
    operation(c, "embedding", &[&[VOCABULARY, WIDTH]], |t| ops::Embedding::from_tensor(t[0].clone()).forward(&ids));
    operation(c, "head", &[&[BATCH, TIME, WIDTH], &[VOCABULARY, WIDTH]], |t| {
        ops::Linear::from_tensors(t[1].clone(), None).forward(&t[0])
    });
    operation(c, "cross-entropy", &[&[BATCH, TIME, VOCABULARY]], |t| ops::cross_entropy(&t[0], &ids));
    operation(c, "head and cross-entropy", &[&[BATCH, TIME, WIDTH], &[VOCABULARY, WIDTH]], |t| {
        ops::linear_cross_entropy(&t[0], &t[1], &ids, 1.0)
    });
    operation(c, "residual (candle)", &[&[BATCH, TIME, WIDTH], &[BATCH, TIME, WIDTH]], |t| &t[0] + &t[1]);
}

fn settings() -> Criterion {
    let threads = std::env::var("ZERO_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    ops::set_threads(threads);
    Criterion::default()
        .sample_size(10)
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1))
}

criterion_group! { name = all; config = settings(); targets = gpt, operations }
criterion_main!(all);
