//! LoRA: a trainable product of two thin matrices, added to a linear layer.
//!
//! y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ with A of `[r, inputs]`, B of `[outputs, r]` and the scale s. Hu et al., "LoRA: Low-Rank
//! Adaptation of Large Language Models", ICLR 2022. Names and initial values are those of the library PEFT.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use crate::dropout::dropout_of_columns;
use crate::flag::Replaced;
use crate::graph::apply::{apply, sum};
use crate::linear::affine::Affine;
use crate::linear::dora::Magnified;
use crate::linear::module_names::names;
use crate::linear::{LinearOp, Projection};
use crate::pass::Pass;
use crate::scaled::scaled as times;
use crate::sequence::SequenceGroup;
use crate::tensor::{Parallel, cutting};
use zero_model_options::LoraInit;

/// Settings of the adapters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraOptions {
    /// Rank r of the product.
    pub rank: usize,
    /// Factor s of the product.
    pub scale: f32,
    /// Probability with which an element of the product's input is dropped in training.
    pub dropout: f32,
    /// Initial values.
    pub init: LoraInit,
    /// Whether the norm of each output's weights is trained too: [DoRA](crate::weight_norms).
    pub magnitudes: bool,
    /// The linear layers that get an adapter; `None` means all of them. A layer is named by its path, such as
    /// `model.layers.0.mlp.up_proj`, or by the end of its path after a dot.
    pub targets: Option<Vec<String>>,
}

impl LoraOptions {
    /// Returns whether the linear layer at `path` gets an adapter.
    #[must_use]
    pub fn targets(&self, path: &str) -> bool {
        let is_named = |name: &String| names(name, path);
        self.targets.as_ref().is_none_or(|targets| targets.iter().any(is_named))
    }
}

thread_local! {
    static BUILDING: RefCell<Option<Arc<Building>>> = const { RefCell::new(None) };
    static ASKING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

struct Building {
    options: LoraOptions,
    /// All linear layers built so far.
    maps: Mutex<Vec<LinearMap>>,
}

/// A linear layer that was built from a `VarBuilder`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearMap {
    /// Its path, such as `model.layers.0.mlp.up_proj`.
    pub path: String,
    /// Whether its weight is `[inputs, outputs]`, as in a [`Conv1D`](crate::Conv1D).
    pub inputs_first: bool,
}

/// Builds layers whose linear layers get adapters. Returns the result and all linear layers that were built.
pub fn with_lora<T>(options: LoraOptions, build: impl FnOnce() -> T) -> (T, Vec<LinearMap>) {
    let building = Arc::new(Building { options, maps: Mutex::default() });
    let replaced = Replaced::with(&BUILDING, Some(Arc::clone(&building)));
    let built = build();
    drop(replaced);
    let maps = std::mem::take(&mut *building.maps.lock().unwrap_or_else(PoisonError::into_inner));
    (built, maps)
}

/// Returns whether the parameter that this thread is requesting from a `VarBuilder` belongs to an adapter.
#[must_use]
pub fn asks_adapter() -> bool {
    ASKING.get()
}

/// The adapter of one linear layer.
#[derive(Clone, Debug)]
pub(crate) struct Lora {
    a: Tensor,
    b: Tensor,
    scale: f32,
    dropout: f32,
    /// Index of this rank's first input and total number of inputs, if ranks split the inputs.
    columns: Option<(usize, usize)>,
    path: Arc<str>,
    /// `[outputs]`, for DoRA.
    magnitudes: Option<Tensor>,
}

