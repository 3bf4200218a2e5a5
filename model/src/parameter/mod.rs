//! A parameter: a candle autograd leaf whose storage can be removed and restored. A quantized parameter stores bytes,
//! which only the linear layer that requested it can read.
//!
//! A *released* leaf keeps its shape but holds an empty storage of a dummy dtype, which every candle operation rejects
//! with an error. (`matmul` would read an empty `f32` vector out of bounds.) A *gathered* leaf holds the full values. A
//! gather or a release swaps the storage behind the leaf's `Arc`. A module is therefore built only once, and a graph
//! that was saved before a release can run its backward after the next gather.

use std::convert::Infallible;
use std::ops::Range;

use candle_core::{DType, Device, Result, Shape, Tensor, op::BackpropOp};
use candle_nn::Init;
use zero_ops::graph::storage::nothing;
use zero_ops::{Cut, Quantization, Run, asks_cut, asks_inputs_first};
use zero_optim::MatrixStates;

use crate::tuning::Tuning;
use crate::width::Widths;

/// Index of a parameter in its model: the order of construction, which is the same on every rank.
pub type ParameterId = usize;

/// One parameter of a model.
#[derive(Debug)]
pub struct Parameter {
    name: String,
    shape: Shape,
    dtype: DType,
    init: Init,
    layer: usize,
    role: Role,
    tuning: Tuning,
    matrix: Option<MatrixStates>,
    quantization: Option<Quantization>,
    /// Which part of the whole parameter this rank holds, if the parameter is divided among a tensor group.
    cut: Option<Cut>,
    /// Which part of the whole parameter's storage this rank holds: in elements, or in bytes if the parameter is
    /// quantized.
    stored_cut: Option<Cut>,
    /// Whether the parameter is a weight of shape `[inputs, outputs]`.
    inputs_first: bool,
    widths: Option<Widths>,
    leaf: Tensor,
}

/// The role of a parameter in training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Training changes it.
    Trained,
    /// It keeps its value.
    Frozen,
    /// It belongs to an adapter, which training changes.
    Adapter,
}

