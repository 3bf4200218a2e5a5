//! The initial values of an engine's parameters.

use zero_checkpoint::CheckpointError;
use zero_comm::Communicator;
use zero_config::Config;
use zero_partition::ShardedState;

use crate::error::Error;

/// The source of an engine's initial parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The weights that the configuration names, or else random values from the seed.
    Anew,
    /// Random values from the seed, because a checkpoint is loaded next. The weights that the configuration names may
    /// no longer exist.
    GoesOn,
}

impl Start {
    /// Overwrites the randomly initialized parameters with the weights that the configuration names, if any.
    /// Collective.
    pub(crate) fn load(self, config: &Config, zero: &mut ShardedState, comm: &dyn Communicator) -> Result<(), Error> {
        if self == Self::GoesOn {
            return Ok(());
        }
        if let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained()) {
            zero_checkpoint::load_pretrained(folder.as_ref(), zero, comm).map_err(of_pretrained)?;
        }
        if let Some(sources) = &config.training.initial_weights {
            let named =
                |error: Error| error.named("training.initial_weights", "name readable safetensors files, or a glob");
            let files = crate::files::expand(sources).map_err(|error| named(error.into()))?;
            zero_checkpoint::load_weights(&files, zero, comm).map_err(|error| named(error.into()))?;
        }
        Ok(())
    }
}

/// Adds the key `model.pretrained` to an error of its folder.
pub fn of_pretrained(error: CheckpointError) -> Error {
    Error::from(error)
        .named("model.pretrained", "name a folder with config.json and model.safetensors, as transformers saves it")
}
