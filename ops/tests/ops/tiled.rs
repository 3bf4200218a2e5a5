//! Tests the tiled feed-forward network: compares it bit by bit with its operations over all rows, and checks where its
//! gradients are written.

use crate::check::{bits, candle_rounds, check, normal, same_bits};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Module;
use zero_ops as ops;
use zero_ops::sink::{DeferredGradients, Gradients};
use zero_ops::{Activation, Conv1D, Linear, TILE_UNIT, TiledMlp};

const INPUTS: usize = 20;
const INNER: usize = 50;

/// Returns whether candle's gradients are an oracle; prints a note if not. A gated network uses its input twice, and
/// candle must round the sum of the two gradients to nearest.
fn is_oracle(kind: Kind, dtype: DType) -> bool {
    let is = !matches!(kind, Kind::Gated) || candle_rounds(dtype);
    if !is {
        println!("skipped: {kind:?} of {dtype:?}: candle's own sums are not rounded here");
    }
    is
}

/// The network: without a gate in either weight layout, or with a gate.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Conv(Activation),
    Linear(Activation),
    Gated,
}

const KINDS: [Kind; 5] = [
    Kind::Conv(Activation::GeluNew),
    Kind::Conv(Activation::Relu),
    Kind::Linear(Activation::GeluNew),
    Kind::Linear(Activation::Silu),
    Kind::Gated,
];

impl Kind {
    /// Returns the shapes of the input and the parameters.
    fn shapes(self, lead: &[usize]) -> Vec<Vec<usize>> {
        let x = [lead, &[INPUTS]].concat();
        match self {
            Self::Conv(_) => vec![x, vec![INPUTS, INNER], vec![INNER], vec![INNER, 12], vec![12]],
            Self::Linear(_) => vec![x, vec![INNER, INPUTS], vec![INNER], vec![12, INNER], vec![12]],
            Self::Gated => vec![x, vec![INNER, INPUTS], vec![INNER, INPUTS], vec![12, INNER]],
        }
    }

    fn tensors(self, lead: &[usize], dtype: DType) -> Vec<Tensor> {
        let named = |(i, shape): (usize, &Vec<usize>)| normal(&format!("tensor {i}"), shape).to_dtype(dtype).unwrap();
        self.shapes(lead).iter().enumerate().map(named).collect()
    }

    /// Runs the operations in sequence, or in tiles.
    fn run(self, t: &[Tensor], tile_rows: Option<usize>) -> Result<Tensor> {
        let conv = |w: usize| Conv1D::from_tensors(t[w].clone(), t[w + 1].clone());
        let linear = |w: usize| Linear::from_tensors(t[w].clone(), Some(t[w + 1].clone()));
        let alone = |w: usize| Linear::from_tensors(t[w].clone(), None);
        match (self, tile_rows) {
            (Self::Conv(act), None) => conv(3).forward(&ops::activate(&conv(1).forward(&t[0])?, act)?),
            (Self::Linear(act), None) => linear(3).forward(&ops::activate(&linear(1).forward(&t[0])?, act)?),
            (Self::Gated, None) => {
                alone(3).forward(&ops::swiglu(&alone(1).forward(&t[0])?, &alone(2).forward(&t[0])?)?)
            }
            (Self::Conv(act), Some(rows)) => TiledMlp::new(conv(1), act, conv(3), rows)?.forward(&t[0]),
            (Self::Linear(act), Some(rows)) => TiledMlp::new(linear(1), act, linear(3), rows)?.forward(&t[0]),
            (Self::Gated, Some(rows)) => {
                TiledMlp::gated(Activation::Silu, alone(1), alone(2), alone(3), rows)?.forward(&t[0])
            }
        }
    }
}

/// Returns these tensors as leaves. Those that `trained` selects get gradients.
fn leaves(tensors: &[Tensor], trained: impl Fn(usize) -> bool) -> Vec<Tensor> {
    let leaf =
        |(i, t): (usize, &Tensor)| if trained(i) { Var::from_tensor(t).unwrap().into_inner() } else { t.clone() };
    tensors.iter().enumerate().map(leaf).collect()
}

/// Returns the output and candle's gradients of the leaves.
fn backward(kind: Kind, leaves: &[Tensor], tile_rows: Option<usize>) -> (Tensor, Vec<Option<Tensor>>) {
    let y = kind.run(leaves, tile_rows).unwrap();
    let weights = normal("weights of the result", y.dims()).to_dtype(y.dtype()).unwrap();
    let store = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
    (y, leaves.iter().map(|leaf| store.get(leaf).cloned()).collect())
}

