//! The lines that a run prints when it starts.

use std::path::Path;

use zero_config::{LocalSteps, LogLevel, Origin, RampUp};

use super::progress::Progress;
use super::{autos, disk};
use crate::train::corpus::Corpus;
use crate::train::report;
use zero_engine::Engine;
use zero_engine::format::{bytes, counted, grouped, of_number};
use zero_engine::parameter_groups;
use zero_planner::memory;

/// Prints the model, the data, the ranks and the other properties of the run on rank 0.
pub(crate) fn say(engine: &Engine, corpus: &Corpus, progress: &Progress, steps: u64, resumed: Option<&Path>) {
    let config = engine.config();
    let comm = engine.communicator();
    let trainable = engine.model().trainable_elements();
    progress.say(&format!(
        "model: {}, {} parameters{}   data: {} training {}{}",
        counted(engine.model().layers().len(), "layer", "layers"),
        grouped(engine.model().elements() as u64),
        if trainable == engine.model().elements() {
            String::new()
        } else {
            format!(" ({} trainable)", grouped(trainable as u64))
        },
        grouped(corpus.sampler.data.len() as u64),
        of_number(corpus.sampler.data.len(), "sample", "samples"),
        corpus.eval.as_ref().map_or(String::new(), |eval| format!(", {} for evaluation", grouped(eval.len() as u64)))
    ));
    let groups = parameter_groups::described(config, engine.model()).unwrap_or_default();
    groups.iter().for_each(|line| progress.say(line));
    corpus.notes.iter().for_each(|line| progress.say(line));
    let state = report::expected(engine).total();
    progress.say(&format!(
        "world: {} × {} over {}, ZeRO stage {}{}{}{}, communication {} with compute, {} of state on rank 0",
        counted(comm.size(), "rank", "ranks"),
        counted(zero_model::ops::threads(), "thread", "threads"),
        comm.transport(),
        engine.settings().layout.zero_stage.number(),
        match config.mesh.data_parallel_replicate_degree {
            1 => String::new(),
            groups => {
                format!(" in {groups} shard groups of {}", counted(config.shard_group_size(), "rank", "ranks"))
            }
        },
        match config.context_size() {
            1 => String::new(),
            size => format!(", {size} ranks share each sequence"),
        } + &match config.tensor_size() {
            1 => String::new(),
            size => format!(", {size} ranks split each layer"),
        },
        match config.secondary_group_size() {
            None => String::new(),
            Some(near) => format!(" with secondary shards in groups of {}", counted(near, "rank", "ranks")),
        },
        if engine.settings().passes.gather.overlap { "overlapped" } else { "not overlapped" },
        bytes(state),
    ));
    if let Some(choice) = engine.choice() {
        progress.say(&choice.to_string());
    }
    if config.pipeline.stages > 1 {
        progress.say(&engine.stage_plan().describe(engine.zero().layout().shape()));
    }
    if let Some(peaks) = memory::planned(engine) {
        let limit = config.training.memory_limit.map_or(String::new(), |limit| format!(", limit {}", bytes(limit)));
        let gpu = match engine.settings().zero.on_gpu.layers {
            true => format!("{} on the GPU and ", bytes(peaks.gpu)),
            false => String::new(),
        };
        progress.say(&format!("memory: planned peak {gpu}{} on rank 0{limit}", bytes(peaks.total)));
    }
    engine.between_gpus().iter().for_each(|line| progress.say(line));
    disk::describe(engine).iter().for_each(|line| progress.say(line));
    let each_rank = config.pipeline.stages == 1 && config.context_size() == 1 && config.tensor_size() == 1;
    let (replica, replicas) = if each_rank { ("rank", "ranks") } else { ("replica", "replicas") };
    progress.say(&format!(
        "batch: {} = {} per micro-batch × {} × {}   steps: {steps}",
        counted(config.train_batch_size, "sample", "samples"),
        config.train_micro_batch_size_per_gpu,
        counted(config.gradient_accumulation_steps, "micro-batch", "micro-batches"),
        counted(engine.replicas(), replica, replicas),
    ));
    if let Some(LocalSteps { steps, outer_lr, outer_momentum }) = config.training.local_steps {
        progress.say(&format!(
            "local steps: each replicate trains independently for {} between outer steps; outer SGD with lr {outer_lr}, momentum {outer_momentum}; printed losses are from rank 0's replicate",
            counted(steps, "step", "steps"),
        ));
    }
    if let Some(RampUp { start, increment, samples }) = config.training.rampup_batch_size {
        let grouped = counted(samples as usize, "sample", "samples");
        progress
            .say(&format!("batch size: starts at {start} and grows by {increment} at a time over the first {grouped}"));
    }
    autos::said(config).iter().for_each(|lines| progress.say(lines));
    if config.dump_state || config.log_level >= LogLevel::Debug {
        progress.say(&format!("step program:\n{}", engine.program()));
    }
    if let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained())
        && resumed.is_none()
    {
        let taken = config.origins.get("data.tokenizer") == Origin::Pretrained;
        progress
            .say(&format!("pretrained: {}{folder}", if taken { "weights and tokenizer of " } else { "weights of " }));
    }
    if let Some(folder) = config.adapter.as_ref().and_then(|adapter| adapter.pretrained.as_ref())
        && resumed.is_none()
    {
        progress.say(&format!("pretrained: adapter of {folder}"));
    }
    if let Some(from) = resumed {
        progress.say(&format!("resumed from {} after step {}", from.display(), engine.steps()));
    }
}
