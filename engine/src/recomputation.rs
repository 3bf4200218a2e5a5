//! Selects the layers to recompute, from `activation_checkpointing`.

use zero_config::{CheckpointSpacing, Config, OffloadDevice};
use zero_model::Model;
use zero_partition::passes::RecomputeOptions;

use crate::error::Error;

/// Converts the configuration to options of the recompute pass.
///
/// # Errors
/// Fails if `activation_checkpointing.layers` matches no layer, or only the last one.
pub(crate) fn options(config: &Config, model: &Model) -> Result<RecomputeOptions, Error> {
    let Some(wanted) = &config.activation_checkpointing else { return Ok(RecomputeOptions::none()) };
    let last = model.layers().len() - 1;
    let mut layers: Vec<bool> = match &wanted.layers {
        // By default, do not recompute embeddings, which keep little more than their outputs, or the head, whose
        // forward runs as part of its backward.
        None => (0..=last).map(|layer| layer > 0 && layer < last).collect(),
        Some(patterns) => {
            let names = || model.layers().iter().map(|layer| layer.name());
            let is_wanted = |name: &str| patterns.iter().any(|pattern| pattern.matches(name));
            if !names().take(last).any(is_wanted) {
                let message = match names().any(is_wanted) {
                    true => {
                        "only the last layer matches, but it cannot be chosen, because its forward always runs as part of its backward pass"
                    }
                    false => "no layer name matches",
                };
                let all: Vec<&str> = names().collect();
                let help = format!("the layers are {}", all.join(", "));
                return Err(Error::setting("activation_checkpointing.layers", message, help));
            }
            names().map(is_wanted).collect()
        }
    };
    // Layers before the first trainable parameter have no backward and keep nothing.
    layers.iter_mut().take(model.first_trained()).for_each(|layer| *layer = false);
    let chosen = layers.iter().take(last).filter(|chosen| **chosen).count();
    let interval = match wanted.spacing {
        CheckpointSpacing::Interval(interval) => interval,
        CheckpointSpacing::Number(number) => chosen.div_ceil(number.max(1)),
    };
    let on_disk = wanted.device == OffloadDevice::Nvme;
    Ok(RecomputeOptions { layers, interval: interval.max(1), on_disk })
}
