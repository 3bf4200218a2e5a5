//! Initial values as a function of (seed, parameter name, index), so that any range of a parameter can be computed on
//! its own.

use candle_core::Shape;
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;

use crate::random::{Stream, hash};

/// Writes elements `start..start + out.len()` of the parameter `name` of `shape`.
///
/// The distributions match candle-nn's [`Init`]. The random numbers come from this crate, since candle's CPU generator
/// cannot be seeded.
pub fn fill(init: &Init, shape: &Shape, name: &str, seed: u64, start: usize, out: &mut [f32]) {
    let stream = Stream::new(seed, "init", hash(name));
    match *init {
        Init::Const(value) => out.fill(value as f32),
        Init::Randn { mean, stdev } => stream.fill_scaled_normal(start as u64, mean as f32, stdev as f32, out),
        Init::Uniform { lo, up } => uniform(&stream, lo, up, start, out),
        Init::Kaiming { dist, fan, non_linearity } => {
            let std = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => stream.fill_scaled_normal(start as u64, 0.0, std as f32, out),
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * std;
                    uniform(&stream, -bound, bound, start, out);
                }
            }
        }
    }
}

fn uniform(stream: &Stream, lo: f64, up: f64, start: usize, out: &mut [f32]) {
    stream.fill_scaled_uniform(start as u64, lo as f32, (up - lo) as f32, out);
}
