//! Rotary position embedding, in the half-split convention of Hugging Face's Llama.

use super::apply::apply1;
use super::footprint::{Costs, Footprint, Reads, rooms};
use super::kernel::{Isa, rotary as kernel};
use super::measure;
use super::operand::View;
use super::output::{build_as, tensor};
use super::product::Elements;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use std::sync::Arc;

/// The angles of all positions. A clone shares them.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// cos of `[positions, half]`, then sin of the same.
    table: Arc<[f32]>,
    positions: usize,
    half: usize,
}

impl Rotary {
    /// Position p rotates the pair (`x[i], x[i + size/2]`) of a head by p·theta^(−2i/size).
    ///
    /// The angles are computed in f64 and rounded once. An odd `size` is an error.
    pub fn new(size: usize, positions: usize, theta: f64) -> Result<Self> {
        if size == 0 || !size.is_multiple_of(2) {
            bail!("{OP}: the head size must be even, got {size}");
        }
        let half = size / 2;
        let angle = |at: usize| {
            let (position, pair) = ((at / half) as f64, (at % half) as f64);
            position * libm::pow(theta, -2.0 * pair / size as f64)
        };
        let cos = (0..positions * half).map(|at| libm::cos(angle(at)) as f32);
        let sin = (0..positions * half).map(|at| libm::sin(angle(at)) as f32);
        Ok(Self { table: cos.chain(sin).collect(), positions, half })
    }

    /// Rotates `[batch, time, heads, size]`; the first of `time` is position 0. More positions than the table has are
    /// an error.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        apply1(x, self.clone())
    }

    fn run(&self, x: Elements<'_>, shape: &Shape, dtype: DType, rotate: Rotate) -> Result<CpuStorage> {
        let (_, time, heads, size) = shape.dims4()?;
        if size != 2 * self.half {
            bail!("{OP}: heads of {} expected, got {shape:?}", 2 * self.half);
        }
        if time > self.positions {
            bail!("{OP}: a sequence of {time} is longer than the {} positions of the model", self.positions);
        }
        let (cos, sin) = self.table.split_at(self.positions * self.half);
        let row = heads * size;
        build_as(OP, dtype, x.len() / row.max(1), row, |range, y| {
            let isa = Isa::best();
            let x = x.floats(range.start * row..range.end * row);
            for ((at, x), y) in range.zip(x.chunks_exact(row.max(1))).zip(y.chunks_exact_mut(row.max(1))) {
                let angles = at % time * self.half..(at % time + 1) * self.half;
                rotate(isa, x, &cos[angles.clone()], &sin[angles], y);
            }
        })
    }
}

type Rotate = fn(Isa, x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]);

const OP: &str = "rotary";

impl Footprint for Rotary {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (shape, dtype) = (inputs[0].shape(), inputs[0].dtype());
        let (batch, time, heads, size) = shape.dims4()?;
        let rooms = rooms(dtype, batch * time, heads * size, 1);
        Ok(Costs { forward: rooms, backward: rooms, ..Costs::new(shape, dtype) })
    }
}

impl CustomOp1 for Rotary {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, xs: &CpuStorage, xl: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let y = self.run(View::new(OP, xs, xl)?.elements(), xl.shape(), xs.dtype(), kernel::rotate)?;
        Ok((y, xl.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let _timed = measure::backward(OP);
        let held = dy.storage_and_layout();
        let dx = self.run(View::of(OP, &held)?.elements(), x.shape(), x.dtype(), kernel::rotate_back)?;
        Ok(Some(tensor(dx, x.shape())))
    }
}