fn same_gradients(what: &str, got: &[Option<Tensor>], want: &[Option<Tensor>]) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.is_some(), want.is_some(), "{what}: tensor {i}");
        if let (Some(got), Some(want)) = (got, want) {
            same_bits(&format!("{what}: gradient of tensor {i}"), got, want);
        }
    }
}

#[test]
fn tiles_do_not_change_results() {
    for kind in KINDS {
        for dtype in [DType::F32, DType::BF16, DType::F16].into_iter().filter(|&dtype| is_oracle(kind, dtype)) {
            for lead in [&[1][..], &[64], &[65], &[200], &[3, 90], &[2, 2, 160]] {
                let all = leaves(&kind.tensors(lead, dtype), |_| true);
                let (want, grads_want) = backward(kind, &all, None);
                assert!(grads_want.iter().all(Option::is_some));
                for (threads, tile_rows) in [(1, 64), (3, 64), (1, 128), (3, 192), (1, 1 << 40)] {
                    ops::set_threads(threads);
                    let (got, grads) = backward(kind, &all, Some(tile_rows));
                    let what = format!("{kind:?} of {dtype:?}, {lead:?} in tiles of {tile_rows}");
                    same_bits(&what, &got, &want);
                    same_gradients(&what, &grads, &grads_want);
                }
                ops::set_threads(1);
            }
        }
    }
}

#[test]
fn against_candle_and_finite_differences() {
    for kind in [Kind::Conv(Activation::GeluNew), Kind::Gated] {
        let shapes = kind.shapes(&[2, 70]);
        let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
        // Smaller weights, so that finite differences are accurate enough.
        let small = |t: &[Tensor]| -> Result<Vec<Tensor>> {
            t.iter().enumerate().map(|(i, t)| if i == 0 { Ok(t.clone()) } else { t * 0.2 }).collect()
        };
        let plain = |t: &[Tensor]| -> Result<Tensor> {
            let t = small(t)?;
            let x = t[0].reshape(((), INPUTS))?;
            let y = match kind {
                Kind::Gated => {
                    let gate = x.matmul(&t[1].t()?)?;
                    (gate.silu()? * x.matmul(&t[2].t()?)?)?.matmul(&t[3].t()?)?
                }
                _ => x.matmul(&t[1])?.broadcast_add(&t[2])?.gelu()?.matmul(&t[3])?.broadcast_add(&t[4])?,
            };
            y.reshape((2, 70, ()))
        };
        check(&shapes, |t| kind.run(&small(t)?, Some(64)), plain);
    }
}

#[test]
fn frozen_inputs_get_no_gradient() {
    for kind in KINDS {
        let tensors = kind.tensors(&[150], DType::F32);
        for mask in 0..1 << tensors.len() {
            let some = leaves(&tensors, |i| mask >> i & 1 == 1);
            if mask == 0 {
                assert!(!kind.run(&some, Some(64)).unwrap().track_op());
                continue;
            }
            let (_, want) = backward(kind, &some, None);
            let (_, got) = backward(kind, &some, Some(64));
            assert!((0..tensors.len()).all(|i| got[i].is_some() == (mask >> i & 1 == 1)), "{kind:?}, {mask:b}");
            same_gradients(&format!("{kind:?}, trained {mask:b}"), &got, &want);
        }
    }
}

/// Creates a sink of the parameters. Those that `written` selects already have a contribution.
fn sink(parameters: &[Tensor], written: impl Fn(usize) -> bool) -> Gradients {
    let mut sink = Gradients::default();
    let (mut ranges, mut end, mut buffer) = (vec![], 3, vec![f32::NAN; 3]);
    for (i, parameter) in parameters.iter().enumerate() {
        ranges.push((parameter.id(), end..end + parameter.elem_count(), written(i)));
        end += parameter.elem_count() + 1;
        buffer.resize(end, if written(i) { 0.25 } else { f32::NAN });
    }
    sink.add_buffer(buffer, ranges);
    sink
}

fn sunk(kind: Kind, leaves: &[Tensor], tile_rows: Option<usize>, written: impl Fn(usize) -> bool) -> Vec<Vec<u32>> {
    let (sink, (_, grads)) = sink(&leaves[1..], written).capture(|| backward(kind, leaves, tile_rows));
    assert!(grads[1..].iter().all(Option::is_none), "nothing is left for candle to add");
    let buffers = sink.into_buffers();
    let mut all: Vec<Vec<u32>> = buffers.iter().map(|b| b.iter().map(|v| v.to_bits()).collect()).collect();
    all.push(grads[0].as_ref().map(bits).unwrap_or_default());
    all
}