impl Lora {
    /// Creates the adapter of the linear layer that is built from `vb`, if it gets one.
    pub(crate) fn of(
        affine: Affine,
        [inputs, outputs]: [usize; 2],
        vb: &VarBuilder,
        parallel: Parallel<'_>,
    ) -> Result<Option<Self>> {
        let Some(building) = BUILDING.with_borrow(Clone::clone) else { return Ok(None) };
        let (options, path) = (&building.options, vb.prefix());
        let map = LinearMap { path: path.clone(), inputs_first: matches!(affine, Affine::InputsOutputs) };
        building.maps.lock().unwrap_or_else(PoisonError::into_inner).push(map);
        if !options.targets(&path) {
            return Ok(None);
        }
        let linear = |inputs: usize| {
            let bound = 1.0 / (inputs as f64).sqrt();
            Init::Uniform { lo: -bound, up: bound }
        };
        let rank = options.rank;
        let (of_a, of_b) = match options.init {
            LoraInit::Zero => (linear(inputs), Init::Const(0.0)),
            LoraInit::Gaussian => (Init::Randn { mean: 0.0, stdev: 1.0 / rank as f64 }, Init::Const(0.0)),
            LoraInit::Random => (linear(inputs), linear(rank)),
        };
        let _asking = crate::flag::Flag::raise(&ASKING);
        Ok(Some(Self {
            a: parallel.get(&vb.pp("lora_A"), &[rank, inputs], [Some(1), None], "weight", of_a)?,
            b: parallel.get(&vb.pp("lora_B"), &[outputs, rank], [None, Some(0)], "weight", of_b)?,
            scale: options.scale,
            dropout: options.dropout,
            columns: match (parallel, cutting()) {
                (Parallel::Inputs, Some((index, ranks))) => Some((index * (inputs / ranks), inputs)),
                _ => None,
            },
            path: path.into(),
            // The engine replaces these values of 1 as soon as the weight has its initial values.
            magnitudes: match options.magnitudes {
                true => Some(parallel.get(vb, &[outputs], [None, Some(0)], MAGNITUDES, Init::Const(1.0))?),
                false => None,
            },
        }))
    }

    /// Returns x·Wᵀ + b with the adapter.
    pub(crate) fn forward(&self, x: &Tensor, map: &Projection) -> Result<Tensor> {
        let dropped = self.dropped(x)?;
        let input = dropped.as_ref().unwrap_or(x);
        let Some(magnitudes) = &self.magnitudes else {
            return self.add_to(&map.apply(x, None)?, input);
        };
        let scaled = self.add_to(&product(input, &map.weight, map.affine)?, input)?;
        let magnified = Magnified {
            affine: map.affine,
            weight: map.weight.clone(),
            a: self.a.clone(),
            b: self.b.clone(),
            scale: self.scale,
            group: self.columns.and_then(|_| SequenceGroup::of_gathered()).map(|(group, _)| group),
            norms: OnceLock::new(),
        };
        match (&dropped, &map.bias) {
            (None, Some(bias)) => apply([&scaled, magnitudes, bias], magnified),
            (None, None) => apply([&scaled, magnitudes], magnified),
            // The part of the input that dropout removes still goes through the linear layer, with the factor 1.
            (Some(dropped), _) => {
                let removed = sum(x, &times(dropped, -1.0)?)?;
                sum(&map.apply(&removed, None)?, &apply([&scaled, magnitudes], magnified)?)
            }
        }
    }

    /// Returns the input with dropout, if dropout is on.
    fn dropped(&self, x: &Tensor) -> Result<Option<Tensor>> {
        if self.dropout == 0.0 {
            return Ok(None);
        }
        let Some(pass) = Pass::current() else { bail!("{OP}: dropout needs a layer that is running") };
        let name = format!("{}.lora", self.path);
        pass.training.then(|| dropout_of_columns(x, self.dropout, &name, &pass, self.columns)).transpose()
    }

    /// Returns y + s·(x·Aᵀ)·Bᵀ.
    fn add_to(&self, y: &Tensor, x: &Tensor) -> Result<Tensor> {
        let inner = product(x, &self.a, Affine::OutputsInputs)?;
        let inner = times(&inner, self.scale)?;
        sum(y, &product(&inner, &self.b, Affine::OutputsInputs)?)
    }
}

/// Returns x·Wᵀ.
fn product(x: &Tensor, weight: &Tensor, affine: Affine) -> Result<Tensor> {
    apply([x, weight], LinearOp { affine, of: None })
}

/// The name of DoRA's vector, which PEFT also uses in files.
pub const MAGNITUDES: &str = "lora_magnitude_vector";

const OP: &str = "lora";
