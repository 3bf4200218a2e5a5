//! What the parameters of an engine are at first.

use zero_checkpoint::CheckpointError;
use zero_comm::Communicator;
use zero_config::Config;
use zero_partition::ShardedState;

use crate::error::Error;

/// What the parameters of an engine are at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// What the configuration names, or drawn from the seed.
    Anew,
    /// Drawn from the seed: a checkpoint will be loaded, and what the configuration names need not be there any more.
    GoesOn,
}

impl Start {
    /// Overwrites the parameters, which are drawn from the seed, with the weights that the configuration names, if it does; a
    /// collective.
    pub(crate) fn load(self, config: &Config, zero: &mut ShardedState, comm: &dyn Communicator) -> Result<(), Error> {
        if self == Self::GoesOn {
            return Ok(());
        }
        if let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained()) {
            zero_checkpoint::load_pretrained(folder.as_ref(), zero, comm).map_err(of_pretrained)?;
        }
        if let Some(sources) = &config.training.initial_weights {
            let named = |error: Error| {
                error.named("training.initial_weights", "name safetensors files that can be read, or a glob")
            };
            let files = crate::files::expand(sources).map_err(|error| named(error.into()))?;
            zero_checkpoint::load_weights(&files, zero, comm).map_err(|error| named(error.into()))?;
        }
        Ok(())
    }
}

/// An error of the folder that `model.pretrained` names.
pub fn of_pretrained(error: CheckpointError) -> Error {
    Error::from(error)
        .named("model.pretrained", "name a folder with config.json and model.safetensors, as transformers saves one")
}
