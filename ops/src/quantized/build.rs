//! Linear maps that are built with quantized weights.

use super::{Quantization, QuantizedFormat};
use crate::flag::{Flag, Replaced};
use crate::linear::affine::Affine;
use crate::linear::module_names::names;
use crate::tensor::{Cut, Parallel, get_part};
use candle_core::{Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// Settings of the quantized weights of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizationOptions {
    /// The format of all quantized weights.
    pub format: QuantizedFormat,
    /// Modules whose linear layers are not quantized. A module is named by its path, such as `model.layers.0.mlp`, or
    /// by the end of its path after a dot.
    pub skip: Vec<String>,
}

impl QuantizationOptions {
    /// Returns whether the linear layer at `path` is not quantized, because `skip` names it or a module around it.
    #[must_use]
    pub fn skips(&self, path: &str) -> bool {
        let around = path.match_indices('.').map(|(at, _)| &path[..at]).chain([path]);
        around.into_iter().any(|module| self.skip.iter().any(|name| names(name, module)))
    }
}

thread_local! {
    static BUILDING: RefCell<Option<Arc<QuantizationOptions>>> = const { RefCell::new(None) };
    static ASKING: RefCell<Option<Quantization>> = const { RefCell::new(None) };
    static INPUTS_FIRST: Cell<bool> = const { Cell::new(false) };
}

/// Builds layers whose linear layers, [`Linear`](crate::Linear) and [`Conv1D`](crate::Conv1D), have quantized weights.
pub fn with_quantization<T>(options: QuantizationOptions, build: impl FnOnce() -> T) -> T {
    let _building = Replaced::with(&BUILDING, Some(Arc::new(options)));
    build()
}

/// Returns how the parameter that a layer is requesting from a `VarBuilder` is stored, if it will be quantized.
#[must_use]
pub fn asks_quantized() -> Option<Quantization> {
    ASKING.with_borrow(|asking| *asking)
}

/// Returns whether the parameter that a layer is requesting from a `VarBuilder` is a weight of `[inputs, outputs]`, as
/// in a [`Conv1D`](crate::Conv1D).
#[must_use]
pub fn asks_inputs_first() -> bool {
    INPUTS_FIRST.get()
}

/// Requests the weight of a linear layer, with the dimensions in the order of `affine`. Returns how it is stored.
pub(crate) fn weight(
    affine: Affine,
    [inputs, outputs]: [usize; 2],
    std: f64,
    vb: &VarBuilder,
    parallel: Parallel<'_>,
) -> Result<(Tensor, Affine)> {
    let is_transposed = matches!(affine, Affine::InputsOutputs);
    let building = BUILDING.with_borrow(Clone::clone).filter(|options| !options.skips(&vb.prefix()));
    let (dims, at) = if is_transposed { ([inputs, outputs], [0, 1]) } else { ([outputs, inputs], [1, 0]) };
    let cut = parallel.cut(vb, &dims, at.map(Some))?;
    let own = cut.as_ref().map_or_else(|| Shape::from(&dims), Cut::shape);
    let [inputs, outputs] = at.map(|at| own.dims()[at]);
    let quantization = building.map(|options| Quantization::new(options.format, inputs, outputs, is_transposed));
    let _asking = Replaced::with(&ASKING, quantization);
    let _inputs_first = is_transposed.then(|| Flag::raise(&INPUTS_FIRST));
    let weight = get_part(vb, &dims, cut, "weight", Init::Randn { mean: 0.0, stdev: std })?;
    Ok((weight, quantization.map_or(affine, Affine::Quantized)))
}
