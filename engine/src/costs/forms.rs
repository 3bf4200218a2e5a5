//! Memory of each layer of a model for one micro-batch.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::DType;
use zero_config::{Compute, Config};
use zero_model::memory::{self, EvaluationMemory, Exchanged, Form, LayerMemory, LossMemory};
use zero_model::ops::{SequenceGroup, Sharing};
use zero_model::zoo::{LABEL_COUNTS, LABEL_GROUPS, LABELS, POSITION_IDS, PreferenceLoss, REFERENCE_LOG_PROBS};
use zero_model::{Model, Signature};
use zero_pipeline::{Instruction, Program};

use crate::configured_model;
use crate::error::Error;
use crate::executor::activation_offload;
use crate::settings::sharing;

/// Memory of each layer for one micro-batch.
#[derive(Debug, Clone)]
pub struct Table {
    /// Memory of all layers but the last.
    pub layers: Vec<LayerMemory>,
    /// Memory of the last layer with the loss.
    pub loss: LossMemory,
    /// Bytes of each layer's inputs.
    pub inputs: Vec<u64>,
    /// Size of a micro-batch's inputs and targets, in bytes.
    pub batch: u64,
    /// Memory of all layers but the last in an evaluation.
    pub evaluation: Vec<EvaluationMemory>,
    /// Memory of the last layer with the loss in an evaluation, in bytes.
    pub evaluation_loss: u64,
}

impl Table {
    /// Computes the table by a dry run on the CPU; `None` if that is impossible. For a model on a GPU, the configured
    /// model is built again on the CPU, without allocating parameters. Ranks that share sequences may have different
    /// numbers of heads; the table describes a rank with the largest layers.
    pub fn of(config: &Config, model: &Model) -> Option<Self> {
        // Ranks that share sequences by heads may have different numbers of heads.
        let ranks = config.sequence_parallel_size.max(1);
        let of_rank = |index| Self::of_slice(config, model, index);
        let size = |table: &Self| table.layers.iter().map(|layer| layer.kept + layer.backward_peak).sum::<u64>();
        (0..ranks).map(of_rank).collect::<Option<Vec<_>>>()?.into_iter().max_by_key(size)
    }

    /// Returns the bytes of the swap file that holds the layer inputs which this program offloads.
    #[must_use]
    pub fn offloaded_input_bytes(&self, program: &Program) -> u64 {
        activation_offload::file_bytes(program, self)
    }

    /// Returns the table of the rank with this index among the ranks that share sequences. Otherwise like
    /// [`Table::of`].
    pub fn of_slice(config: &Config, model: &Model, index: usize) -> Option<Self> {
        let batch = BatchForms::of(config, model)?;
        let (heads, queries) = (config.sequence_parallel_size, config.mesh.context_parallel_degree);
        let context = match (heads, queries) {
            (2.., 2..) => SequenceGroup::traced(index, heads, Sharing::Heads).inside(Some(SequenceGroup::traced(
                0,
                queries,
                sharing(config),
            ))),
            _ => SequenceGroup::traced(index, config.context_size(), sharing(config)),
        };
        let group = match config.tensor_size() {
            1 => context,
            // All ranks of a tensor group have the same shapes.
            ranks => SequenceGroup::traced(0, ranks, Sharing::Layers)
                .inside(Some(context))
                .overlapping(config.tensor_parallel.tp_overlap_comm),
        };
        let of = |model: &Model| {
            let trace = || Self::new(model, &batch);
            let on_device = || match config.training.device {
                Compute::Cpu => trace(),
                Compute::Cuda => memory::on_gpu(trace),
            };
            group.within(on_device).ok()
        };
        if !model.device().is_cuda() {
            return of(model);
        }
        let first = model.parameters().first()?;
        let vocabulary = first.whole_shape().first().copied();
        let layers = configured_model::from_config(config, vocabulary).ok()?;
        let layers = configured_model::cut(config, layers, 0).ok()?;
        of(&configured_model::build(config, layers, first.dtype()).ok()?)
    }

    /// Runs every layer on meta tensors.
    ///
    /// # Errors
    /// Fails if a layer uses operations that have no dry run.
    fn new(model: &Model, batch: &BatchForms) -> Result<Self, Error> {
        let last = model.layers().len() - 1;
        let bytes = |forms: &[Form]| forms.iter().map(Form::bytes).sum::<u64>();
        let mut forms = vec![batch.inputs.clone()];
        let (mut layers, mut evaluation, mut sizes): (Vec<LayerMemory>, Vec<EvaluationMemory>, Vec<u64>) =
            (vec![], vec![], vec![]);
        for layer in 0..last {
            sizes.push(bytes(&forms));
            let inputs = batch.added_to(&forms, model.layers()[layer].route().reads());
            layers.push(model.layer_memory(layer, &inputs)?);
            evaluation.push(model.evaluation_memory(layer, &inputs)?);
            forms = layers[layer].outputs.clone();
        }
        sizes.push(bytes(&forms));
        let inputs = batch.added_to(&forms, model.layers()[last].route().reads());
        Ok(Self {
            loss: model.loss_memory(&inputs, &batch.targets)?,
            evaluation_loss: model.evaluation_loss_memory(&inputs, &batch.targets)?,
            layers,
            evaluation,
            inputs: sizes,
            batch: batch.bytes(),
        })
    }
}

