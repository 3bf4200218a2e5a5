//! Tests releases and gathers of a parameter.

use super::*;
use candle_core::CpuStorage;

fn parameter(values: Vec<f32>) -> Parameter {
    let p = Parameter::new(
        "w".into(),
        Shape::from((2, 2)),
        DType::F32,
        &Device::Cpu,
        candle_nn::init::ZERO,
        0,
        Role::Trained,
    )
    .unwrap();
    p.fill(CpuStorage::F32(values)).unwrap();
    p
}

#[test]
fn operations_on_a_released_parameter_fail() {
    let p = parameter(vec![1.0; 4]);
    p.release().unwrap();
    let x = Tensor::ones((2, 2), DType::F32, &candle_core::Device::Cpu).unwrap();
    assert!(x.matmul(p.leaf()).is_err());
    assert!(x.add(p.leaf()).is_err());
    assert!(p.leaf().exp().is_err());
    assert!(p.leaf().t().unwrap().contiguous().is_err());
    assert!(p.leaf().to_vec2::<f32>().is_err());
}

#[test]
fn a_graph_saved_before_a_release_backpropagates_after_the_next_gather() {
    let p = parameter(vec![1.0, 2.0, 3.0, 4.0]);
    let x = candle_core::Var::new(&[[1f32, 2.0], [3.0, 4.0]], &candle_core::Device::Cpu).unwrap();
    let y = x.matmul(&p.leaf().t().unwrap()).unwrap().sum_all().unwrap();
    let values = p.release().unwrap();
    assert!(y.backward().is_err());
    p.fill(values).unwrap();
    let grads = y.backward().unwrap();
    assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>().unwrap(), [[4.0, 6.0], [4.0, 6.0]]);
    assert_eq!(grads.get(p.leaf()).unwrap().to_vec2::<f32>().unwrap(), [[4.0, 6.0], [4.0, 6.0]]);
}

#[test]
fn values_of_another_length_or_dtype_are_rejected() {
    let p = parameter(vec![0.0; 4]);
    assert!(p.fill(CpuStorage::F32(vec![0.0; 3])).is_err());
    assert!(p.fill(CpuStorage::F64(vec![0.0; 4])).is_err());
}
