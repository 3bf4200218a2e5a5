//! Plans candidates before they run. The plan shows whether a candidate is invalid, too large, or worth a run.

use zero_config::{Config, Source};
use zero_pipeline::Timeline;

use super::correction::{Setting, overrides};
use super::objective::StepWork;
use super::row::{Planned, Row, State};
use super::space::Candidate;
use super::tables::{Conditions, Tables};
use crate::memory::Limit;
use crate::plan::{MemoryPlan, Planner};
use zero_engine::Error;
use zero_engine::costs::forms::tokens;

/// Turns candidates into configurations.
pub(super) struct Outlook<'a> {
    pub(super) source: &'a Source,
    /// Overrides from the command line.
    pub(super) overrides: &'a [String],
    pub(super) planner: &'a Planner,
    /// Returns the number of compute threads of each rank of a configuration on this machine.
    pub(super) threads: &'a dyn Fn(&Config) -> usize,
}

impl Outlook<'_> {
    /// Returns the overrides of the command line and of a candidate, in the syntax of `--set`.
    pub(super) fn overrides(&self, settings: &[Setting]) -> Vec<String> {
        self.overrides.iter().cloned().chain(overrides(settings)).collect()
    }

    /// Resolves the configuration of a candidate.
    ///
    /// # Errors
    /// Describes the first error.
    pub(super) fn resolve(&self, ranks: usize, settings: &[Setting]) -> Result<Config, String> {
        resolve(self.source, &self.overrides(settings), ranks)
    }

    /// Plans a candidate and returns its row, without prediction or measurement.
    pub(super) fn row(&self, id: usize, candidate: Candidate) -> Row {
        let found = self.resolve(candidate.ranks, &candidate.settings).and_then(|config| {
            let memory_plan = self.memory_plan(&config).map_err(|error| error.to_string())?;
            Ok(planned(&config, &memory_plan))
        });
        let mut row = Row {
            id,
            candidate,
            state: State::Predicted,
            reason: None,
            planned: None,
            predicted: None,
            corrected: None,
            runs: vec![],
        };
        match found {
            Err(reason) => (row.state, row.reason) = (State::Refused, Some(reason)),
            Ok(planned) => {
                row.planned = Some(planned);
                if let Some(limit) = planned.limit_bytes.filter(|&limit| planned.peak_bytes > limit) {
                    let (needs, has) = (zero_engine::bytes(planned.peak_bytes), zero_engine::bytes(limit));
                    let reason = format!("a rank needs {needs} at its peak but may use {has}");
                    (row.state, row.reason) = (State::TooLarge, Some(reason));
                }
            }
        }
        row
    }

    /// Plans a configuration with the number of threads that its ranks would use.
    pub(super) fn memory_plan(&self, config: &Config) -> Result<MemoryPlan, Error> {
        zero_model::ops::set_threads((self.threads)(config));
        self.planner.memory_plan(config)
    }

    /// Returns the conditions that a candidate's cost table must match.
    pub(super) fn conditions(&self, config: &Config, candidate: &Candidate) -> Conditions {
        let replicas = config.ranks_of_stage();
        let others = candidate.settings.iter().filter(|(path, _)| !super::space::is_ours(path));
        Conditions {
            ranks: if replicas > 1 { replicas } else { config.world_size },
            threads: (self.threads)(config),
            others: others.cloned().collect(),
        }
    }

    /// Simulates a step of a row with the tables.
    ///
    /// # Errors
    /// Describes what the tables lack.
    pub(super) fn timeline(&self, row: &Row, tables: &Tables) -> Result<Timeline, String> {
        let config = self.resolve(row.candidate.ranks, &row.candidate.settings)?;
        let table = tables.of(&self.conditions(&config, &row.candidate), &config)?;
        let memory_plan = self.memory_plan(&config).map_err(|error| error.to_string())?;
        memory_plan.timeline(&table)
    }
}

/// Resolves the configuration of a file with these overrides.
///
/// # Errors
/// Describes the first error.
pub(super) fn resolve(source: &Source, overrides: &[String], ranks: usize) -> Result<Config, String> {
    let first =
        |errors: zero_config::Errors| errors.iter().next().map_or_else(String::new, |error| error.message.clone());
    let typed = zero_config::load(source.clone(), overrides).map_err(first)?;
    typed.resolve(Some(ranks)).map_err(first)
}

fn planned(config: &Config, memory_plan: &MemoryPlan) -> Planned {
    Planned {
        peak_bytes: memory_plan.peak_bytes(),
        disk_bytes: memory_plan.disk_bytes(),
        limit_bytes: Limit::of_rank(config, config.world_size).map(|limit| limit.bytes),
        work: StepWork {
            samples: config.train_batch_size,
            tokens: tokens(config),
            parameters: memory_plan.parameters(),
            ranks: config.world_size,
        },
    }
}
