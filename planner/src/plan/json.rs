//! The plan as JSON.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use zero_model::memory::Exchanged;
use zero_partition::CATEGORIES;
use zero_pipeline::StageId;

use super::Plan;

impl Plan {
    /// Returns the plan as JSON.
    #[must_use]
    pub fn value(&self) -> Value {
        let mesh = self.memory_plan.stage_plan.whole;
        let exchanged = self.exchanged();
        let sent_inside = |stage: StageId, is_sent: bool, part: fn(Exchanged) -> u64| {
            exchanged.as_ref().filter(|_| is_sent).map(|of_stages| part(of_stages[stage]))
        };
        let stages = (0..mesh.pipe()).map(|stage| {
            let share = self.share(stage);
            json!({
                "stage": stage,
                "ranks": mesh.ranks(stage).collect::<Vec<_>>(),
                "layers": self.memory_plan.stage_plan.stages.layers_of(stage)
                    .map(|layer| self.memory_plan.layout.shape().layers[layer].name.clone()).collect::<Vec<_>>(),
                "parameters": share.parameters,
                "trainable_parameters": share.trainable,
                "state_bytes_per_rank": { "parameters": share.state.parameters, "gradients": share.state.gradients,
                    "optimizer_state": share.state.optimizer },
                "planned_peak_bytes": CATEGORIES.iter().map(ToString::to_string)
                    .zip(self.memory_plan.needs[stage].peaks.by_category).collect::<BTreeMap<_, _>>(),
                "planned_peak_total_bytes": self.memory_plan.needs[stage].peaks.total,
                "planned_peak_gpu_bytes": self.has_gpu().then_some(self.memory_plan.needs[stage].peaks.gpu),
                "activations_known": self.memory_plan.needs[stage].with_activations,
                "disk_bytes": { "optimizer": self.memory_plan.needs[stage].disk.optimizer,
                    "parameters": self.memory_plan.needs[stage].disk.parameters,
                    "activations": self.memory_plan.needs[stage].inputs_on_disk },
                "sent_bytes_per_step_besides_activations": share.sent.total(),
                "sent_bytes_across_near_groups": share.sent.across,
                "sent_bytes_per_step_of_attention": sent_inside(stage, mesh.context() > 1, Exchanged::context),
                "sent_bytes_per_step_to_tensor_group": sent_inside(stage, mesh.tensor() > 1, |sent| sent.tensor),
                "sent_bytes_per_outer_step": self.memory_plan.averaging.as_ref().map(|_| share.sent_outer),
                "sent_bytes_between_replicates_per_outer_step":
                    self.memory_plan.averaging.as_ref().map(|_| share.sent_between),
                "micro_batches_alive": share.alive,
                "keeps_gathered": self.memory_plan.stage_plan.gathering(self.memory_plan.layout.shape())
                    .map(|_| self.memory_plan.stage_plan.keeps_gathered(stage)),
                "instructions": self.memory_plan.programs[stage].instructions.len(),
            })
        });
        json!({
            "world_size": mesh.world_size(),
            "pipeline_stages": mesh.pipe(),
            "data_parallel_size": mesh.data_parallel(),
            "data_parallel_replicate_degree": mesh.replicates(),
            "data_parallel_shard_degree": mesh.shards() / mesh.context(),
            "sequence_parallel_size": self.memory_plan.config.sequence_parallel_size,
            "context_parallel_degree": self.memory_plan.config.mesh.context_parallel_degree,
            "tensor_parallel_size": mesh.tensor(),
            "local_steps": self.memory_plan.averaging.as_ref().map(|(_, steps)| steps),
            "zero_hpz_partition_size": self.memory_plan.settings.layout.secondary,
            "schedule": self.memory_plan.stage_plan.schedule.to_string(),
            "micro_batches": self.memory_plan.stage_plan.micro_batches,
            "zero_stage": self.memory_plan.settings.layout.zero_stage.number(),
            "bubble": self.bubble(),
            "planned_peak_bytes": self.peak_bytes(),
            "overlap_comm": self.memory_plan.settings.passes.gather.overlap,
            "time": self.prediction.as_ref().map(|time| match time {
                Ok(prediction) => json!(prediction),
                Err(missing) => json!({ "missing": missing }),
            }),
            "stages": stages.collect::<Vec<_>>(),
        })
    }
}
