//! The data of `mlp.rs` and `trainer.rs`: points on three spirals.

use candle_core::{Device, Result, Tensor};

/// Returns points on three spirals around the origin, and the index of each point's spiral. `distance` maps the index
/// of a point to its distance from the origin, from 0 to 1.
pub(crate) fn spirals(points: usize, distance: impl Fn(usize) -> f32) -> Result<(Tensor, Tensor)> {
    let point = |i: usize| {
        let angle = 4.0 * distance(i) + 2.1 * (i % 3) as f32;
        [distance(i) * angle.cos(), distance(i) * angle.sin()]
    };
    let features = (0..points).flat_map(point).collect();
    let classes = (0..points).map(|i| i as u32 % 3).collect();
    Ok((Tensor::from_vec(features, (points, 2), &Device::Cpu)?, Tensor::from_vec(classes, points, &Device::Cpu)?))
}
