//! `zero-train bench ops`: every operation of the models at the shapes of two GPT steps, in turn with what the chip allows.
//!
//! Products are held against multiply-adds that never leave the registers, the others against a copy of as many bytes as they
//! must read and write, cached or not as theirs are. Limit and subject alternate, so that a noisy neighbour slows both.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use zero_comm::bench::median;
use zero_model::ops::measure::{self, Measured};
use zero_model::ops::{
    Conv1D, Dropout, Embedding, LayerNorm, Linear, RmsNorm, Rotary, causal_attention_packed, cross_entropy, gelu,
    gelu_erf, silu, swiglu,
};
use zero_model::random::Stream;
use zero_model::{Pass, backward_from};

use Work::{Computes, Moves};

/// A GPT's micro-batch.
struct Shape {
    name: &'static str,
    batch: usize,
    time: usize,
    width: usize,
    heads: usize,
    vocabulary: usize,
}

const SHAPES: [Shape; 2] = [
    Shape { name: "10.8M", batch: 4, time: 256, width: 384, heads: 6, vocabulary: 256 },
    Shape { name: "124M", batch: 1, time: 256, width: 768, heads: 12, vocabulary: 50_257 },
];

/// What an operation must do at least.
#[derive(Clone, Copy)]
enum Work {
    /// Bytes, read and written.
    Moves(f64),
    /// Floating-point operations.
    Computes(f64),
}

