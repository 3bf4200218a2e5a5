//! The memory needs of the ranks of a pipeline stage, by category and tier.

use zero_partition::{CATEGORIES, DiskBytes, disk_bytes};
use zero_pipeline::{Coordinates, StageId};

use super::walk::WalkInputs;
use super::{Peaks, Script, arrivals, peaks, tensor_sum};
use zero_engine::costs::forms::Table;
use zero_engine::costs::subject::Subject;

/// The memory needs of a pipeline stage's busiest rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs {
    pub(crate) peaks: Peaks,
    pub(crate) disk: DiskBytes,
    /// Bytes of the swap file of offloaded layer inputs.
    pub(crate) inputs_on_disk: u64,
    /// Whether the memory of layers is included. It is unknown if a layer uses operations from outside this project.
    pub(crate) with_activations: bool,
}

impl Needs {
    /// Returns the bytes of all swap files of a rank.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.disk.optimizer + self.disk.parameters + self.inputs_on_disk
    }
}

/// Computes the needs of each pipeline stage of a subject.
pub(crate) fn needs(subject: &Subject<'_>) -> Vec<Needs> {
    let table = subject.table();
    let evaluations = subject.stage_plan.evaluation(subject.layout.shape(), 1);
    let averaging = subject.settings.zero.outer.map(|_| subject.stage_plan.averaging(subject.layout.shape()));
    let (in_steps, in_evaluations) = (arrivals(subject.programs), arrivals(&evaluations));
    let in_averaging = averaging.as_deref().map(arrivals);
    (0..subject.stage_plan.mesh.pipe())
        .map(|stage| {
            let step = Script { program: &subject.programs[stage], arrivals: &in_steps[stage] };
            let evaluation = Script { program: &evaluations[stage], arrivals: &in_evaluations[stage] };
            let averaging = averaging.iter().zip(&in_averaging).next();
            let averaging = averaging.map(|(of, found)| Script { program: &of[stage], arrivals: &found[stage] });
            of_stage(subject, stage, table.as_ref(), (step, averaging, evaluation))
        })
        .collect()
}

fn of_stage(
    subject: &Subject<'_>,
    stage: StageId,
    table: Option<&Table>,
    (step, averaging, evaluation): (Script<'_>, Option<Script<'_>>, Script<'_>),
) -> Needs {
    let width = subject.settings.dtype.size_in_bytes();
    let widths = subject.settings.zero.widths(width);
    // The sizes of shards differ by a few blocks at most, so walking the programs of a few ranks suffices. If ranks own
    // whole matrices, walk through all ranks.
    let last = subject.stage_plan.mesh.shards() - 1;
    let has_owners = subject.layout.segments().iter().any(|segment| segment.matrix.is_some());
    let mut shards = if last < 4 || has_owners { (0..=last).collect() } else { vec![0, last / 2, last - 1, last] };
    shards.dedup();
    let mut needs = Needs {
        peaks: Peaks::default(),
        disk: DiskBytes::default(),
        inputs_on_disk: table.map_or(0, |table| table.offloaded_input_bytes(step.program)),
        with_activations: table.is_some(),
    };
    for shard in shards {
        let at = Coordinates { shard, ..Coordinates::first(stage) };
        let work = WalkInputs {
            layout: subject.layout,
            stages: &subject.stage_plan.stages,
            mesh: subject.stage_plan.mesh,
            at,
            options: &subject.settings.zero,
            width: width as u64,
            table,
            tensor_sum: tensor_sum((subject.layout, &subject.stage_plan.stages), at, subject.config),
        };
        let found = peaks(work, subject.config, step, averaging, evaluation);
        needs.peaks.total = needs.peaks.total.max(found.total);
        needs.peaks.gpu = needs.peaks.gpu.max(found.gpu);
        for category in CATEGORIES {
            let of = &mut needs.peaks.by_category[category as usize];
            *of = (*of).max(found.by_category[category as usize]);
        }
        let disk = disk_bytes(subject.layout, &subject.stage_plan.stages, at, &widths);
        needs.disk.optimizer = needs.disk.optimizer.max(disk.optimizer);
        needs.disk.parameters = needs.disk.parameters.max(disk.parameters);
    }
    needs
}
