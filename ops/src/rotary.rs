//! Rotary position embedding, in the half-split convention of Hugging Face's Llama, and its scalings.

use crate::decode::cached_positions;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply1;
use crate::graph::operand::{View, indices_of};
use crate::graph::output::{build_as, tensor};
use crate::kernel::{Isa, rotary as kernel};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads, rooms};
use crate::meta::tracing;
use crate::product::Elements;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, Storage};
use std::sync::Arc;
#[cfg(feature = "cuda")]
use zero_kernels::rotary::Turn;

/// A change of the frequencies of a model that was trained on shorter sequences: Hugging Face's `rope_scaling`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Divides all frequencies by `factor`: positional interpolation (Chen et al., "Extending context window of large
    /// language models via positional interpolation", 2023).
    Linear {
        /// At least 1 to extend sequences.
        factor: f64,
    },
    /// Divides low frequencies by `factor`, keeps high ones and interpolates between them: the scaling of Llama 3.1.
    Llama3 {
        /// At least 1 to extend sequences.
        factor: f64,
        /// A pair that makes fewer turns than this over the original positions has a low frequency.
        low_freq_factor: f64,
        /// A pair that makes more turns than this has a high frequency. Must exceed `low_freq_factor`.
        high_freq_factor: f64,
        /// Number of positions that the model was originally trained on.
        original_max_position_embeddings: usize,
    },
    /// Divides each frequency by a factor of its own, which is another one for rows longer than those of the original
    /// training: LongRoPE (Ding et al., "LongRoPE: extending LLM context window beyond 2 million tokens", 2024), as in
    /// Phi-3. Also multiplies cosines and sines by `attention_factor`.
    LongRope {
        /// Divisors for rows of at most `original_max_position_embeddings` tokens, one for each pair.
        short_factor: Vec<f64>,
        /// Divisors for longer rows, one for each pair.
        long_factor: Vec<f64>,
        /// Factor of cosines and sines.
        attention_factor: f64,
        /// Number of positions that the model was originally trained on.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// Returns an error if a factor is not a positive number, factors cross each other, or there is not one for each of
    /// `pairs`.
    fn check(&self, pairs: usize) -> Result<()> {
        let is_positive = |x: f64| x.is_finite() && x > 0.0;
        if let Self::LongRope { short_factor, long_factor, attention_factor, .. } = self {
            for (name, factors) in [("short_factor", short_factor), ("long_factor", long_factor)] {
                if factors.len() != pairs || !factors.iter().copied().all(is_positive) {
                    bail!("{OP}: {name} must have a positive number for each of {pairs} pairs, got {factors:?}");
                }
            }
            if !is_positive(*attention_factor) {
                bail!("{OP}: attention_factor must be positive, got {attention_factor}");
            }
        }
        if let Self::Linear { factor } | Self::Llama3 { factor, .. } = *self
            && !is_positive(factor)
        {
            bail!("{OP}: the factor of a scaling must be positive, got {factor}");
        }
        if let Self::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } = *self
            && !(is_positive(low) && high.is_finite() && low < high)
        {
            bail!("{OP}: low_freq_factor must be positive and below high_freq_factor, got {low} and {high}");
        }
        Ok(())
    }

    /// Scales the frequency of a pair, in radians per position. `is_long` says whether it is for rows longer than those
    /// of the original training.
    fn apply(&self, frequency: f64, pair: usize, is_long: bool) -> f64 {
        match self {
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let turns = *original_max_position_embeddings as f64 * frequency / (2.0 * std::f64::consts::PI);
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
            Self::LongRope { short_factor, long_factor, .. } => {
                frequency / if is_long { long_factor[pair] } else { short_factor[pair] }
            }
        }
    }
}

/// The angles of all positions. Clones share them.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// The cosines, `[positions, half]`, followed by the sines in the same shape.
    table: Arc<[f32]>,
    positions: usize,
    half: usize,
    /// Size of a head, of which the first 2·half elements are rotated.
    size: usize,
    /// Rows with more tokens use another table.
    longer: Option<(usize, Arc<Self>)>,
    #[cfg(feature = "cuda")]
    on_gpu: Arc<gpu::rotary::Table>,
}

