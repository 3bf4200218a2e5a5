//! `sequence_parallel_size`: what ranks that share sequences cannot do.

use crate::config::{Compute, Config, Data, Model, Training, Zero, ZeroStage};
use crate::reader::Resolver;

const KEY: &str = Config::sequence_parallel_size;

/// Checks that sequences can be cut into slices, and rejects what slices of sequences cannot be used for.
pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
    let size = config.sequence_parallel_size;
    if size == 1 {
        return;
    }
    let data = config.data.as_ref();
    if let Some(length) = data.and_then(|data| data.sequence_length).filter(|length| !length.is_multiple_of(size)) {
        let message = format!("samples of {length} tokens cannot be cut into {size} slices of the same length");
        let help = format!("the next multiple is {}", length.next_multiple_of(size));
        resolver.contradiction(&[KEY, Data::sequence_length], message, Some(help));
    }
    // Gradients that are not sharded are added up over micro-batches before slices, others after them.
    let adds_first = config.zero.stage < ZeroStage::Two && config.gradient_accumulation_steps > 1;
    if config.training.reproducible && adds_first {
        let message = format!(
            "`{}` with ranks that share sequences needs gradients that are reduced for each micro-batch, \
             and stage {} reduces their sum",
            Training::reproducible,
            config.zero.stage.number()
        );
        let help = format!("write `{}: 2`, or `{}: 1`", Zero::stage, Config::gradient_accumulation_steps);
        resolver.contradiction(&[KEY, Zero::stage, Config::gradient_accumulation_steps], message, Some(help));
    }
    let is_mlp = matches!(config.model, Some(Model::Mlp(_)));
    for (is_on, path, why) in [
        (
            config.training.device != Compute::Cpu,
            Training::device,
            "sequences that are cut into slices are not implemented on a GPU",
        ),
        (is_mlp, Model::TYPE, "an mlp has no sequences to cut"),
        (config.preference.is_some(), Config::preference, "the loss of pairs needs whole answers on a rank"),
        (
            data.is_some_and(|data| data.max_tokens.is_some()),
            Data::max_tokens,
            "micro-batches of different lengths that are cut into slices are not implemented",
        ),
        (
            config.training.gradient_noise_scale.is_some(),
            Training::gradient_noise_scale,
            "the noise is that between samples, and ranks have slices of samples",
        ),
    ] {
        if is_on {
            let help = format!("leave one of the two out, or write `{KEY}: 1`");
            resolver.contradiction(&[path, KEY], why.to_string(), Some(help));
        }
    }
}
