//! Rotary position embedding in the half-split convention of Hugging Face's Llama, with scaled frequencies for long
//! sequences.

use crate::decode::cached_positions;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{View, indices_of};
use crate::graph::output::{build_as, tensor};
use crate::kernel::{Isa, rotary as kernel};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads, rooms};
use crate::meta::{self, tracing};
use crate::product::Elements;
use crate::sequence::{own_positions, whole_length};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, Layout, Storage};
use std::sync::{Arc, Mutex, PoisonError};
#[cfg(feature = "cuda")]
use zero_kernels::rotary::Turn;
use zero_model_options::RopeScaling;

/// Returns an error if a factor is not a positive number, if `low_freq_factor` is not below `high_freq_factor`, or if
/// LongRoPE does not have one factor for each of `pairs`.
fn check(scaling: &RopeScaling, pairs: usize) -> Result<()> {
    let is_positive = |x: f64| x.is_finite() && x > 0.0;
    if let RopeScaling::LongRope { short_factor, long_factor, factor, attention_factor, .. } = scaling {
        for (name, factors) in [("short_factor", short_factor), ("long_factor", long_factor)] {
            if factors.len() != pairs || !factors.iter().copied().all(is_positive) {
                bail!("{OP}: {name} must have a positive number for each of {pairs} pairs, got {factors:?}");
            }
        }
        for (name, factor) in [("factor", factor), ("attention_factor", attention_factor)] {
            if let Some(factor) = factor.filter(|factor| !is_positive(*factor)) {
                bail!("{OP}: {name} must be positive, got {factor}");
            }
        }
    }
    if let RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. } = *scaling
        && !is_positive(factor)
    {
        bail!("{OP}: the scaling factor must be positive, got {factor}");
    }
    if let RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } = *scaling
        && !(is_positive(low) && high.is_finite() && low < high)
    {
        bail!("{OP}: low_freq_factor must be positive and below high_freq_factor, got {low} and {high}");
    }
    Ok(())
}

/// Scales the frequency of a pair, in radians per position. `is_long` selects LongRoPE's divisors for sequences longer
/// than `original_max_position_embeddings`.
fn scaled(scaling: &RopeScaling, frequency: f64, pair: usize, is_long: bool) -> f64 {
    match scaling {
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
            let turns = *original_max_position_embeddings as f64 * frequency / (2.0 * std::f64::consts::PI);
            let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            (1.0 - kept) * frequency / factor + kept * frequency
        }
        RopeScaling::LongRope { short_factor, long_factor, .. } => {
            frequency / if is_long { long_factor[pair] } else { short_factor[pair] }
        }
    }
}

/// Rotary position embedding. Its table of angles grows to the longest row that it has rotated. Clones share the table.
#[derive(Clone, Debug)]
pub struct Rotary {
    angles: Arc<Angles>,
    /// Rows with more tokens than this number use these angles.
    longer: Option<(usize, Arc<Angles>)>,
    /// Number of positions of the model.
    positions: usize,
    /// Size of a head. The first elements of a head are rotated, two for each frequency.
    size: usize,
}

impl Rotary {
    /// Creates the rotation of the pair (`x[i], x[i + size/2]`) of a head at position p by p·theta^(−2i/size).
    ///
    /// The angles are computed in f64 and rounded once.
    ///
    /// # Errors
    /// Fails if `size` is odd.
    pub fn new(size: usize, positions: usize, theta: f64) -> Result<Self> {
        let angles = Angles::new(size, theta, |frequency, _| frequency, 1.0)?;
        Ok(Self { angles, longer: None, positions, size })
    }

    /// Creates the rotation of [`new`](Self::new) with scaled frequencies.
    ///
    /// # Errors
    /// Fails if `size` is odd, if a factor is not positive, if `low_freq_factor` is not below `high_freq_factor`, or if
    /// LongRoPE does not have one factor for each pair.
    pub fn scaled(size: usize, positions: usize, theta: f64, scaling: &RopeScaling) -> Result<Self> {
        check(scaling, size / 2)?;
        let of = |is_long, factor| {
            Angles::new(size, theta, |frequency, pair| scaled(scaling, frequency, pair, is_long), factor)
        };
        let (factor, longer) = match *scaling {
            RopeScaling::LongRope { factor, attention_factor, original_max_position_embeddings: original, .. } => {
                let factor = factor.unwrap_or(positions as f64 / original as f64);
                let recommended = if factor > 1.0 { (1.0 + factor.ln() / (original as f64).ln()).sqrt() } else { 1.0 };
                let factor = attention_factor.unwrap_or(recommended);
                (factor, Some((original, of(true, factor)?)))
            }
            RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => (1.0, None),
        };
        Ok(Self { angles: of(false, factor)?, longer, positions, size })
    }

