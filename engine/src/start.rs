//! What the parameters of an engine are at first.

use zero_comm::Communicator;
use zero_config::Config;
use zero_partition::Zero;

use crate::error::Error;

/// What the parameters of an engine are at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    /// What the configuration names, or drawn from the seed.
    Anew,
    /// Drawn from the seed: a checkpoint will be loaded, and what the configuration names need not be there any more.
    GoesOn,
}

impl Start {
    /// Overwrites the parameters, which are drawn from the seed, with the weights that the configuration names, if it does; a
    /// collective.
    pub(crate) fn load(self, config: &Config, zero: &mut Zero, comm: &dyn Communicator) -> Result<(), Error> {
        if self == Self::GoesOn {
            return Ok(());
        }
        if let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained()) {
            zero_checkpoint::load_pretrained(folder.as_ref(), zero, comm)?;
        }
        if let Some(sources) = &config.training.initial_weights {
            zero_checkpoint::load_weights(&crate::data::files(sources)?, zero, comm)?;
        }
        Ok(())
    }
}
