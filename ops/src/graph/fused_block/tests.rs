//! Tests of fused blocks: bit-identical results, errors, and the memory of dropped graphs.

use super::*;
use crate::Conv1D;
use crate::LayerNorm;
use crate::Linear;
use crate::causal_attention_packed;
use crate::gelu;
use crate::graph::apply::{reshape, sum};
use crate::random::Stream;
use crate::sink::Gradients as Sink;
use candle_core::{Device, Var};
use candle_nn::Module;

fn normal(name: &str, shape: &[usize]) -> Result<Var> {
    let mut values = vec![0.0; shape.iter().product()];
    Stream::new(3, name, 0).fill_normal(0, &mut values);
    Var::from_vec(values, shape, &Device::Cpu)
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    Ok(tensor.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
}

#[test]
fn is_bit_identical_to_separate_operations() -> Result<()> {
    let parameters = [
        normal("norm weight", &[12])?,
        normal("norm bias", &[12])?,
        normal("attention weight", &[12, 36])?,
        normal("attention bias", &[36])?,
        normal("weight", &[12, 12])?,
        normal("bias", &[12])?,
    ];
    let [nw, nb, aw, ab, w, b] = parameters.each_ref().map(|p| p.as_tensor().clone());
    let norm = LayerNorm::from_tensors(nw, nb, 1e-5);
    let (attention, last) = (Conv1D::from_tensors(aw, ab), Conv1D::from_tensors(w, b));
    let (x, dy) = (normal("x", &[2, 5, 12])?, normal("dy", &[2, 5, 12])?);
    // This block uses a tensor three times and a parameter twice, and contains an operation whose output is unused.
    let run = |x: &Tensor| -> Result<Tensor> {
        let attended = causal_attention_packed(&attention.forward(&norm.forward(x)?)?, 3)?;
        let x = sum(&sum(x, &attended)?, &last.forward(x)?)?;
        gelu(&x)?;
        let flat = reshape(&norm.forward(&x)?, (10, 12))?;
        sum(&x, &reshape(&last.forward(&flat)?, (2, 5, 12))?)
    };
    let backward = |promised: bool| -> Result<(Vec<u32>, Vec<Vec<u32>>)> {
        let mut sink = Sink::default();
        for parameter in &parameters {
            sink.add_buffer(
                vec![f32::NAN; parameter.elem_count()],
                [(parameter.id(), 0..parameter.elem_count(), false)],
            );
        }
        let y = if promised { crate::sink::promise(|| fused_block(&x, run)) } else { fused_block(&x, run) }?;
        let (sink, store) = sink.capture(|| crate::backward_from(&[(y.clone(), dy.as_tensor().clone())]));
        let store = store?;
        let dx = store.get(&x).map(bits).transpose()?.unwrap_or_default();
        let mut all: Vec<Vec<u32>> =
            sink.into_buffers().iter().map(|buffer| buffer.iter().map(|v| v.to_bits()).collect()).collect();
        all.push(bits(&y)?);
        Ok((dx, all))
    };
    let want = backward(false)?;
    assert!(!want.0.is_empty());
    assert_eq!(backward(true)?, want);
    Ok(())
}

#[test]
fn backward_continues_behind_the_block_and_dropping_the_graph_frees_it() -> Result<()> {
    let (x, dy) = (normal("x", &[4, 3])?, normal("dy", &[4, 3])?);
    let run = |x: &Tensor| fused_block(&fused_block(&(x * 3.0)?, gelu)?, |x| sum(x, x));
    let gradient = |y: &Tensor| -> Result<Vec<u32>> {
        let store = crate::backward_from(&[(y.clone(), dy.as_tensor().clone())])?;
        store.get(&x).map(bits).transpose().map(Option::unwrap_or_default)
    };
    let y = crate::sink::promise(|| run(&x))?;
    let alive = |y: &Tensor| ALIVE.lock().is_ok_and(|alive| alive.contains_key(&y.id()));
    assert!(alive(&y));
    let want = gradient(&run(&x)?)?;
    assert!(want.len() == 12 && gradient(&y)? == want);
    let again = gradient(&y).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(again.contains("the backward ran twice"), "{again}");
    let id = y.id();
    drop(y);
    assert!(ALIVE.lock().is_ok_and(|alive| !alive.contains_key(&id)));
    Ok(())
}

#[test]
fn a_frozen_linear_layer_keeps_no_input() -> Result<()> {
    let (x, w) = (normal("x", &[2, 4])?, normal("w", &[3, 4])?);
    for (weight, is_kept) in [(w.as_tensor().clone(), true), (w.as_tensor().detach(), false)] {
        let map = Linear::from_tensors(weight, None);
        let mut hidden = None;
        let run = |x: &Tensor| map.forward(hidden.insert(gelu(x)?));
        let y = crate::sink::promise(|| fused_block(&x, run))?;
        assert_eq!(hidden.is_some_and(|hidden| bits(&hidden).is_ok()), is_kept);
        drop(y);
    }
    Ok(())
}

#[test]
fn invalid_uses_are_errors() -> Result<()> {
    let (x, w, b) = (normal("x", &[2, 4])?, normal("w", &[4, 4])?, normal("b", &[4])?);
    let layer = Conv1D::from_tensors(w.as_tensor().clone(), b.as_tensor().clone());
    let make = || crate::sink::promise(|| fused_block(&x, |x| layer.forward(x)));
    let error = make()?.sum_all()?.backward().err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("has no gradient buffer"), "{error}");
    let error =
        crate::sink::promise(|| fused_block(&x, |x| sum(x, &b))).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("cannot add"), "{error}");
    assert!(!recording());
    Ok(())
}
