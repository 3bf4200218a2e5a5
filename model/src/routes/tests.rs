//! Tests of name resolution, on tensors with one number each.

use super::*;
use crate::Layers;
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, linear};

fn linear_layer(layers: Layers, name: &str) -> Layers {
    layers.layer(name, |vb: VarBuilder| linear(2, 2, vb))
}

fn three() -> Layers {
    ["a", "b", "c"].into_iter().fold(Layers::new(), linear_layer)
}

fn error(layers: Layers) -> String {
    layers.build(DType::F32).expect_err("a mistake").to_string()
}

fn number(x: f32) -> Tensor {
    Tensor::new(x, &Device::Cpu).unwrap()
}

fn numbers(x: &[f32]) -> Activations {
    Activations::new(x.iter().copied().map(number).collect())
}

fn of(x: &Activations) -> Vec<f32> {
    x.tensors().iter().map(|x| x.to_scalar().unwrap()).collect()
}

#[test]
fn layers_without_named_inputs_pass_their_output_on() {
    let model = three().loss(|y, _| Ok(y.clone())).build(DType::F32).unwrap();
    for built in model.layers() {
        let x = numbers(&[1.0, 2.0]);
        assert!(built.route().inputs(&x).unwrap().is_none() && built.route().reads().is_empty());
        assert_eq!(of(&built.pass_on(numbers(&[3.0]), &x).unwrap()), [3.0]);
    }
    let signature = model.signature();
    assert!(signature.takes_unnamed && signature.inputs.is_empty() && signature.targets.is_none());
    assert_eq!((&*signature.first, &*signature.outputs), ("a", &["c".to_string()][..]));
}

/// `a` exposes one output, which only the loss takes. `c` takes the output of `a` and an input of the batch.
#[test]
fn named_values_reach_their_last_user_and_gradients_flow_back() {
    let exposing = linear_layer(Layers::new(), "a").exposes(["more"]);
    let layers = linear_layer(linear_layer(exposing, "b"), "c").inputs(["extra", "a"]);
    let layers = layers.loss_of(["c", "a.more", "b"], ["y"], |[c, ..], _| Ok(c.clone()));
    let model = layers.build(DType::F32).unwrap();
    let [a, b, c] = [0, 1, 2].map(|layer| model.layers()[layer].route());
    let behind_a = a.pass_on(numbers(&[10.0, 11.0]), &numbers(&[1.0])).unwrap();
    assert_eq!(of(&behind_a), [10.0, 11.0]);
    assert_eq!(of(&b.inputs(&behind_a).unwrap().unwrap()), [10.0]);
    let behind_b = b.pass_on(numbers(&[20.0]), &behind_a).unwrap();
    assert_eq!(of(&behind_b), [20.0, 10.0, 11.0]);
    assert_eq!(c.reads(), ["extra"]);
    let x = Activations::new([behind_b.tensors(), &[number(5.0)]].concat());
    assert_eq!(of(&c.inputs(&x).unwrap().unwrap()), [5.0, 10.0]);
    assert_eq!(of(&c.pass_on(numbers(&[30.0]), &x).unwrap()), [30.0, 11.0, 20.0]);
    let takes = |route: &Route, flowing: usize| (0..flowing).map(|i| route.takes(i, flowing)).collect::<Vec<_>>();
    assert_eq!((takes(b, 2), takes(c, 3)), (vec![true, false], vec![false, true, false]));
    // The gradients of the values [20, 10, 11] that `b` passes on. The first value is the output of `b`; the other two
    // bypass `b`.
    let gradient = |x: f32| Some(number(x));
    let [own, bypass] = b.gradients(vec![gradient(0.1), None, gradient(0.3)], 1, 2);
    let values =
        |x: Vec<Option<Tensor>>| x.into_iter().map(|x| x.map(|x| x.to_scalar::<f32>().unwrap())).collect::<Vec<_>>();
    assert_eq!((values(own), values(bypass)), (vec![Some(0.1)], vec![None, Some(0.3)]));
    let error = a.pass_on(numbers(&[]), &numbers(&[1.0])).unwrap_err().to_string();
    assert!(error.contains("it has 0 outputs, but exposes 1"), "{error}");
}

#[test]
fn the_outputs_of_repeated_layers_have_their_own_names() {
    let build = |_: usize, vb: VarBuilder| linear(2, 2, vb);
    let layers = Layers::new().layers("block", 2, build).with(["mask"]).exposes(["balance"]);
    let signature = layers.signature().unwrap();
    assert_eq!(signature.values, ["block.0", "block.0.balance", "block.1", "block.1.balance"]);
    let readers: Vec<&str> = signature.inputs.iter().map(|(_, layer)| layer.as_str()).collect();
    assert_eq!(readers, ["block.0", "block.1"]);
}

#[test]
fn names_that_cannot_be_resolved_are_errors() {
    let loss = |layers: Layers, output: &'static str| layers.loss_of([output], [], |[y], []| Ok(y.clone()));
    let told = error(loss(three(), "d"));
    assert!(told.contains("the output `d`") && told.contains("`a`, `b`, `c`"), "{told}");
    let told = error(loss(linear_layer(linear_layer(Layers::new(), "a").inputs(["b"]), "b"), "b"));
    assert!(told.contains("layer `a` takes `b`, which is computed by that layer itself or by a later one"), "{told}");
    assert!(error(loss(three().inputs(["x"]), "c")).contains("takes the outputs of layer `b`"));
    assert!(error(loss(three(), "b")).contains("neither a later layer nor the loss takes the outputs of layer `c`"));
    assert!(error(loss(three().inputs(Vec::<String>::new()), "c")).contains("layer `c` has no inputs"));
    assert!(
        error(loss(Layers::new().with(["x"]), "c")).contains("`.with([…])` describes the layers of the previous call")
    );
    assert!(error(loss(linear_layer(three(), "b"), "b")).contains("two layers are named `b`"));
    let twice = linear_layer(linear_layer(Layers::new(), "a").exposes(["b"]), "a.b");
    assert!(error(loss(twice, "a.b")).contains("two values are named `a.b`"));
    assert!(matches!(Layers::new().signature(), Err(BuildError::NoLayers)));
}
