//! Dropout with masks that do not depend on the layout of the run.

use crate::Pass;
#[cfg(feature = "cuda")]
use crate::device::{Gpu, Operand};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::View;
use crate::graph::output::{build_as, tensor};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads, element_rooms};
use crate::product::Elements;
use crate::random::Stream;
use crate::sequence::SequenceGroup;
use crate::tensor::Along;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, D, DType, Result, Shape, Tensor, bail};
#[cfg(feature = "cuda")]
use zero_kernels::dropout::{Mask, SampleLayout};

/// One dropout of a model: its probability and a name that is unique within its layer.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// The probability with which an element becomes 0.
    pub probability: f32,
    /// Distinguishes the masks of the dropouts of one layer.
    pub name: &'static str,
}

impl Dropout {
    /// Applies [`dropout`] to `x` in training; returns `x` itself in evaluation.
    pub fn forward(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        dropout(x, self.probability, self.name, pass)
    }
}

/// In training, sets elements of `x` to 0 with `probability` and multiplies the others by 1/(1 − probability).
///
/// The first dimension of `x` is the sample. Whether an element is kept depends only on the run's seed, the layer,
/// `name`, the sample's index in the run and the element's position in the sample. The masks are therefore the same for
/// any number of ranks and any micro-batch size. If ranks share sequences, the second dimension is the position in this
/// rank's slice, and the masks are those of the whole sequence. If ranks split the columns, use [`dropout_of_columns`].
/// The backward computes the mask again.
pub fn dropout(x: &Tensor, probability: f32, name: &str, pass: &Pass) -> Result<Tensor> {
    dropout_of_columns(x, probability, name, pass, None)
}

/// Applies [`dropout`] to a tensor whose last dimension is a part of a wider one, such as the outputs of
/// [`Linear::column_parallel`](crate::Linear::column_parallel). The mask is the corresponding part of the wider
/// tensor's mask. `columns` holds the index of the first column in the wider tensor and the wider tensor's number of
/// columns; `None` means that `x` has all columns.
///
/// # Errors
/// Fails in the same cases as [`dropout`].
pub fn dropout_of_columns(
    x: &Tensor,
    probability: f32,
    name: &str,
    pass: &Pass,
    columns: Option<(usize, usize)>,
) -> Result<Tensor> {
    match numbers(OP, probability, name, pass)? {
        Some(stream) => {
            let place = SampleIndices::of(x, columns)?;
            apply([x], Masked { probability, stream, first_sample: pass.sample, place })
        }
        None => Ok(x.clone()),
    }
}

/// Returns the random numbers of a dropout for the first sample of a micro-batch. Returns `None` if nothing is dropped:
/// in evaluation, or with a probability of 0.
pub(crate) fn numbers(op: &str, probability: f32, name: &str, pass: &Pass) -> Result<Option<Stream>> {
    if !(0.0..1.0).contains(&probability) {
        bail!("{op}: expected a dropout probability in [0, 1), got {probability}");
    }
    let drops = pass.training && probability != 0.0;
    Ok(drops.then(|| Stream::new(pass.seed, &format!("dropout/{}/{name}", pass.layer), pass.sample)))
}

struct Masked {
    probability: f32,
    /// The random numbers of the first sample.
    stream: Stream,
    first_sample: u64,
    /// `None` if the tensor holds whole samples.
    place: Option<SampleIndices>,
}

/// Maps the elements of a `[batch, time, …]` tensor to their places in the whole samples.
struct SampleIndices {
    /// The slices that are stacked along the first dimension: one per rank if a tensor group gathered them there,
    /// otherwise a single one.
    slices: Vec<Slice>,
    /// Number of samples in each slice.
    batch: usize,
    /// Number of elements per position.
    width: usize,
    /// Index of the first column and total number of columns, if the tensor holds only some of the columns.
    columns: Option<(usize, usize)>,
}

/// The place of a slice in its sample.
struct Slice {
    /// First position of each part of the slice. The parts have the same length.
    firsts: Vec<usize>,
    /// Number of elements in a part.
    part: usize,
}

impl SampleIndices {
    /// Returns the place of `x`, or `None` if it holds whole samples.
    fn of(x: &Tensor, columns: Option<(usize, usize)>) -> Result<Option<Self>> {
        let gathered = SequenceGroup::of_gathered().filter(|(_, along)| *along == Along::Batch);
        let groups = match (gathered, SequenceGroup::current()) {
            (Some((group, _)), _) => (0..group.size()).map(|index| group.at(index)).collect(),
            (None, Some(group)) => vec![group],
            (None, None) if columns.is_none() => return Ok(None),
            (None, None) => vec![],
        };
        let width = match columns {
            Some(_) => x.dim(D::Minus1)?,
            None => x.dims()[2..].iter().product(),
        };
        let slice = |group: &SequenceGroup| -> Result<Slice> {
            let parts = group.positions(x.dim(1)? * group.slices())?;
            Ok(Slice { firsts: parts.iter().map(|part| part.start).collect(), part: parts[0].len() * width })
        };
        let mut slices = groups.iter().map(slice).collect::<Result<Vec<_>>>()?;
        if slices.is_empty() {
            slices.push(Slice { firsts: vec![0], part: x.elem_count() / samples(x.shape()) });
        }
        let batch = (samples(x.shape()) / slices.len()).max(1);
        Ok(Some(Self { slices, batch, width, columns }))
    }

