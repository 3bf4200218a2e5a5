//! Memory of each layer of a model for one micro-batch.

use zero_config::{Compute, Config};
use zero_model::Model;
use zero_model::memory::{self, EvaluationMemory, Form, LayerMemory, LossMemory};

use crate::configured_model;
use crate::error::Error;

/// Memory of each layer for one micro-batch.
#[derive(Debug, Clone)]
pub struct Table {
    /// All layers but the last.
    pub layers: Vec<LayerMemory>,
    /// The last layer with the loss.
    pub loss: LossMemory,
    /// Bytes of each layer's inputs.
    pub inputs: Vec<u64>,
    /// Bytes of a micro-batch's inputs and targets.
    pub batch: u64,
    /// All layers but the last, in an evaluation.
    pub evaluation: Vec<EvaluationMemory>,
    /// Bytes of the last layer with the loss, in an evaluation.
    pub evaluation_loss: u64,
}

impl Table {
    /// Computes the table by a dry run; `None` if that is impossible. The dry run is on the CPU. For a model on a GPU,
    /// the configured model is built again on the CPU, without allocating parameters.
    pub fn of(config: &Config, model: &Model) -> Option<Self> {
        let (inputs, targets) = forms(config)?;
        let of = |model: &Model| match config.training.device {
            Compute::Cpu => Self::new(model, &inputs, &targets).ok(),
            Compute::Cuda => memory::on_gpu(|| Self::new(model, &inputs, &targets)).ok(),
        };
        if !model.device().is_cuda() {
            return of(model);
        }
        let first = model.parameters().first()?;
        let vocabulary = first.shape().dims().first().copied();
        let layers = configured_model::from_config(config, vocabulary).ok()?;
        of(&configured_model::build(config, layers, first.dtype()).ok()?)
    }

    /// Runs every layer on meta tensors.
    ///
    /// # Errors
    /// Fails if a layer uses operations that have no dry run.
    fn new(model: &Model, inputs: &[Form], targets: &Form) -> Result<Self, Error> {
        let last = model.layers().len() - 1;
        let bytes = |forms: &[Form]| forms.iter().map(Form::bytes).sum::<u64>();
        let mut forms = inputs.to_vec();
        let (mut layers, mut evaluation, mut sizes): (Vec<LayerMemory>, Vec<EvaluationMemory>, Vec<u64>) =
            (vec![], vec![], vec![]);
        for layer in 0..last {
            sizes.push(bytes(&forms));
            layers.push(model.layer_memory(layer, &forms)?);
            evaluation.push(model.evaluation_memory(layer, &forms)?);
            forms = layers[layer].outputs.clone();
        }
        sizes.push(bytes(&forms));
        Ok(Self {
            loss: model.loss_memory(&forms, targets)?,
            evaluation_loss: model.evaluation_loss_memory(&forms, targets)?,
            layers,
            evaluation,
            inputs: sizes,
            batch: bytes(inputs) + targets.bytes(),
        })
    }
}

/// Returns shapes and dtypes of a micro-batch's inputs and targets; `None` if they depend on the data.
fn forms(config: &Config) -> Option<(Vec<Form>, Form)> {
    use candle_core::DType;
    let rows = config.train_micro_batch_size_per_gpu;
    match config.model.as_ref()? {
        zero_config::Model::Mlp(mlp) => {
            Some((vec![Form::new((rows, mlp.input_size), DType::F32)], Form::new(rows, DType::U32)))
        }
        model => {
            let data = config.data.as_ref().and_then(|data| data.sequence_length);
            let length = data.or(model.max_sequence_length())?;
            let tokens = Form::new((rows, length), DType::U32);
            Some((vec![tokens.clone()], tokens))
        }
    }
}

/// Tokens per sample, where a row of a table counts as one; `None` if that depends on the data.
pub fn tokens(config: &Config) -> Option<usize> {
    let (inputs, _) = forms(config)?;
    let rows = config.train_micro_batch_size_per_gpu.max(1);
    match config.model {
        Some(zero_config::Model::Mlp(_)) => Some(1),
        _ => Some(inputs.first()?.shape.elem_count() / rows),
    }
}
