//! `sequence_parallel_size` and `mesh.context_parallel_degree`: how ranks share sequences. Rejects features that do not
//! work then.

use crate::config::{
    Config, Curriculum, CurriculumConfig, Data, Gpt2, Llama, Mesh, Model, RotateMethod, Training, Zero, ZeroStage,
};
use crate::read::reader::Resolver;

impl Config {
    /// Number of ranks that share each sequence.
    pub fn context_size(&self) -> usize {
        (self.sequence_parallel_size * self.mesh.context_parallel_degree).max(1)
    }

    /// The key that sets how many ranks share each sequence.
    pub fn context_key(&self) -> &'static str {
        if self.mesh.context_parallel_degree > 1 { Mesh::context_parallel_degree } else { Self::sequence_parallel_size }
    }

    /// Whether context-parallel ranks pass keys and values from rank to rank.
    pub fn uses_ring_attention(&self) -> bool {
        self.mesh.context_parallel_degree > 1 && self.mesh.context_parallel_rotate_method == RotateMethod::AllToAll
    }

    /// Number of parts of equal length into which ranks split each sequence.
    pub fn slices_of_a_sequence(&self) -> usize {
        self.tensor_size() * self.chunks_of_a_sequence()
    }

    /// The number of attention heads of a tensor-parallel rank, and the key of the model's number of heads; `None` if
    /// the configuration has no model with attention.
    pub fn heads_of_a_rank(&self) -> Option<(&'static str, usize)> {
        let (path, heads) = match self.model.as_ref()? {
            Model::Gpt2(model) => (Gpt2::n_head, model.n_head),
            Model::Llama(model) => (Llama::num_attention_heads, model.num_attention_heads),
            Model::Mlp(_) => return None,
        };
        Some((path, heads / self.tensor_size()))
    }

    /// Number of parts of equal length into which the ranks that share a sequence split it.
    fn chunks_of_a_sequence(&self) -> usize {
        // With `context_parallel_degree`, each rank has one chunk from each half of the sequence.
        self.context_size() * if self.mesh.context_parallel_degree > 1 { 2 } else { 1 }
    }
}

/// Checks that sequences can be cut into slices, and rejects features that need whole sequences.
pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
    let size = config.context_size();
    if size == 1 {
        return;
    }
    let (key, chunks) = (config.context_key(), config.chunks_of_a_sequence());
    let parts = if chunks == size { format!("{size} slices") } else { format!("2 × {size} chunks") };
    let data = config.data.as_ref();
    if let Some(length) = data.and_then(|data| data.sequence_length).filter(|length| !length.is_multiple_of(chunks)) {
        let message = format!("samples of {length} tokens cannot be split into {parts} of equal length");
        let help = near_multiple(config, length, chunks);
        resolver.contradiction(&[key, Data::sequence_length], message, Some(help));
    }
    let heads = config.heads_of_a_rank().filter(|(_, heads)| config.sequence_parallel_size > (*heads).max(1));
    if let Some((path, heads)) = heads {
        let (key, ranks) = (Config::sequence_parallel_size, config.sequence_parallel_size);
        let message = format!("{heads} heads cannot be divided among {ranks} ranks");
        let help = format!("set `{key}: {heads}` or less, or use `{}`", Mesh::context_parallel_degree);
        resolver.contradiction(&[key, path], message, Some(help));
    }
    if let Some((path, length)) = uneven_length(config, chunks) {
        let message = format!("sequences of {length} tokens cannot be split into {parts} of equal length");
        let help = near_multiple(config, length, chunks);
        resolver.contradiction(&[path, key], message, Some(help));
    }
    // Below stage 2, gradients are first added over micro-batches and then reduced over slices. From stage 2 on, the
    // gradient of each micro-batch is reduced over slices first.
    let adds_first = config.zero.stage < ZeroStage::Two && config.gradient_accumulation_steps > 1;
    if config.training.reproducible && adds_first {
        let message = format!(
            "`{}` with ranks that share sequences needs a reduction of gradients after each micro-batch, \
             but stage {} reduces only their sum",
            Training::reproducible,
            config.zero.stage.number()
        );
        let help = format!("set `{}: 2`, or `{}: 1`", Zero::stage, Config::gradient_accumulation_steps);
        resolver.contradiction(&[key, Zero::stage, Config::gradient_accumulation_steps], message, Some(help));
    }
    let is_mlp = matches!(config.model, Some(Model::Mlp(_)));
    for (is_on, path, why) in [
        (is_mlp, Model::TYPE, "an mlp has no sequences that ranks could share"),
        (
            config.training.gradient_noise_scale.is_some(),
            Training::gradient_noise_scale,
            "the noise scale compares whole samples, but ranks hold slices of samples",
        ),
    ] {
        if is_on {
            let help = format!("remove one of the two, or set `{key}: 1`");
            resolver.contradiction(&[path, key], why.to_string(), Some(help));
        }
    }
}

/// Returns advice for a length that is not a multiple of `chunks`: a multiple that the model supports.
pub(crate) fn near_multiple(config: &Config, length: usize, chunks: usize) -> String {
    let next = length.next_multiple_of(chunks);
    let longest = config.model.as_ref().and_then(Model::max_sequence_length).filter(|&longest| longest < next);
    match longest.map(|longest| (longest, longest - longest % chunks)) {
        None => format!("the next multiple of {chunks} is {next}"),
        Some((longest, 0)) => {
            format!(
                "increase the model's maximum sequence length of {longest} to {next}, the next multiple of {chunks}"
            )
        }
        Some((longest, last)) => {
            format!("the largest multiple of {chunks} up to the model's maximum sequence length of {longest} is {last}")
        }
    }
}

/// Returns the first length of the curriculum that is not a multiple of `chunks`, with its key.
pub(crate) fn uneven_length(config: &Config, chunks: usize) -> Option<(&'static str, usize)> {
    let curriculum = config.data_efficiency.curriculum()?;
    let schedule = &curriculum.schedule_config;
    let ends = [
        (Curriculum::min_difficulty, curriculum.min_difficulty),
        (Curriculum::max_difficulty, curriculum.max_difficulty),
    ];
    let step = schedule.difficulty_step.map(|step| (CurriculumConfig::difficulty_step, step));
    let listed = schedule.difficulty.iter().flatten().map(|&length| (CurriculumConfig::difficulty, length));
    ends.into_iter().chain(step).chain(listed).find(|(_, length)| !length.is_multiple_of(chunks))
}
