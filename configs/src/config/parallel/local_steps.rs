//! `training.local_steps`: replicates take optimizer steps on their own between outer steps (DiLoCo).

use serde::Serialize;

use crate::config::{
    Bf16, Config, FlopsProfiler, Fp16, Mesh, OffloadDevice, OffloadOptimizer, OffloadParam, Optimizer, Training,
};
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::{last, section};

section! {
    /// `training.local_steps`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct LocalSteps(keys) in Training::local_steps {
        pub steps: usize = key(COUNT, REQUIRED, "Optimizer steps that each replicate takes independently between outer steps");
        pub outer_lr: f64 = key(POSITIVE, "0.7", "Learning rate of the outer optimizer, SGD with Nesterov momentum");
        pub outer_momentum: f64 = key(Kind::Float(FRACTION), "0.9", "Momentum of the outer optimizer, as in torch.optim.SGD(nesterov=True); 0: plain SGD, without momentum state");
    }
}

impl LocalSteps {
    /// Checks that the mesh has more than one replicate, and rejects keys that do not work with local steps.
    pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
        let Some(local) = config.training.local_steps else { return };
        const KEY: &str = Training::local_steps;
        let (training, zero) = (&config.training, &config.zero);
        if config.mesh.data_parallel_replicate_degree == 1 {
            let message = format!("`{KEY}` needs several replicates, but the mesh has only one");
            let degree = Mesh::data_parallel_replicate_degree;
            let help = match config.mesh_is_auto() {
                true => "`auto` makes each host a replicate, and there is only one host: start the ranks on several hosts, plan with `--hosts`, or set a number".to_string(),
                false => format!("set `{degree}`, or remove `{}`", last(KEY)),
            };
            resolver.contradiction(&[KEY, Mesh::data_parallel_replicate_degree], message, Some(help));
        }
        let is_schedule_free = config.optimizers().iter().any(|(_, of)| matches!(of, Optimizer::ScheduleFree(_)));
        let is_on_disk = |device| device == OffloadDevice::Nvme;
        for (is_on, path, why) in [
            (
                training.reproducible,
                Training::reproducible,
                "gradients are not summed over replicates that train independently",
            ),
            (training.ema.is_some(), Training::ema, "with outer steps, an average of the weights is not implemented"),
            (training.spikes.is_some(), Training::spikes, "each replicate has its own gradient norms"),
            (
                training.gradient_noise_scale.is_some(),
                Training::gradient_noise_scale,
                "each replicate has its own gradients",
            ),
            (
                config.flops_profiler.enabled,
                FlopsProfiler::enabled,
                "the profiler sums the times of all ranks in each step, but replicates communicate only in outer steps",
            ),
            (
                config.memory_breakdown,
                Config::memory_breakdown,
                "the breakdown compares the memory of all ranks, but replicates do not communicate in local steps",
            ),
            (training.save_async, Training::save_async, "copying the states of all replicates is not implemented"),
            (is_schedule_free, Config::optimizer, "with outer steps, averages of the weights are not implemented"),
            (config.fp16.enabled, Fp16::enabled, "a loss scale for each replicate is not implemented"),
            (
                config.bf16.enabled && config.bf16.bf16_master_weights_and_grads,
                Bf16::bf16_master_weights_and_grads,
                "outer steps update the f32 copies of the parameters, which this key removes",
            ),
            (
                is_on_disk(zero.offload_optimizer.device),
                OffloadOptimizer::device,
                "outer steps with optimizer state on disk are not implemented",
            ),
            (
                is_on_disk(zero.offload_param.device),
                OffloadParam::device,
                "outer steps with parameters on disk are not implemented",
            ),
        ] {
            if is_on {
                let message = format!("`{KEY}` cannot be combined with `{path}`: {why}");
                let help = "remove one of the two".to_string();
                resolver.contradiction(&[KEY, path], message, Some(help));
            }
        }
        for (path, every, what) in [
            (Training::eval_every, training.eval_every, "evaluations"),
            (Training::save_every, training.save_every, "checkpoints"),
        ] {
            if !every.is_multiple_of(local.steps) {
                let message = format!(
                    "{what} need identical replicates, which exist only after an outer step, but `{path}` {every} is not a \
                     multiple of the {} local steps",
                    local.steps
                );
                let help = format!(
                    "use a multiple of {}, such as `{}: {}`",
                    local.steps,
                    last(path),
                    every.next_multiple_of(local.steps)
                );
                resolver.contradiction(&[path, Self::steps], message, Some(help));
            }
        }
    }
}