impl Rotary {
    /// Creates the table that rotates the pair (`x[i], x[i + size/2]`) of a head at position p by p·theta^(−2i/size).
    ///
    /// The angles are computed in f64 and rounded once.
    ///
    /// # Errors
    /// Fails if `size` is odd.
    pub fn new(size: usize, positions: usize, theta: f64) -> Result<Self> {
        Self::of(size, positions, theta, |frequency, _| frequency, 1.0)
    }

    /// Creates the table with scaled frequencies; otherwise as [`new`](Self::new).
    ///
    /// # Errors
    /// Fails if `size` is odd, factors are not positive or cross each other, or there is not one for each pair.
    pub fn scaled(size: usize, positions: usize, theta: f64, scaling: &RopeScaling) -> Result<Self> {
        scaling.check(size / 2)?;
        let of = |is_long, factor| {
            Self::of(size, positions, theta, |frequency, pair| scaling.apply(frequency, pair, is_long), factor)
        };
        let RopeScaling::LongRope { attention_factor, original_max_position_embeddings: original, .. } = *scaling
        else {
            return of(false, 1.0);
        };
        let short = of(false, attention_factor)?;
        let longer = match positions > original {
            true => Some((original, Arc::new(of(true, attention_factor)?))),
            false => None,
        };
        Ok(Self { longer, ..short })
    }

    /// Rotates the first elements of heads of `size`, as many as this table is for, and passes on the others.
    ///
    /// # Errors
    /// Fails if heads are smaller than the table.
    pub fn of_heads(self, size: usize) -> Result<Self> {
        if size < self.size {
            bail!("{OP}: heads of size {size} have no {} elements to rotate", self.size);
        }
        let longer =
            self.longer.as_ref().map(|(tokens, longer)| (*tokens, Arc::new(Self { size, ..(**longer).clone() })));
        Ok(Self { size, longer, ..self })
    }

    fn of(size: usize, positions: usize, theta: f64, scale: impl Fn(f64, usize) -> f64, factor: f64) -> Result<Self> {
        if size == 0 || !size.is_multiple_of(2) {
            bail!("{OP}: the head size must be even, got {size}");
        }
        let half = size / 2;
        let frequency = |pair: usize| scale(libm::pow(theta, -2.0 * pair as f64 / size as f64), pair);
        let frequencies: Vec<f64> = (0..half).map(frequency).collect();
        let angle = |at: usize| (at / half) as f64 * frequencies[at % half];
        let cos = (0..positions * half).map(|at| (factor * libm::cos(angle(at))) as f32);
        let sin = (0..positions * half).map(|at| (factor * libm::sin(angle(at))) as f32);
        Ok(Self {
            table: cos.chain(sin).collect(),
            positions,
            half,
            size,
            longer: None,
            #[cfg(feature = "cuda")]
            on_gpu: Arc::default(),
        })
    }

    /// Returns the table for rows of `time` tokens.
    fn for_rows(&self, time: usize) -> Self {
        match &self.longer {
            Some((tokens, longer)) if time > *tokens => (**longer).clone(),
            _ => self.clone(),
        }
    }

    /// Rotates `[batch, time, heads, size]`; the first element of `time` is position 0, and inside
    /// [`decode`](crate::decode()) the first one that is not in the cache.
    ///
    /// # Errors
    /// Fails if there are more positions than the table has.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, time, ..) = x.dims4()?;
        if let Some(positions) = cached_positions(OP, batch, time)? {
            if let Some(last) = positions.iter().find(|&&position| position as usize >= self.positions) {
                bail!("{OP}: position {last} of a sequence is beyond the {} positions of the model", self.positions);
            }
            let longest = positions.iter().max().map_or(0, |&position| position as usize + 1);
            return apply1(x, Rotation { rotary: self.for_rows(longest), positions: Some(positions.into()) });
        }
        apply1(x, Rotation { rotary: self.for_rows(time), positions: None })
    }

    /// Rotates `[batch, time, heads, size]` by the angles of `position_ids`, `[batch, time]` of u32, i64 or u8.
    ///
    /// # Errors
    /// Fails if the shapes do not match, or if the table does not have a position.
    pub fn apply_at(&self, x: &Tensor, position_ids: &Tensor) -> Result<Tensor> {
        let (batch, time, ..) = x.dims4()?;
        if position_ids.dims() != [batch, time] {
            bail!("{OP}: position_ids of shape {:?} do not match {batch} rows of {time} tokens", position_ids.shape());
        }
        let positions = match tracing() {
            true => vec![0; batch * time],
            false => indices_of(OP, position_ids, self.positions)?.into_iter().map(|at| at as u32).collect(),
        };
        apply1(x, Rotation { rotary: self.for_rows(time), positions: Some(positions.into()) })
    }
}

