//! What each layer of a model takes for a micro-batch.

use zero_config::{Compute, Config};
use zero_model::Model;
use zero_model::memory::{self, EvaluationMemory, Form, LayerMemory, LossMemory};

use crate::error::Error;

/// By layer.
#[derive(Debug, Clone)]
pub struct Table {
    /// Of all layers but the last.
    pub layers: Vec<LayerMemory>,
    /// Of the last, with the loss.
    pub loss: LossMemory,
    /// Bytes of each layer's inputs.
    pub inputs: Vec<u64>,
    /// Bytes of a micro-batch, inputs and targets.
    pub batch: u64,
    /// In an evaluation, all layers but the last.
    pub evaluation: Vec<EvaluationMemory>,
    /// In an evaluation, the last layer with the loss.
    pub evaluation_loss: u64,
}

impl Table {
    /// Of a model of a configuration; `None` where it cannot be known. What a layer takes is asked on the processor: of a model on a GPU
    /// one like it is made there, which takes no memory.
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
        let layers = crate::configured_model::from_config(config, vocabulary).ok()?;
        of(&layers.build(first.dtype()).ok()?)
    }

    /// # Errors
    /// If it cannot be known: for a layer that computes otherwise than by our operations.
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

/// The forms of a micro-batch that a configuration describes: its inputs and its targets. `None` where the data alone says them.
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

/// Tokens of a sample, a row of a table counting as one; `None` where the data alone says it.
pub fn tokens(config: &Config) -> Option<usize> {
    let (inputs, _) = forms(config)?;
    let rows = config.train_micro_batch_size_per_gpu.max(1);
    match config.model {
        Some(zero_config::Model::Mlp(_)) => Some(1),
        _ => Some(inputs.first()?.shape.elem_count() / rows),
    }
}