#[test]
fn gradients_land_in_the_sink() {
    for kind in KINDS {
        for dtype in [DType::F32, DType::BF16, DType::F16].into_iter().filter(|&dtype| is_oracle(kind, dtype)) {
            for input in [true, false] {
                let all = leaves(&kind.tensors(&[3, 70], dtype), |i| i > 0 || input);
                for written in 0..1 << (all.len() - 1) {
                    let of = |tile_rows| sunk(kind, &all, tile_rows, |i| written >> i & 1 == 1);
                    assert_eq!(of(Some(64)), of(None), "{kind:?} of {dtype:?}, existing contribution: {written:b}");
                }
            }
        }
    }
}

#[test]
fn both_uses_of_a_parameter_are_added() {
    let tensors = Kind::Gated.tensors(&[200], DType::F32);
    let mut tied = leaves(&tensors, |_| true);
    tied[2] = tied[1].clone();
    let (_, want) = backward(Kind::Gated, &tied, None);
    let (_, got) = backward(Kind::Gated, &tied, Some(64));
    same_gradients("without a sink", &got, &want);
    for written in [false, true] {
        let of = |tile_rows| {
            let (sink, _) = sink(&[tied[1].clone(), tied[3].clone()], |_| written)
                .capture(|| backward(Kind::Gated, &tied, tile_rows));
            sink.into_buffers().remove(0).into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        assert_eq!(of(Some(64)), of(None), "existing contribution: {written}");
    }
}

#[test]
fn deferred_gradients_are_kept() {
    for kind in KINDS {
        let all = leaves(&kind.tensors(&[200], DType::F32), |_| true);
        let of = |tile_rows, written: bool| {
            let later = DeferredGradients::new(all[1..].iter().map(Tensor::id));
            let (later, (_, grads)) = later.capture(|| backward(kind, &all, tile_rows));
            assert!(grads[1..].iter().all(Option::is_none) && all[1..].iter().all(|p| later.has(p.id())));
            let mut sink = sink(&all[1..], |_| written);
            later.flush(&mut sink).unwrap();
            let made: Vec<u32> = sink.into_buffers().remove(0).into_iter().map(f32::to_bits).collect();
            (made, bits(grads[0].as_ref().unwrap()))
        };
        for written in [false, true] {
            assert_eq!(of(Some(64), written), of(None, written), "{kind:?}, existing contribution: {written}");
        }
    }
}

#[test]
fn a_backward_can_run_twice() {
    let all = leaves(&Kind::Conv(Activation::Gelu).tensors(&[130], DType::F32), |_| true);
    let loss = Kind::Conv(Activation::Gelu).run(&all, Some(64)).unwrap().sqr().unwrap().sum_all().unwrap();
    let [first, again] = [loss.backward().unwrap(), loss.backward().unwrap()];
    for leaf in &all {
        assert_eq!(bits(first.get(leaf).unwrap()), bits(again.get(leaf).unwrap()));
    }
}

#[test]
fn invalid_arguments_are_errors() -> Result<()> {
    let message = |result: Result<TiledMlp>| result.err().map(|e| e.to_string()).unwrap_or_default();
    let linear = |outputs, inputs| Linear::from_tensors(normal("w", &[outputs, inputs]), None);
    for rows in [0, 1, 63, 65, 100] {
        let error = message(TiledMlp::new(linear(8, 4), Activation::Relu, linear(4, 8), rows));
        assert!(error.contains(&format!("tile_rows must be a multiple of {TILE_UNIT}")), "{error}");
    }
    let error = message(TiledMlp::new(linear(8, 4), Activation::Relu, linear(4, 9), 64));
    assert!(
        error.contains(
            "a projection from 4 inputs to 8 outputs does not match the first one, with 4 inputs, and the last one, with 9 inputs"
        ),
        "{error}"
    );
    assert!(
        message(TiledMlp::gated(Activation::Silu, linear(8, 4), linear(8, 5), linear(4, 8), 64))
            .contains("from 5 inputs to 8 outputs does not match")
    );
    let mlp = TiledMlp::gated(Activation::Silu, linear(8, 4), linear(8, 4), linear(4, 8), 64)?;
    for wrong in [&[200, 5][..], &[]] {
        assert!(mlp.forward(&Tensor::ones(wrong, DType::F32, &Device::Cpu)?).is_err());
    }
    assert!(mlp.forward(&Tensor::ones((200, 4), DType::U32, &Device::Cpu)?).is_err());
    assert_eq!(mlp.forward(&Tensor::ones((0, 4), DType::F32, &Device::Cpu)?)?.dims(), [0, 4]);
    Ok(())
}