/// The rotation of one tensor.
#[derive(Clone, Debug)]
struct Rotation {
    rotary: Rotary,
    /// The position of each token; if `None`, the first token of each row is position 0.
    positions: Option<Arc<[u32]>>,
}

impl Rotation {
    /// Returns the positions, heads and their size, after checking that the table has enough positions.
    fn fits(&self, shape: &Shape) -> Result<(usize, usize, usize)> {
        let (_, time, heads, size) = shape.dims4()?;
        let Rotary { positions, size: expected, .. } = self.rotary;
        if size != expected {
            bail!("{OP}: expected heads of size {expected}, got {shape:?}");
        }
        if self.positions.is_none() && time > positions {
            bail!("{OP}: a sequence of {time} tokens is longer than the {positions} positions of the model");
        }
        Ok((time, heads, size))
    }

    #[cfg(feature = "cuda")]
    fn run_on_gpu(&self, x: (&CudaStorage, &Layout), turn: Turn) -> Result<CudaStorage> {
        self.fits(x.1.shape())?;
        if self.rotary.size != 2 * self.rotary.half {
            bail!("{OP}: the rotation of a part of a head is unsupported on a GPU");
        }
        gpu::rotary::run(OP, (&self.rotary.on_gpu, &self.rotary.table), self.positions.as_deref(), x, turn)
    }

    fn run(&self, x: Elements<'_>, shape: &Shape, dtype: DType, rotate: Rotate) -> Result<CpuStorage> {
        let (time, heads, size) = self.fits(shape)?;
        let (half, positions) = (self.rotary.half, self.positions.as_deref());
        let (cos, sin) = self.rotary.table.split_at(self.rotary.positions * half);
        let row = heads * size;
        build_as(OP, dtype, x.len() / row.max(1), row, [x], |range, [x], y| {
            let isa = Isa::current();
            for ((at, x), y) in range.zip(x.chunks_exact(row.max(1))).zip(y.chunks_exact_mut(row.max(1))) {
                let position = positions.map_or(at % time, |positions| positions[at] as usize);
                let angles = position * half..(position + 1) * half;
                rotate(isa, size, x, &cos[angles.clone()], &sin[angles], y);
            }
        })
    }
}

type Rotate = fn(Isa, size: usize, x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]);

const OP: &str = "rotary";

impl Footprint for Rotation {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (shape, dtype) = (inputs[0].shape(), inputs[0].dtype());
        let (batch, time, heads, size) = shape.dims4()?;
        let rooms = rooms(dtype, batch * time, heads * size, 1);
        let saved = self.positions.as_ref().map_or(0, |positions| size_of_val(&**positions) as u64);
        Ok(Costs { saved, forward: rooms, backward: rooms, ..Costs::new(shape, dtype) })
    }
}

impl CustomOp1 for Rotation {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, xs: &CpuStorage, xl: &Layout) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let y = self.run(View::new(OP, xs, xl)?.elements(), xl.shape(), xs.dtype(), kernel::rotate)?;
        Ok((y, xl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, xs: &CudaStorage, xl: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((self.run_on_gpu((xs, xl), Turn::Forth)?, xl.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if let (Storage::Cuda(dys), layout) = (&*dy.storage_and_layout().0, dy.layout()) {
            let dx = self.run_on_gpu((dys, layout), Turn::Back)?;
            return Ok(Some(gpu::tensor(dx, x.shape())));
        }
        let _timed = measure::backward(OP);
        let held = dy.storage_and_layout();
        let dx = self.run(View::of(OP, &held)?.elements(), x.shape(), x.dtype(), kernel::rotate_back)?;
        Ok(Some(tensor(dx, x.shape())))
    }
}
