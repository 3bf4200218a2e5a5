//! Decides whether communication overlaps with compute, by simulating a step with overlap and without.

use std::path::Path;

use zero_comm::{Buffer, Communicator};
use zero_config::Config;
use zero_model::Model;
use zero_partition::Layout;

use super::apply::costs;
use super::prediction::Prediction;
use super::table::CostTable;
use crate::costs::cut::CutCosts;
use crate::costs::subject::Subject;
use crate::error::Error;
use crate::settings::Settings;
use crate::stage_plan::StagePlan;

/// The decision, and the step times that led to it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Whether to overlap.
    pub overlap: bool,
    /// Simulated seconds of a step (without overlap, with overlap). `None` if the table is not valid for this run; the
    /// default then applies.
    pub seconds: Option<[f64; 2]>,
}

/// Relative difference below which the default applies. A cost table is at best this precise.
const SAME: f64 = 0.002;

/// Returns the path of the cost table, if the configuration leaves the decision to a table.
fn deciding(config: &Config) -> Option<&Path> {
    match config.zero.overlap_comm {
        None => config.training.cost_table.as_deref(),
        Some(_) => None,
    }
}

/// Chooses whether to overlap, from the times in the cost table. Returns `None` unless the configuration leaves the
/// decision to a table.
///
/// # Errors
/// Fails if the table cannot be read or the model cannot be split into stages.
pub fn choose(config: &Config, model: &Model, cut: Option<&CutCosts>) -> Result<Option<Choice>, Error> {
    let Some(path) = deciding(config) else { return Ok(None) };
    let table = CostTable::read(path)?;
    let default = Settings::new(config, model)?.passes.gather.overlap;
    let mut seconds = [0.0; 2];
    for (overlap, seconds) in [false, true].into_iter().zip(&mut seconds) {
        let mut config = config.clone();
        config.zero.overlap_comm = Some(overlap);
        let settings = Settings::new(&config, model)?;
        let layout = Layout::new(model, &settings.layout).on_disk(&settings.tiers);
        let stage_plan = StagePlan::new(&config, &settings, model, &layout, cut)?;
        let programs = stage_plan.training(layout.shape());
        let subject = Subject {
            config: &config,
            settings: &settings,
            model,
            layout: &layout,
            stage_plan: &stage_plan,
            programs: &programs,
        };
        let Ok(costs) = costs(&table, &subject) else {
            return Ok(Some(Choice { overlap: default, seconds: None }));
        };
        let simulated = stage_plan.simulate(&programs, layout.shape(), &costs)?;
        *seconds = Prediction::of(&simulated, None).step_seconds;
    }
    let [without, with] = seconds;
    let is_same = (with - without).abs() <= SAME * without;
    Ok(Some(Choice { overlap: if is_same { default } else { with < without }, seconds: Some(seconds) }))
}

/// Decides on rank 0 and broadcasts, since the programs of all ranks must match. Collective if a table decides.
///
/// # Errors
/// Returns the errors of [`choose`] on rank 0. Fails if a rank is lost.
pub(crate) fn chosen_by_the_first(
    config: &Config,
    model: &Model,
    cut: Option<&CutCosts>,
    comm: &dyn Communicator,
) -> Result<Option<Choice>, Error> {
    if deciding(config).is_none() {
        return Ok(None);
    }
    let own = match comm.rank() {
        0 => choose(config, model, cut).inspect_err(|error| comm.abort(&error.to_string()))?,
        _ => None,
    };
    let words = own.map_or([0; 4], |Choice { overlap, seconds }| {
        let [without, with] = seconds.unwrap_or_default();
        [i64::from(overlap), i64::from(seconds.is_some()), without.to_bits() as i64, with.to_bits() as i64]
    });
    let told = comm.broadcast(Buffer::I64(words.to_vec()), 0).wait()?.into_i64()?;
    let seconds = (told[1] != 0).then(|| [told[2], told[3]].map(|bits| f64::from_bits(bits as u64)));
    Ok(Some(Choice { overlap: told[0] != 0, seconds }))
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = if self.overlap { "overlapped" } else { "not overlapped" };
        match self.seconds {
            None => {
                write!(f, "communication {word} with compute (the default): the cost table does not apply to this run")
            }
            Some([without, with]) => write!(
                f,
                "communication {word} with compute: the cost table predicts {:.1} ms per step without overlap and {:.1} ms with it",
                without * 1e3,
                with * 1e3
            ),
        }
    }
}
