//! `--verify K`: runs the same steps in one process at ZeRO stage 0 and compares the losses.

use std::sync::Arc;

use zero_comm::{Buffer, Communicator, Options, ReduceOp, threads};
use zero_config::{Config, Dtype, PipelineSchedule, ZeroStage};
use zero_model::Layers;

use crate::train::corpus::Corpus;
use crate::train::options::Finished;
use crate::train::output::progress::{Output, Progress};
use zero_engine::Engine;
use zero_engine::Error;
use zero_engine::checkpoint::start::Start;
use zero_engine::configured_model;

/// Largest relative difference of the losses that a different order of summation may cause. With
/// `training.reproducible`, the losses must be bit-identical.
const TOLERANCE: f64 = 1e-5;
/// The tolerance if parameters, activations and gradients are rounded to bf16, or if collectives send 8-bit or 4-bit
/// quantized values.
const TOLERANCE_BF16: f64 = 2e-2;
/// The tolerance for f16. f16 has three mantissa bits more than bf16, so its rounding errors are an eighth as large.
const TOLERANCE_F16: f64 = 2.5e-3;

pub(crate) fn verify(
    config: &Config,
    corpus: &Corpus,
    layers: Layers,
    comm: &Arc<dyn Communicator>,
    steps: u64,
    output: Output,
) -> Result<Finished, Error> {
    if config.training.local_steps.is_some() {
        let message = "`--verify` does not support local steps, because the single process that the run is compared with has no replicates";
        return Err(Error::setting("training.local_steps", message, "remove the section while verifying"));
    }
    let mut engine =
        Engine::measured_with(config.clone(), layers, comm.clone(), Start::Anew, || corpus.sampler.batch(0))?;
    let ours = losses(&mut engine, corpus, steps)?;
    drop(engine);
    let failed = if comm.rank() == 0 { i64::from(!compare(config, corpus, &ours, output)?) } else { 0 };
    let failed = comm.all_reduce(Buffer::I64(vec![failed]), ReduceOp::Max).wait()?.into_i64()?;
    if failed[0] == 0 { Ok(Finished::Done) } else { Err(Error::NotVerified { steps }) }
}

fn losses(engine: &mut Engine, corpus: &Corpus, steps: u64) -> Result<Vec<f32>, Error> {
    let mut losses = vec![];
    for step in 0..steps {
        let start = engine.samples();
        let micro_batches = corpus.sampler.distribute(step + 1, start)?;
        let rows: Vec<usize> = micro_batches.iter().map(|micro_batch| micro_batch.samples.len()).collect();
        losses.push(engine.train_micro_batches(&rows, |m| corpus.sampler.load(start, &micro_batches[m]))?.loss);
    }
    Ok(losses)
}

/// Repeats the training of all ranks on one rank, prints the losses of both runs, and returns whether they agree.
fn compare(config: &Config, corpus: &Corpus, ours: &[f32], output: Output) -> Result<bool, Error> {
    let mut alone = config.clone();
    alone.world_size = 1;
    alone.mesh.data_parallel_replicate_degree = 1;
    (alone.sequence_parallel_size, alone.mesh.context_parallel_degree) = (1, 1);
    alone.tensor_parallel.autotp_size = 1;
    alone.zero.zero_hpz_partition_size = 1;
    (alone.pipeline.stages, alone.pipeline.virtual_stages) = (1, 1);
    alone.pipeline.schedule = PipelineSchedule::OneFOneB;
    alone.gradient_accumulation_steps = config.gradient_accumulation_steps * config.data_parallel_size();
    alone.zero.stage = ZeroStage::Zero;
    // Unlike these ranks, the single process at stage 0 quantizes neither weights nor gradients.
    let sends_codes = config.zero.sends_codes();
    let layers = configured_model::from_config(config, corpus.vocabulary)?;
    let comm = threads(1, &Options::default()).remove(0);
    let mut engine = Engine::resolved(alone, layers, comm)?;
    let reference = losses(&mut engine, corpus, ours.len() as u64)?;
    let tolerance = match (config.training.reproducible, config.working_dtype()) {
        (_, Dtype::F32) if sends_codes => TOLERANCE_BF16,
        // Ranks that share sequences or layers sum partial gradients and outputs, which rounds differently.
        (true, Dtype::F32) if config.context_size() > 1 || config.tensor_size() > 1 => TOLERANCE,
        (true, Dtype::F32) => 0.0,
        (false, Dtype::F32) => TOLERANCE,
        (_, Dtype::Bf16) => TOLERANCE_BF16,
        (_, Dtype::F16) if sends_codes => TOLERANCE_BF16,
        (_, Dtype::F16) => TOLERANCE_F16,
    };
    let output = if output == Output::Auto { Output::Plain } else { output };
    let progress = Progress::new(output, 0, 0, 0);
    let mut worst = 0.0f64;
    for (step, (&a, &b)) in ours.iter().zip(&reference).enumerate() {
        let difference = (f64::from(a) - f64::from(b)).abs() / f64::from(b).abs();
        worst = if difference > worst || difference.is_nan() { difference } else { worst };
        progress.say(&format!(
            "step {:>6}  loss {a:.7}  one process at ZeRO stage 0 {b:.7}  {}",
            step + 1,
            if a.to_bits() == b.to_bits() { "same bits".to_string() } else { format!("differ by {difference:.1e}") }
        ));
    }
    let agrees = worst <= tolerance;
    progress.say(&format!(
        "{}: largest relative difference {worst:.1e}, allowed {tolerance:.0e}",
        if agrees { "verified" } else { "NOT VERIFIED" }
    ));
    Ok(agrees)
}