impl Parameter {
    pub(crate) fn new(
        name: String,
        shape: Shape,
        dtype: DType,
        device: &Device,
        init: Init,
        layer: usize,
        role: Role,
    ) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            candle_core::bail!("parameter `{name}` is {dtype:?}; only f32, bf16 and f16 are supported");
        }
        let leaf =
            Tensor::from_storage(nothing(dtype, device)?, shape.clone(), BackpropOp::none(), role != Role::Frozen);
        let (tuning, inputs_first) = (Tuning::default(), asks_inputs_first());
        let (matrix, quantization, cut, widths) = (None, None, asks_cut(), None);
        let parameter = Self {
            name,
            shape,
            dtype,
            init,
            layer,
            role,
            tuning,
            matrix,
            quantization,
            stored_cut: cut.clone(),
            cut,
            inputs_first,
            widths,
            leaf,
        };
        parameter.release()?;
        Ok(parameter)
    }

    /// Returns the full name: the layer's name, a dot, and the name inside the layer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the shape, which stays the same when the parameter is released. For a parameter that is split across
    /// ranks, it is the shape of this rank's part.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns which part of the whole parameter this rank holds; `None` if it holds the whole.
    #[must_use]
    pub fn cut(&self) -> Option<&Cut> {
        self.cut.as_ref()
    }

    /// Returns which part of the whole parameter's storage this rank holds, in elements, or in bytes if the parameter
    /// is quantized. `None` if it holds the whole.
    #[must_use]
    pub fn stored_cut(&self) -> Option<&Cut> {
        self.stored_cut.as_ref()
    }

    /// Returns the shape of the whole parameter.
    #[must_use]
    pub fn whole_shape(&self) -> &[usize] {
        self.cut.as_ref().map_or(self.shape.dims(), Cut::whole)
    }

    /// Returns the number of elements of the whole parameter.
    #[must_use]
    pub fn whole_elements(&self) -> usize {
        self.whole_shape().iter().product()
    }

    /// Maps a range of this rank's elements to runs of the whole parameter. Skips the padding of an uneven split.
    #[must_use]
    pub fn runs(&self, elements: Range<usize>) -> Vec<Run> {
        match &self.cut {
            None => vec![Run { whole: elements.start, local: elements }],
            Some(cut) => cut.runs(elements),
        }
    }

    /// Fills `out` with this rank's elements starting at `start`. `read` receives an index into the whole parameter and
    /// a slice, which it fills with consecutive elements starting at this index. Padding becomes zero.
    ///
    /// # Errors
    /// Returns the error of `read`.
    pub fn fill_from_whole<E>(
        &self,
        start: usize,
        out: &mut [f32],
        mut read: impl FnMut(usize, &mut [f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        if self.cut.is_some() {
            out.fill(0.0);
        }
        for Run { local, whole } in self.runs(start..start + out.len()) {
            read(whole, &mut out[local.start - start..local.end - start])?;
        }
        Ok(())
    }

    /// Writes the initial values of this rank's elements starting at `start`. The values do not depend on how the
    /// parameter is split. Padding is zero.
    pub fn initialise(&self, seed: u64, start: usize, out: &mut [f32]) {
        let shape = Shape::from(self.whole_shape());
        let Ok(()) = self.fill_from_whole(start, out, |whole, out| {
            crate::init::fill(&self.init, &shape, &self.name, seed, whole, out);
            Ok::<(), Infallible>(())
        });
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.elem_count()
    }

    /// Returns how the values are stored if they are quantized.
    #[must_use]
    pub fn quantization(&self) -> Option<Quantization> {
        self.quantization
    }

    /// Returns the length of the storage: the number of elements, or the number of bytes if the parameter is quantized.
    #[must_use]
    pub fn stored_elements(&self) -> usize {
        self.quantization.map_or(self.elements(), |quantization| quantization.bytes())
    }

    /// Returns a range of the stored bytes of the initial values; `None` if the parameter is not quantized. The range
    /// must begin and end at record boundaries.
    ///
    /// # Errors
    /// Fails if an initial value is not finite.
    pub fn initial_bytes(&self, seed: u64, bytes: Range<usize>) -> Result<Option<Vec<u8>>> {
        let shape = Shape::from(self.whole_shape());
        self.quantize(bytes, |whole, out| -> Result<()> {
            crate::init::fill(&self.init, &shape, &self.name, seed, whole, out);
            Ok(())
        })
    }

    /// Quantizes the elements of a range of the stored bytes; `None` if the parameter is not quantized. The range must
    /// begin and end at record boundaries. `read` receives an index into the whole parameter and a slice, which it
    /// fills with consecutive elements starting at this index.
    ///
    /// # Errors
    /// Fails if an element is infinite or not a number. Returns errors of `read`.
    pub fn quantize<E: From<candle_core::Error>>(
        &self,
        bytes: Range<usize>,
        mut read: impl FnMut(usize, &mut [f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<Option<Vec<u8>>, E> {
        let Some(quantization) = self.quantization else { return Ok(None) };
        let bytes = match &self.cut {
            Some(cut) if quantization.shares_scales(cut) => quantization.quantize_part(cut, bytes, read),
            _ => quantization.quantize(bytes, |start, out| self.fill_from_whole(start, out, &mut read)),
        };
        bytes.map(Some)
    }

    /// Returns the working dtype: f32, bf16 or f16. For a quantized parameter, it is the dtype of the linear layer's
    /// inputs.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the initialization that the module requested.
    #[must_use]
    pub fn init(&self) -> Init {
        self.init
    }

    /// Returns whether training changes the parameter. A frozen parameter has no gradient and no optimizer state.
    #[must_use]
    pub fn is_trainable(&self) -> bool {
        self.role != Role::Frozen
    }

    /// Returns whether the parameter belongs to an adapter rather than to the base model.
    #[must_use]
    pub fn is_adapter(&self) -> bool {
        self.role == Role::Adapter
    }

    /// Returns how the parameter's update differs from the optimizer's settings.
    #[must_use]
    pub fn tuning(&self) -> Tuning {
        self.tuning
    }

    /// Returns whether the optimizer updates the parameter as a whole matrix.
    #[must_use]
    pub fn is_matrix(&self) -> bool {
        self.matrix.is_some()
    }

    /// Returns the optimizer states of a parameter that is updated as a whole matrix.
    #[must_use]
    pub fn matrix(&self) -> Option<&MatrixStates> {
        self.matrix.as_ref()
    }

    /// Returns the parameter's widths relative to the base model, if the model has base shapes.
    #[must_use]
    pub fn widths(&self) -> Option<&Widths> {
        self.widths.as_ref()
    }

    /// Sets the multiplier of each dimension that is a width.
    pub(crate) fn set_widths(&mut self, multipliers: Vec<Option<f64>>) {
        self.widths = Some(Widths::new(multipliers, self.inputs_first));
    }

    /// Sets the optimizer states of a parameter that is updated as a whole matrix.
    pub(crate) fn set_matrix(&mut self, matrix: Option<MatrixStates>) {
        self.matrix = matrix;
    }

    /// Sets how the parameter's update differs from the optimizer's settings.
    pub(crate) fn set_tuning(&mut self, tuning: Tuning) {
        self.tuning = tuning;
    }

    /// Sets how the values are stored.
    pub(crate) fn with_quantization(self, quantization: Option<Quantization>) -> Result<Self> {
        let stored_cut = match (quantization, &self.cut) {
            (Some(quantization), Some(cut)) => {
                Some(quantization.cut_of_bytes(cut).map_err(|error| error.context(format!("`{}`", self.name)))?)
            }
            (_, cut) => cut.clone(),
        };
        Ok(Self { quantization, stored_cut, ..self })
    }

    /// Returns the index of the layer that owns the parameter.
    #[must_use]
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Returns the autograd leaf that the layer's module holds.
    #[must_use]
    pub fn leaf(&self) -> &Tensor {
        &self.leaf
    }
}

mod storage;
#[cfg(test)]
mod tests;