    /// Sets the size of a head to `size`. The number of rotated elements stays the same; the other elements are
    /// returned unchanged.
    ///
    /// # Errors
    /// Fails if `size` is smaller than the number of rotated elements.
    pub fn of_heads(self, size: usize) -> Result<Self> {
        if size < self.size {
            bail!("{OP}: heads of size {size} are smaller than the {} elements to rotate", self.size);
        }
        Ok(Self { size, ..self })
    }

    /// Rotates `[batch, time, heads, size]`. The first element of `time` is position 0 or, inside
    /// [`decode`](crate::decode()), the first position that is not in the cache. If ranks share sequences, the
    /// positions are those of this rank's slice.
    ///
    /// # Errors
    /// Fails if a position is not below the model's number of positions. With LongRoPE, also fails inside `decode` if a
    /// row grows beyond the length of the original training.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, time, ..) = x.dims4()?;
        if let Some(positions) = cached_positions(OP, batch, time)? {
            if let Some(last) = positions.iter().find(|&&position| position as usize >= self.positions) {
                bail!("{OP}: position {last} of a sequence is beyond the {} positions of the model", self.positions);
            }
            return self.rotate_cached(x, time, &positions);
        }
        let whole = whole_length(time);
        if whole > self.positions {
            let positions = self.positions;
            bail!("{OP}: a sequence of {whole} tokens is longer than the {positions} positions of the model");
        }
        let of_slice = own_positions(time)?.map(|positions| positions.repeat(batch).into());
        self.rotate(x, whole, of_slice)
    }

    /// Rotates `[batch, time, heads, size]` by the angles of `position_ids`, `[batch, time]` of u32, i64 or u8. If
    /// ranks share sequences, both are this rank's slices.
    ///
    /// # Errors
    /// Fails if the shapes do not match or a position is not below the model's number of positions. Also fails with
    /// LongRoPE if rows are longer than in the original training: documents in them may be shorter, and the angles
    /// would depend on each document's length.
    pub fn apply_at(&self, x: &Tensor, position_ids: &Tensor) -> Result<Tensor> {
        let (batch, time, ..) = x.dims4()?;
        if position_ids.dims() != [batch, time] {
            bail!("{OP}: position_ids of shape {:?} do not match {batch} rows of {time} tokens", position_ids.shape());
        }
        let whole = whole_length(time);
        if let Some((tokens, _)) = self.longer.as_ref().filter(|(tokens, _)| whole > *tokens) {
            bail!(
                "{OP}: packed rows have {whole} tokens, but the model was first trained on {tokens} tokens; beyond \
                 that length, the angles of LongRoPE depend on the length of each document"
            );
        }
        let positions: Vec<u32> = match tracing() {
            true => vec![0; batch * time],
            false => indices_of(OP, position_ids, self.positions)?.into_iter().map(|at| at as u32).collect(),
        };
        // The table covers at least a whole row, so that its size does not depend on the lengths of the documents.
        let longest =
            positions.iter().max().map_or(0, |&position| position as usize + 1).max(whole.min(self.positions));
        self.rotate(x, longest, Some(positions.into()))
    }

    /// Rotates new tokens that continue the rows of a cache.
    fn rotate_cached(&self, x: &Tensor, time: usize, positions: &[u32]) -> Result<Tensor> {
        let end = |row: &[u32]| row.last().map_or(0, |&last| last as usize + 1);
        let rows = || positions.chunks(time.max(1));
        let longest = rows().map(end).max().unwrap_or(0);
        let Some((tokens, _)) = self.longer.as_ref().filter(|(tokens, _)| longest > *tokens) else {
            return self.rotate(x, longest, Some(positions.into()));
        };
        let is_stale = |row: &[u32]| (1..=*tokens).contains(&(row[0] as usize)) && end(row) > *tokens;
        if rows().any(is_stale) {
            bail!("{OP}: beyond {tokens} tokens, LongRoPE needs different angles from those of the cached keys");
        }
        // The length of each row selects its angles, so that a row does not depend on the other rows.
        let rotated = rows().enumerate().map(|(at, row)| self.rotate(&x.narrow(0, at, 1)?, end(row), Some(row.into())));
        Tensor::cat(&rotated.collect::<Result<Vec<_>>>()?, 0)
    }

    /// Rotates by the angles for rows of `longest` tokens.
    fn rotate(&self, x: &Tensor, longest: usize, positions: Option<Arc<[u32]>>) -> Result<Tensor> {
        if x.dim(3)? != self.size {
            bail!("{OP}: expected heads of size {}, got {:?}", self.size, x.shape());
        }
        let angles = match &self.longer {
            Some((tokens, longer)) if longest > *tokens => longer,
            _ => &self.angles,
        };
        let table = match tracing() {
            true => {
                meta::keep_once(Arc::as_ptr(angles).addr(), angles.bytes(longest));
                Arc::default()
            }
            false => angles.of_positions(longest, self.positions),
        };
        apply([x], Rotation { table, positions })
    }
}

