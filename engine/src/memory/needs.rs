//! What the ranks of a pipeline stage need, by category and tier.

use zero_model::Model;
use zero_partition::{CATEGORIES, DiskBytes, Layout, disk_bytes};
use zero_pipeline::{Coordinates, Program, StageId};

use super::table::Table;
use super::walk::Work;
use super::{Peaks, Script, arrivals, peaks};
use crate::arrangement::Arrangement;
use crate::settings::Settings;

/// What the busiest rank of a stage needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs {
    pub(crate) peaks: Peaks,
    pub(crate) disk: DiskBytes,
    /// Whether what layers take is in it: it is not where a layer computes otherwise than by our operations.
    pub(crate) with_activations: bool,
}

/// What all that is planned depends on.
pub(crate) struct Subject<'a> {
    pub(crate) config: &'a zero_config::Config,
    pub(crate) settings: &'a Settings,
    pub(crate) model: &'a Model,
    pub(crate) layout: &'a Layout,
    pub(crate) arrangement: &'a Arrangement,
    /// By stage.
    pub(crate) programs: &'a [Program],
}

impl Subject<'_> {
    /// What each layer takes; `None` where that is not known.
    pub(crate) fn table(&self) -> Option<Table> {
        Table::of(self.config, self.model)
    }

    /// Of each stage.
    pub(crate) fn needs(&self) -> Vec<Needs> {
        let table = self.table();
        let evaluations = self.arrangement.evaluation(self.layout.shape(), 1);
        let (in_steps, in_evaluations) = (arrivals(self.programs), arrivals(&evaluations));
        (0..self.arrangement.mesh.pipe())
            .map(|stage| {
                let step = Script { program: &self.programs[stage], arrivals: &in_steps[stage] };
                let evaluation = Script { program: &evaluations[stage], arrivals: &in_evaluations[stage] };
                self.of_stage(stage, table.as_ref(), step, evaluation)
            })
            .collect()
    }

    fn of_stage(&self, stage: StageId, table: Option<&Table>, step: Script<'_>, evaluation: Script<'_>) -> Needs {
        let (width, states) = (self.settings.dtype.size_in_bytes(), self.settings.zero.optimizer.states().len());
        // Shards differ by some blocks: of many ranks a few stand for all.
        let last = self.arrangement.mesh.data() - 1;
        let mut replicas = if last < 4 { (0..=last).collect() } else { vec![0, last / 2, last - 1, last] };
        replicas.dedup();
        let mut needs =
            Needs { peaks: Peaks::default(), disk: DiskBytes::default(), with_activations: table.is_some() };
        for replica in replicas {
            let at = Coordinates { stage, replica };
            let work = Work {
                layout: self.layout,
                stages: &self.arrangement.stages,
                at,
                options: &self.settings.zero,
                width: width as u64,
                table,
            };
            let found = peaks(work, self.config, self.arrangement.mesh, step, evaluation);
            needs.peaks.total = needs.peaks.total.max(found.total);
            needs.peaks.gpu = needs.peaks.gpu.max(found.gpu);
            for category in CATEGORIES {
                let of = &mut needs.peaks.by_category[category as usize];
                *of = (*of).max(found.by_category[category as usize]);
            }
            let disk = disk_bytes(self.layout, &self.arrangement.stages, at, width, states);
            needs.disk.optimizer = needs.disk.optimizer.max(disk.optimizer);
            needs.disk.parameters = needs.disk.parameters.max(disk.parameters);
        }
        needs
    }
}
