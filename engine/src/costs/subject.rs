//! What all that is planned of a configuration depends on.

use zero_model::Model;
use zero_partition::Layout;
use zero_pipeline::Program;

use crate::costs::forms::Table;
use crate::settings::Settings;
use crate::stage_plan::StagePlan;

/// What all that is planned depends on.
pub struct Subject<'a> {
    /// Resolved for its number of ranks.
    pub config: &'a zero_config::Config,
    /// Of the configuration.
    pub settings: &'a Settings,
    /// In no memory, or that of an engine.
    pub model: &'a Model,
    /// How its segments are cut into shards.
    pub layout: &'a Layout,
    /// How the ranks train it together.
    pub stage_plan: &'a StagePlan,
    /// Of a training step, by stage.
    pub programs: &'a [Program],
}

impl Subject<'_> {
    /// What each layer takes; `None` where that is not known.
    #[must_use]
    pub fn table(&self) -> Option<Table> {
        Table::of(self.config, self.model)
    }
}