/// What is run, and the work of each operation in it that is not a product, by name.
struct Case {
    run: Box<dyn Fn() -> Result<()>>,
    work: Vec<(&'static str, Work)>,
}

/// What one operation took, and its share of its limit, in each run.
#[derive(Default)]
struct Row {
    times: Vec<Duration>,
    /// FLOP/s or bytes/s, and of the limit's.
    rates: Vec<(f64, f64)>,
    in_flops: bool,
}

/// # Errors
/// What an operation says.
pub(crate) fn ops(repeats: usize) -> anyhow::Result<u8> {
    println!("one thread, {repeats} runs each in turn with its limit; share of the limit: median (least – most)");
    for dtype in [DType::F32, DType::BF16] {
        for shape in &SHAPES {
            let Shape { name, batch, time, width, vocabulary, .. } = shape;
            println!("\n{name}, {dtype:?}: {} rows, width {width}, vocabulary {vocabulary}", batch * time);
            for case in cases(shape, dtype)? {
                let mut rows = BTreeMap::new();
                (case.run)()?;
                for _ in 0..repeats {
                    measure_once(&case, dtype, &mut rows)?;
                }
                rows.iter().for_each(|(name, row)| print(name, row));
            }
        }
    }
    Ok(0)
}

fn measure_once(case: &Case, dtype: DType, rows: &mut BTreeMap<String, Row>) -> Result<()> {
    let peak = measure::peak_flops(dtype);
    measure::start();
    let outcome = (case.run)();
    let measured = measure::finish();
    outcome?;
    for one in measured {
        let Measured { operation, shape, calls, time } = &one;
        let each = time.div_f64(*calls as f64);
        let work = case.work.iter().find(|(name, _)| name == operation).map(|(_, work)| *work);
        let (name, work) = match (shape, one.flops(), work) {
            (Some([m, n, k]), Some(flops), _) => {
                (format!("product {operation} {m} x {n} x {k}"), Work::Computes(flops / *calls as f64))
            }
            (_, _, Some(work)) => (operation.clone(), work),
            _ => continue,
        };
        let (amount, limit) = match work {
            Work::Computes(flops) => (flops, peak),
            Work::Moves(bytes) => (bytes, copy_rate(bytes as usize / 2)),
        };
        let rate = amount / each.as_secs_f64();
        let row = rows.entry(name).or_default();
        row.in_flops = matches!(work, Work::Computes(_));
        row.times.push(each);
        row.rates.push((rate, rate / limit));
    }
    Ok(())
}

fn print(name: &str, row: &Row) {
    let mut shares: Vec<f64> = row.rates.iter().map(|(_, share)| share * 100.0).collect();
    let mut rates: Vec<f64> = row.rates.iter().map(|(rate, _)| rate / 1e9).collect();
    shares.sort_by(f64::total_cmp);
    rates.sort_by(f64::total_cmp);
    let (least, most) = (shares[0], shares[shares.len() - 1]);
    println!(
        "  {name:<34} {:>9.3} ms  {:>7.1} {}  {:>6.1} %  ({least:.1} – {most:.1})",
        median(&row.times).as_secs_f64() * 1e3,
        rates[rates.len() / 2],
        if row.in_flops { "GFLOP/s" } else { "GB/s   " },
        shares[shares.len() / 2],
    );
}

/// Bytes that a copy of so many moves a second, read and written.
fn copy_rate(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    let times: Vec<Duration> = (0..3)
        .map(|_| {
            let started = Instant::now();
            black_box(&mut to).copy_from_slice(black_box(&from));
            started.elapsed()
        })
        .collect();
    2.0 * bytes as f64 / median(&times).as_secs_f64()
}

fn cases(shape: &Shape, dtype: DType) -> Result<Vec<Case>> {
    let &Shape { batch, time, width, heads, vocabulary, .. } = shape;
    let (rows, inner) = (batch * time, 4 * width);
    let filled = |dims: &[usize]| {
        let mut values = vec![0.0; dims.iter().product()];
        Stream::new(1, "bench", 0).fill_normal(0, &mut values);
        Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
    };
    let leaf = |dims: &[usize]| Ok::<_, candle_core::Error>(Var::from_tensor(&filled(dims)?)?.into_inner());
    let size = dtype.size_in_bytes() as f64;
    // Two products, of whose scores half are not masked.
    let attention = (2 * rows * time * width) as f64;
    // Bytes of an activation.
    let bytes = |columns: usize| (rows * columns) as f64 * size;
    let (x, wide) = (leaf(&[batch, time, width])?, leaf(&[batch, time, inner])?);
    let mut all = vec![];
    for (from, to) in [(width, 3 * width), (width, width), (width, inner), (inner, width)] {
        let layer = Conv1D::from_tensors(leaf(&[from, to])?, leaf(&[to])?);
        let x = leaf(&[rows, from])?;
        all.push(Case {
            run: Box::new(move || backward(&layer.forward(&x)?)),
            work: vec![("bias backward", Moves(bytes(to)))],
        });
    }
    let head = Linear::from_tensors(leaf(&[vocabulary, width])?, None);
    all.push(case(vec![], {
        let x = x.clone();
        move || backward(&head.forward(&x)?)
    }));
    let qkv = leaf(&[batch, time, 3 * width])?;
    all.push(case(
        vec![("causal-attention", Computes(attention)), ("causal-attention backward", Computes(2.5 * attention))],
        move || backward(&causal_attention_packed(&qkv, heads)?),
    ));
    let norm = LayerNorm::from_tensors(leaf(&[width])?, leaf(&[width])?, 1e-5);
    all.push(elementwise("layer-norm", "layer-norm backward", bytes(width), &x, move |x| norm.forward(x)));
    let norm = RmsNorm::from_tensor(leaf(&[width])?, 1e-5);
    all.push(elementwise("rms-norm", "rms-norm backward", bytes(width), &x, move |x| norm.forward(x)));
    all.push(elementwise("gelu", "gelu backward", bytes(inner), &wide, gelu));
    all.push(elementwise("gelu-erf", "gelu-erf backward", bytes(inner), &wide, gelu_erf));
    all.push(elementwise("silu", "silu backward", bytes(inner), &wide, silu));
    let up = leaf(&[batch, time, inner])?;
    let work = vec![("swiglu", Moves(3.0 * bytes(inner))), ("swiglu backward", Moves(5.0 * bytes(inner)))];
    all.push(case(work, {
        let wide = wide.clone();
        move || backward(&swiglu(&wide, &up)?)
    }));
    let dropout = Dropout { probability: 0.1, name: "bench" };
    let pass = Pass { training: true, seed: 1, step: 1, sample: 0, layer: 0 };
    let work = vec![("dropout", Moves(2.0 * bytes(width))), ("dropout backward", Moves(2.0 * bytes(width)))];
    all.push(case(work, {
        let x = x.clone();
        move || backward(&dropout.forward(&x, &pass)?)
    }));
    let rotary = Rotary::new(width / heads, time, 10_000.0)?;
    let q = leaf(&[batch, heads, time, width / heads])?;
    let work = vec![("rotary", Moves(2.0 * bytes(width))), ("rotary backward", Moves(2.0 * bytes(width)))];
    all.push(case(work, move || backward(&rotary.apply(&q)?)));
    let table = Embedding::from_tensor(leaf(&[vocabulary, width])?);
    let ids: Vec<u32> = (0..rows).map(|i| ((i * 7919) % vocabulary) as u32).collect();
    let ids = Tensor::from_vec(ids, (batch, time), &Device::Cpu)?;
    let work = vec![
        ("embedding", Moves(2.0 * bytes(width))),
        ("embedding backward", Moves((vocabulary * width) as f64 * 4.0)),
    ];
    all.push(case(work, {
        let ids = ids.clone();
        move || backward(&table.forward(&ids)?)
    }));
    let logits = leaf(&[batch, time, vocabulary])?;
    let work =
        vec![("cross-entropy", Moves(bytes(vocabulary))), ("cross-entropy backward", Moves(2.0 * bytes(vocabulary)))];
    all.push(case(work, move || backward(&cross_entropy(&logits, &ids)?)));
    Ok(all)
}

fn case(work: Vec<(&'static str, Work)>, run: impl Fn() -> Result<()> + 'static) -> Case {
    Case { run: Box::new(run), work }
}

/// One that reads its input and writes its output; its backward reads the output's gradient too.
fn elementwise(
    name: &'static str,
    backward_name: &'static str,
    bytes: f64,
    x: &Tensor,
    run: impl Fn(&Tensor) -> Result<Tensor> + 'static,
) -> Case {
    let x = x.clone();
    case(vec![(name, Moves(2.0 * bytes)), (backward_name, Moves(3.0 * bytes))], move || backward(&run(&x)?))
}

fn backward(y: &Tensor) -> Result<()> {
    let seed = y.ones_like()?;
    drop(black_box(backward_from(&[(y.clone(), seed)])?));
    Ok(())
}
