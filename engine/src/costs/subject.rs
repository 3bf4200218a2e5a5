//! The inputs of a plan.

use zero_model::Model;
use zero_partition::Layout;
use zero_pipeline::Program;

use crate::costs::forms::Table;
use crate::settings::Settings;
use crate::stage_plan::StagePlan;

/// Everything that a plan depends on.
pub struct Subject<'a> {
    /// The configuration, resolved for its number of ranks.
    pub config: &'a zero_config::Config,
    /// The settings derived from the configuration.
    pub settings: &'a Settings,
    /// The model: either without allocated parameters, or an engine's model.
    pub model: &'a Model,
    /// How segments (flat parameters) are split into shards.
    pub layout: &'a Layout,
    /// The pipeline stages and the options of their programs.
    pub stage_plan: &'a StagePlan,
    /// The programs of a training step, by stage.
    pub programs: &'a [Program],
}

impl Subject<'_> {
    /// Computes the memory of each layer; `None` if a dry run is impossible.
    #[must_use]
    pub fn table(&self) -> Option<Table> {
        Table::of(self.config, self.model)
    }
}