    /// Returns the index of each part's first element in the tensor, and the part's place in the whole samples. `size`
    /// is the number of elements of a sample in the tensor.
    #[cfg(feature = "cuda")]
    fn on_gpu(&self, size: usize) -> Vec<(usize, SampleLayout)> {
        let parts = self.slices.iter().enumerate().flat_map(|(index, Slice { firsts, part })| {
            firsts.iter().enumerate().map(move |(which, &first)| {
                let (rows, width, first, apart) = match self.columns {
                    None => (1, *part, first * self.width, *part),
                    Some((column, all)) => (part / self.width, self.width, first * all + column, all),
                };
                let [rows, width, stride, first, apart] = [rows, width, size, first, apart].map(|count| count as u64);
                let place = SampleLayout { samples: self.batch as u64, rows, width, stride, first, apart };
                (index * self.batch * size + which * part, place)
            })
        });
        parts.collect()
    }

    /// Maps an element of a slice to the whole samples. Returns the sample, the element's index in the sample, and the
    /// number of following elements that are contiguous both in the slice and in the sample.
    fn find(&self, sample: usize, element: usize) -> (usize, usize, usize) {
        let Slice { firsts, part: size } = &self.slices[sample / self.batch];
        let (part, inside, sample) = (element / size, element % size, sample % self.batch);
        match self.columns {
            None => (sample, firsts[part] * self.width + inside, size - inside),
            Some((first, all)) => {
                let (position, column) = (firsts[part] + inside / self.width, inside % self.width);
                (sample, position * all + first + column, self.width - column)
            }
        }
    }
}

const OP: &str = "dropout";

/// Returns the number of samples: the size of the first dimension, but at least 1.
fn samples(shape: &Shape) -> usize {
    shape.dims().first().copied().unwrap_or(1).max(1)
}

impl Masked {
    /// Returns the factor that multiplies the elements that are kept.
    fn scale(&self) -> f32 {
        1.0 / (1.0 - self.probability)
    }

    #[cfg(feature = "cuda")]
    fn apply_on_gpu(&self, gpu: &Gpu, x: &Operand, shape: &Shape, dtype: DType) -> Result<CudaStorage> {
        let &Self { probability, stream, first_sample, .. } = self;
        let (samples, count) = (samples(shape), x.count);
        let parts = match &self.place {
            Some(place) => place.on_gpu(count / samples),
            None => vec![(0, SampleLayout::whole([samples as u64, (count / samples) as u64]))],
        };
        let mask = Mask { key: stream.key(), first_sample, probability, scale: self.scale() };
        gpu::dropout::apply(OP, gpu, x, dtype, &parts, &mask)
    }

    fn apply(&self, x: Elements<'_>, shape: &Shape, dtype: DType) -> Result<CpuStorage> {
        let samples = samples(shape);
        let size = x.len() / samples;
        let scale = self.scale();
        build_as(OP, dtype, samples * size, 1, [x], |range, [mut x], mut y| {
            let mut at = range.start;
            while at < range.end {
                let (sample, from) = (at / size, at % size);
                let whole = (sample, from, size);
                let (sample, place, following) = self.place.as_ref().map_or(whole, |place| place.find(sample, from));
                let len = (size - from).min(range.end - at).min(following);
                let ((x_part, x_later), (y_part, y_later)) = (x.split_at(len), y.split_at_mut(len));
                let stream = self.stream.of(self.first_sample + sample as u64);
                stream.drop_out(place as u64, self.probability, scale, x_part, y_part);
                at += len;
                (x, y) = (x_later, y_later);
            }
        })
    }
}

impl Footprint for Masked {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (shape, dtype) = (inputs[0].shape(), inputs[0].dtype());
        let rooms = element_rooms(dtype, shape.elem_count(), 1);
        Ok(Costs { forward: rooms, backward: rooms, ..Costs::new(shape, dtype) })
    }
}

impl Op<1> for Masked {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let y = self.apply(View::new(OP, xs, xl)?.elements(), xl.shape(), xs.dtype())?;
        Ok((y, xl.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        let (gpu, x) = (Gpu::new(&xs.device)?, Operand::new(OP, xs, xl)?);
        Ok((self.apply_on_gpu(&gpu, &x, xl.shape(), xs.dtype())?, xl.shape().clone()))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        #[cfg(feature = "cuda")]
        if gpu::holds(dy) {
            let dx = self.apply_on_gpu(&Gpu::of(OP, dy)?, &Operand::of(OP, dy)?, x.shape(), x.dtype())?;
            return Ok([Some(gpu::tensor(dx, x.shape()))]);
        }
        let _timed = measure::backward(OP);
        let held = dy.storage_and_layout();
        let dx = self.apply(View::of(OP, &held)?.elements(), x.shape(), x.dtype())?;
        Ok([Some(tensor(dx, x.shape()))])
    }
}
