//! What a candidate comes to before anything of it runs: refused, too large, or worth a run.

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

/// How a candidate becomes a configuration.
pub(super) struct Outlook<'a> {
    pub(super) source: &'a Source,
    /// Those of the command line.
    pub(super) overrides: &'a [String],
    pub(super) planner: &'a Planner,
    /// Compute threads of each rank of a configuration, on this machine.
    pub(super) threads: &'a dyn Fn(&Config) -> usize,
}

impl Outlook<'_> {
    /// Overrides of a candidate, as `--set` takes them.
    pub(super) fn overrides(&self, settings: &[Setting]) -> Vec<String> {
        self.overrides.iter().cloned().chain(overrides(settings)).collect()
    }

    /// Its configuration.
    ///
    /// # Errors
    /// The first thing that is wrong with it, in words.
    pub(super) fn resolve(&self, ranks: usize, settings: &[Setting]) -> Result<Config, String> {
        resolve(self.source, &self.overrides(settings), ranks)
    }

    /// Its row: planned, and neither predicted nor measured.
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
                    let reason = format!("a rank needs {needs} at a time, and may have {has}");
                    (row.state, row.reason) = (State::TooLarge, Some(reason));
                }
            }
        }
        row
    }

    /// Its plan, on as many threads as its ranks would have.
    pub(super) fn memory_plan(&self, config: &Config) -> Result<MemoryPlan, Error> {
        zero_model::ops::set_threads((self.threads)(config));
        self.planner.memory_plan(config)
    }

    /// What its cost table must hold for.
    pub(super) fn conditions(&self, config: &Config, candidate: &Candidate) -> Conditions {
        let replicas = config.data_parallel_size();
        let others = candidate.settings.iter().filter(|(path, _)| !super::space::is_ours(path));
        Conditions {
            ranks: if replicas > 1 { replicas } else { config.world_size },
            threads: (self.threads)(config),
            others: others.cloned().collect(),
        }
    }

    /// A step of a row, by the tables.
    ///
    /// # Errors
    /// What they have not, in words.
    pub(super) fn timeline(&self, row: &Row, tables: &Tables) -> Result<Timeline, String> {
        let config = self.resolve(row.candidate.ranks, &row.candidate.settings)?;
        let table = tables.of(&self.conditions(&config, &row.candidate), &config)?;
        let memory_plan = self.memory_plan(&config).map_err(|error| error.to_string())?;
        memory_plan.timeline(&table)
    }
}

/// The configuration of a file with these overrides.
///
/// # Errors
/// The first thing that is wrong with it, in words.
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
