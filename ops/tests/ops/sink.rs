//! Gradients of parameters in a caller's buffer.

use crate::check::{bits, ids, normal};
use candle_core::{Result, Tensor, Var};
use candle_nn::Module;
use zero_ops as ops;
use zero_ops::sink::Gradients;

/// Runs `op` on trained copies of `parameters`. Returns their gradients from candle's store and from a sink whose
/// buffer initially holds NaN.
fn both(parameters: &[Tensor], op: impl Fn(&[Tensor]) -> Result<Tensor>) -> Vec<(Vec<u32>, Vec<u32>)> {
    let vars: Vec<Var> = parameters.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let leaves: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let loss = || {
        let y = op(&leaves).unwrap();
        (&y * normal("weights", y.dims())).unwrap().sum_all().unwrap()
    };
    let store = loss().backward().unwrap();
    let mut ranges = Vec::new();
    let mut end = 3;
    for leaf in &leaves {
        ranges.push((leaf.id(), end..end + leaf.elem_count(), false));
        end += leaf.elem_count() + 1;
    }
    let mut sink = Gradients::default();
    sink.add_buffer(vec![f32::NAN; end], ranges.clone());
    let loss = loss();
    let (sink, sunk) = sink.capture(|| loss.backward());
    let sunk = sunk.unwrap();
    let buffer = sink.into_buffers().remove(0);
    let inside: usize = ranges.iter().map(|r| r.1.len()).sum();
    assert_eq!(buffer.iter().filter(|v| v.is_nan()).count(), buffer.len() - inside, "only the ranges are written");
    leaves
        .iter()
        .zip(ranges)
        .map(|(leaf, (_, range, _))| {
            assert!(sunk.get(leaf).is_none(), "nothing is left for candle to add");
            (bits(store.get(leaf).unwrap()), buffer[range].iter().map(|v| v.to_bits()).collect())
        })
        .collect()
}

#[test]
fn gradients_land_in_the_sink() {
    let n = |name: &str, shape: &[usize]| normal(name, shape);
    let x = n("x", &[70, 6]);
    let at = ids("ids", &[9], 4);
    let results = [
        both(&[n("w", &[5, 6]), n("b", &[5])], |t| {
            ops::Linear::from_tensors(t[0].clone(), Some(t[1].clone())).forward(&x)
        }),
        both(&[n("w", &[6, 5]), n("b", &[5])], |t| ops::Conv1D::from_tensors(t[0].clone(), t[1].clone()).forward(&x)),
        both(&[n("w", &[6, 5]), n("b", &[5])], |t| {
            ops::Conv1D::from_tensors(t[0].clone(), t[1].clone()).forward_gelu(&x)
        }),
        both(&[n("w", &[6]), n("b", &[6])], |t| {
            ops::LayerNorm::from_tensors(t[0].clone(), t[1].clone(), 1e-5).forward(&x)
        }),
        both(&[n("w", &[6])], |t| ops::RmsNorm::from_tensor(t[0].clone(), 1e-5).forward(&x)),
        both(&[n("w", &[4, 3])], |t| ops::Embedding::from_tensor(t[0].clone()).forward(&at)),
    ];
    for (plain, sunk) in results.into_iter().flatten() {
        assert_eq!(plain, sunk);
    }
}

#[test]
fn both_uses_of_a_tied_parameter_are_added() {
    let at = ids("ids", &[9], 4);
    let tied = both(&[normal("w", &[4, 3])], |t| {
        let rows = ops::Embedding::from_tensor(t[0].clone()).forward(&at)?;
        ops::Linear::from_tensors(t[0].clone(), None).forward(&rows)
    });
    for (plain, sunk) in tied {
        assert_eq!(plain, sunk);
    }
}
