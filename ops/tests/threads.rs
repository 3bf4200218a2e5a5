//! Results do not depend on the number of threads. This test has its own process, because the number applies to the
//! whole process.

use candle_core::{Device, Result, Tensor, Var};
use candle_nn::Module;
use zero_ops as ops;
use zero_ops::Pass;
use zero_ops::random::Stream;

fn normal(name: &str, shape: &[usize]) -> Tensor {
    let mut values = vec![0.0f32; shape.iter().product()];
    Stream::new(3, name, 0).fill_normal(0, &mut values);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Returns the bits of the result and of all gradients.
fn bits(shapes: &[&[usize]], op: &dyn Fn(&[Tensor]) -> Result<Tensor>) -> Vec<u32> {
    let vars: Vec<Var> = shapes.iter().map(|s| Var::from_tensor(&normal("x", s)).unwrap()).collect();
    let leaves: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = op(&leaves).unwrap();
    let grads = (&y * normal("w", y.dims())).unwrap().sum_all().unwrap().backward().unwrap();
    let mut tensors = vec![&y];
    tensors.extend(leaves.iter().map(|x| grads.get(x).unwrap()));
    tensors.iter().flat_map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap()).map(f32::to_bits).collect()
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let targets = Tensor::arange(0u32, 350, &Device::Cpu).unwrap();
    let rotary = ops::Rotary::new(16, 99, 1e4).unwrap();
    let pass = Pass { training: true, seed: 1, step: 1, sample: 0, layer: 0 };
    type Op<'a> = Box<dyn Fn(&[Tensor]) -> Result<Tensor> + 'a>;
    let cases: Vec<(&str, Vec<&[usize]>, Op)> = vec![
        (
            "linear",
            vec![&[7, 50, 193], &[301, 193], &[301]],
            Box::new(|t| ops::Linear::from_tensors(t[1].clone(), Some(t[2].clone())).forward(&t[0])),
        ),
        (
            "conv1d",
            vec![&[7, 50, 193], &[193, 301], &[301]],
            Box::new(|t| ops::Conv1D::from_tensors(t[1].clone(), t[2].clone()).forward(&t[0])),
        ),
        (
            "linear and gelu",
            vec![&[7, 50, 193], &[193, 301], &[301]],
            Box::new(|t| ops::Conv1D::from_tensors(t[1].clone(), t[2].clone()).forward_gelu(&t[0])),
        ),
        (
            "embedding",
            vec![&[350, 193]],
            Box::new(|t| ops::Embedding::from_tensor(t[0].clone()).forward(&(&targets / 2.0)?)),
        ),
        (
            "layer norm",
            vec![&[7, 50, 193], &[193], &[193]],
            Box::new(|t| ops::LayerNorm::from_tensors(t[1].clone(), t[2].clone(), 1e-5).forward(&t[0])),
        ),
        (
            "rms norm",
            vec![&[7, 50, 193], &[193]],
            Box::new(|t| ops::RmsNorm::from_tensor(t[1].clone(), 1e-5).forward(&t[0])),
        ),
        ("gelu", vec![&[7, 50, 193]], Box::new(|t| ops::gelu(&t[0]))),
        ("gelu erf", vec![&[7, 50, 193]], Box::new(|t| ops::gelu_erf(&t[0]))),
        ("silu", vec![&[7, 50, 193]], Box::new(|t| ops::silu(&t[0]))),
        ("swiglu", vec![&[7, 50, 193], &[7, 50, 193]], Box::new(|t| ops::swiglu(&t[0], &t[1]))),
        (
            "attention",
            vec![&[3, 99, 6, 16], &[3, 99, 3, 16], &[3, 99, 3, 16]],
            Box::new(|t| ops::causal_attention(&t[0], &t[1], &t[2])),
        ),
        ("packed attention", vec![&[3, 99, 144]], Box::new(|t| ops::causal_attention_packed(&t[0], 3))),
        (
            "attention within a window",
            vec![&[3, 99, 6, 16], &[3, 99, 3, 16], &[3, 99, 3, 16]],
            Box::new(|t| ops::causal_attention_within(&t[0], &t[1], &t[2], &ops::AttentionSpan::default().window(40))),
        ),
        (
            "attention with dropout",
            vec![&[3, 99, 6, 16], &[3, 99, 3, 16], &[3, 99, 3, 16]],
            Box::new(|t| {
                let (span, dropout) = (ops::AttentionSpan::default(), ops::Dropout { probability: 0.3, name: "d" });
                ops::causal_attention_with_dropout(&t[0], &t[1], &t[2], &span, (&dropout, &pass))
            }),
        ),
        ("rotary", vec![&[3, 99, 6, 16]], Box::new(|t| rotary.apply(&t[0]))),
        ("cross-entropy", vec![&[350, 401]], Box::new(|t| ops::cross_entropy(&t[0], &targets))),
        (
            "head and cross-entropy",
            vec![&[350, 193], &[9001, 193]],
            Box::new(|t| ops::linear_cross_entropy(&t[0], &t[1], &targets, 1.0)),
        ),
        ("dropout", vec![&[7, 50, 193]], Box::new(|t| ops::dropout(&t[0], 0.3, "d", &pass))),
    ];
    for (name, shapes, op) in &cases {
        ops::set_threads(1);
        let one = bits(shapes, op);
        for threads in [2, 3, 64] {
            ops::set_threads(threads);
            assert_eq!(ops::threads(), threads);
            let more = bits(shapes, op);
            let differ = more.iter().zip(&one).position(|(a, b)| a != b);
            assert_eq!(differ, None, "{name} with {threads} threads, {} numbers", one.len());
        }
    }
    ops::set_threads(0);
    assert_eq!(ops::threads(), 1);
}