/// The angles for rows up to some length.
#[derive(Debug)]
struct Angles {
    /// The frequency of each pair, in radians per position.
    frequencies: Vec<f64>,
    /// Factor of cosines and sines.
    factor: f64,
    /// The cosines and sines of the positions that were needed so far.
    table: Mutex<Arc<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    /// The cosines, `[positions, half]`, followed by the sines in the same shape.
    values: Vec<f32>,
    half: usize,
    #[cfg(feature = "cuda")]
    on_gpu: gpu::rotary::Table,
}

impl Angles {
    fn new(size: usize, theta: f64, scale: impl Fn(f64, usize) -> f64, factor: f64) -> Result<Arc<Self>> {
        if size == 0 || !size.is_multiple_of(2) {
            bail!("{OP}: the head size must be even, got {size}");
        }
        let frequency = |pair: usize| scale(libm::pow(theta, -2.0 * pair as f64 / size as f64), pair);
        Ok(Arc::new(Self { frequencies: (0..size / 2).map(frequency).collect(), factor, table: Mutex::default() }))
    }

    /// Returns the size in bytes of a table of `positions` positions.
    fn bytes(&self, positions: usize) -> u64 {
        let counters = 2 * size_of::<usize>();
        (2 * positions * self.frequencies.len() * size_of::<f32>() + size_of::<Table>() + counters) as u64
    }

    /// Returns a table of at least `positions` and at most `limit` positions. A table that must grow doubles its size,
    /// since generated text grows by one token at a time.
    fn of_positions(&self, positions: usize, limit: usize) -> Arc<Table> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let half = self.frequencies.len();
        let before = table.values.len() / (2 * half);
        if before < positions {
            let positions = positions.max((2 * before).min(limit));
            let angle = |at: usize| (at / half) as f64 * self.frequencies[at % half];
            let cos = (0..positions * half).map(|at| (self.factor * libm::cos(angle(at))) as f32);
            let sin = (0..positions * half).map(|at| (self.factor * libm::sin(angle(at))) as f32);
            let mut values = Vec::with_capacity(2 * positions * half);
            values.extend(cos.chain(sin));
            *table = Arc::new(Table {
                values,
                half,
                #[cfg(feature = "cuda")]
                on_gpu: gpu::rotary::Table::default(),
            });
        }
        table.clone()
    }
}

/// The rotation of one tensor.
#[derive(Clone, Debug)]
struct Rotation {
    /// Covers all positions of the tensor.
    table: Arc<Table>,
    /// The position of each token; if `None`, the first token of each row is position 0.
    positions: Option<Arc<[u32]>>,
}

impl Rotation {
    #[cfg(feature = "cuda")]
    fn run_on_gpu(&self, x: (&CudaStorage, &Layout), turn: Turn) -> Result<CudaStorage> {
        if x.1.shape().dim(3)? != 2 * self.table.half {
            bail!("{OP}: rotating only part of a head is unsupported on a GPU");
        }
        gpu::rotary::run(OP, (&self.table.on_gpu, &self.table.values), self.positions.as_deref(), x, turn)
    }

    fn run(&self, x: Elements<'_>, shape: &Shape, dtype: DType, rotate: Rotate) -> Result<CpuStorage> {
        let (_, time, heads, size) = shape.dims4()?;
        let (half, positions) = (self.table.half, self.positions.as_deref());
        let (cos, sin) = self.table.values.split_at(self.table.values.len() / 2);
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

impl Op<1> for Rotation {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let y = self.run(View::new(OP, xs, xl)?.elements(), xl.shape(), xs.dtype(), kernel::rotate)?;
        Ok((y, xl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        Ok((self.run_on_gpu((xs, xl), Turn::Forth)?, xl.shape().clone()))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        #[cfg(feature = "cuda")]
        if let (Storage::Cuda(dys), layout) = (&*dy.storage_and_layout().0, dy.layout()) {
            let dx = self.run_on_gpu((dys, layout), Turn::Back)?;
            return Ok([Some(gpu::tensor(dx, x.shape()))]);
        }
        let _timed = measure::backward(OP);
        let held = dy.storage_and_layout();
        let dx = self.run(View::of(OP, &held)?.elements(), x.shape(), x.dtype(), kernel::rotate_back)?;
        Ok([Some(tensor(dx, x.shape()))])
    }
}
