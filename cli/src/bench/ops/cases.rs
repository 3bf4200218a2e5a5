//! The operations that `bench ops` runs, and the minimum work of each.

use std::hint::black_box;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use zero_model::ops::{
    Conv1D, Dropout, Embedding, LayerNorm, Linear, RmsNorm, Rotary, causal_attention_packed, cross_entropy, gelu,
    gelu_erf, silu, swiglu,
};
use zero_model::random::Stream;
use zero_model::{Pass, backward_from};

use Minimum::{Computes, Moves};

/// The dimensions of a GPT and of its micro-batch.
pub(super) struct Shape {
    pub(super) name: &'static str,
    pub(super) batch: usize,
    pub(super) time: usize,
    pub(super) width: usize,
    pub(super) heads: usize,
    pub(super) vocabulary: usize,
}

pub(super) const SHAPES: [Shape; 2] = [
    Shape { name: "10.8M", batch: 4, time: 256, width: 384, heads: 6, vocabulary: 256 },
    Shape { name: "124M", batch: 1, time: 256, width: 768, heads: 12, vocabulary: 50_257 },
];

/// The minimum work of an operation, which determines its limit.
#[derive(Clone, Copy)]
pub(super) enum Minimum {
    /// Bytes read and written.
    Moves(f64),
    /// Floating-point operations.
    Computes(f64),
}

/// A function to run and the operations to report from it.
pub(super) struct Case {
    pub(super) run: Box<dyn Fn() -> Result<()>>,
    /// The minimum work of each operation other than matrix products, by name.
    pub(super) work: Vec<(&'static str, Minimum)>,
    /// Total bytes of the operands, results and gradients of one run.
    pub(super) touches: f64,
    /// Whether the case is run in order to measure its matrix products.
    pub(super) has_products: bool,
}

/// Builds the cases of all operations at one shape. Each case runs the forward and the backward.
pub(super) fn cases(shape: &Shape, dtype: DType) -> Result<Vec<Case>> {
    let &Shape { batch, time, width, heads, vocabulary, .. } = shape;
    let (rows, inner) = (batch * time, 4 * width);
    let filled = |dims: &[usize]| {
        let mut values = vec![0.0; dims.iter().product()];
        Stream::new(1, "bench", 0).fill_normal(0, &mut values);
        Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
    };
    let leaf = |dims: &[usize]| Ok::<_, candle_core::Error>(Var::from_tensor(&filled(dims)?)?.into_inner());
    let size = dtype.size_in_bytes() as f64;
    // The FLOPs of two matrix products over the unmasked half of the scores.
    let attention = (2 * rows * time * width) as f64;
    // The bytes of an activation with this many columns.
    let bytes = |columns: usize| (rows * columns) as f64 * size;
    let (x, wide) = (leaf(&[batch, time, width])?, leaf(&[batch, time, inner])?);
    let mut all = vec![];
    for (from, to) in [(width, 3 * width), (width, width), (width, inner), (inner, width)] {
        let layer = Conv1D::from_tensors(leaf(&[from, to])?, leaf(&[to])?);
        let x = leaf(&[rows, from])?;
        all.push(Case {
            run: Box::new(move || backward(&layer.forward(&x)?)),
            work: vec![("bias backward", Moves(bytes(to)))],
            touches: 2.0 * (bytes(from) + bytes(to) + (from * to) as f64 * size),
            has_products: true,
        });
    }
    let head = Linear::from_tensors(leaf(&[vocabulary, width])?, None);
    let x_of_head = x.clone();
    all.push(Case {
        run: Box::new(move || backward(&head.forward(&x_of_head)?)),
        work: vec![],
        touches: 2.0 * (bytes(width) + bytes(vocabulary) + (vocabulary * width) as f64 * size),
        has_products: true,
    });
    let qkv = leaf(&[batch, time, 3 * width])?;
    all.push(case(
        8.0 * bytes(width),
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
    all.push(case(6.0 * bytes(inner), work, {
        let wide = wide.clone();
        move || backward(&swiglu(&wide, &up)?)
    }));
    let dropout = Dropout { probability: 0.1, name: "bench" };
    let pass = Pass { training: true, seed: 1, step: 1, sample: 0, layer: 0 };
    let work = vec![("dropout", Moves(2.0 * bytes(width))), ("dropout backward", Moves(2.0 * bytes(width)))];
    all.push(case(4.0 * bytes(width), work, {
        let x = x.clone();
        move || backward(&dropout.forward(&x, &pass)?)
    }));
    let rotary = Rotary::new(width / heads, time, 10_000.0)?;
    let q = leaf(&[batch, heads, time, width / heads])?;
    let work = vec![("rotary", Moves(2.0 * bytes(width))), ("rotary backward", Moves(2.0 * bytes(width)))];
    all.push(case(4.0 * bytes(width), work, move || backward(&rotary.apply(&q)?)));
    let table = Embedding::from_tensor(leaf(&[vocabulary, width])?);
    let ids: Vec<u32> = (0..rows).map(|i| ((i * 7919) % vocabulary) as u32).collect();
    let ids = Tensor::from_vec(ids, (batch, time), &Device::Cpu)?;
    let work = vec![
        ("embedding", Moves(2.0 * bytes(width))),
        ("embedding backward", Moves((vocabulary * width) as f64 * 4.0)),
    ];
    let touches = 3.0 * bytes(width) + (vocabulary * width) as f64 * 4.0;
    all.push(case(touches, work, {
        let ids = ids.clone();
        move || backward(&table.forward(&ids)?)
    }));
    let logits = leaf(&[batch, time, vocabulary])?;
    let work =
        vec![("cross-entropy", Moves(bytes(vocabulary))), ("cross-entropy backward", Moves(2.0 * bytes(vocabulary)))];
    all.push(case(2.0 * bytes(vocabulary), work, move || backward(&cross_entropy(&logits, &ids)?)));
    Ok(all)
}

fn case(touches: f64, work: Vec<(&'static str, Minimum)>, run: impl Fn() -> Result<()> + 'static) -> Case {
    Case { run: Box::new(run), work, touches, has_products: false }
}

/// Builds a case whose forward reads its input and writes its output. The backward also reads the gradient of the
/// output.
fn elementwise(
    name: &'static str,
    backward_name: &'static str,
    bytes: f64,
    x: &Tensor,
    run: impl Fn(&Tensor) -> Result<Tensor> + 'static,
) -> Case {
    let x = x.clone();
    let work = vec![(name, Moves(2.0 * bytes)), (backward_name, Moves(3.0 * bytes))];
    case(4.0 * bytes, work, move || backward(&run(&x)?))
}

fn backward(y: &Tensor) -> Result<()> {
    let seed = y.ones_like()?;
    drop(black_box(backward_from(&[(y.clone(), seed)])?));
    Ok(())
}