impl Table {
    /// Returns the bytes that layers of a program send from the table's rank to the other ranks of its context and
    /// tensor groups. The last layer's forward runs as part of its backward.
    #[must_use]
    pub fn exchanged(&self, program: &Program) -> Exchanged {
        let of_last = |pass: usize| if pass == 0 { Exchanged::default() } else { self.loss.exchanged };
        let of = |layer: usize, pass: usize| {
            self.layers.get(layer).map_or_else(|| of_last(pass), |memory| memory.exchanged[pass])
        };
        let of_instruction = |instruction: &Instruction| match *instruction {
            Instruction::Forward { layer, .. } | Instruction::Recompute { layer, .. } => of(layer, 0),
            Instruction::Backward { layer, .. } | Instruction::BackwardInput { layer, .. } => of(layer, 1),
            _ => Exchanged::default(),
        };
        program.instructions.iter().map(of_instruction).fold(Exchanged::default(), |sum, sent| sum + sent)
    }
}

/// Shapes and dtypes of a micro-batch.
struct BatchForms {
    inputs: Form,
    /// Inputs with a name.
    named: BTreeMap<String, Form>,
    targets: Vec<Form>,
}

impl BatchForms {
    /// Returns `None` if the shapes depend on the data.
    fn of(config: &Config, model: &Model) -> Option<Self> {
        let rows = config.train_micro_batch_size_per_gpu;
        if let zero_config::Model::Mlp(mlp) = config.model.as_ref()? {
            let (inputs, targets) = (Form::new((rows, mlp.input_size), DType::F32), Form::new(rows, DType::U32));
            return Some(Self { inputs, named: BTreeMap::new(), targets: vec![targets] });
        }
        let whole = tokens(config)?;
        let tokens = (rows, whole / config.context_size());
        let is_whole = |name: &str| model.whole_inputs().is_some_and(|whole| whole.iter().any(|input| input == name));
        let form = |name: &str| match name {
            POSITION_IDS if is_whole(name) => Some(Form::new((rows, whole), DType::U32)),
            POSITION_IDS => Some(Form::new(tokens, DType::U32)),
            LABELS => Some(Form::new(tokens, DType::I64)),
            LABEL_GROUPS => Some(Form::new(tokens, DType::U8)),
            LABEL_COUNTS => Some(Form::new((rows, PreferenceLoss::SUMS), DType::F32)),
            REFERENCE_LOG_PROBS => Some(Form::new((rows, 2), DType::F32)),
            _ => None,
        };
        let Signature { inputs, targets, .. } = model.signature();
        // `inputs` has an entry for each layer that names an input, so names can repeat.
        let names: BTreeSet<&String> = inputs.iter().map(|(name, _)| name).collect();
        let named = names.into_iter().map(|name| Some((name.clone(), form(name)?))).collect::<Option<_>>()?;
        let targets = match targets {
            Some(names) => names.iter().map(|name| form(name)).collect::<Option<_>>()?,
            None => vec![Form::new(tokens, DType::U32)],
        };
        Some(Self { inputs: Form::new(tokens, DType::U32), named, targets })
    }

    /// Appends the inputs that a layer names to its incoming activations.
    fn added_to(&self, flow: &[Form], names: &[String]) -> Vec<Form> {
        flow.iter().chain(names.iter().filter_map(|name| self.named.get(name))).cloned().collect()
    }

    fn bytes(&self) -> u64 {
        [&self.inputs].into_iter().chain(self.named.values()).chain(&self.targets).map(Form::bytes).sum()
    }
}

/// Returns the number of tokens per sample; a table row counts as one token. `None` if the number depends on the data.
pub fn tokens(config: &Config) -> Option<usize> {
    let model = config.model.as_ref()?;
    if matches!(model, zero_config::Model::Mlp(_)) {
        return Some(1);
    }
    let length = config.data.as_ref().and_then(|data| data.sequence_length).or(model.max_sequence_length())?;
    // A sample for preference training has two answers.
    Some(if config.preference.is_some() { 2 * length } else { length })
}
