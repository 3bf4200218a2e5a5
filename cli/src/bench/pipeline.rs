//! `zero-train bench pipeline`: compares measured steps of a paced pipeline with simulated ones.
//!
//! A paced layer sleeps instead of computing. Without overhead, a step would then take exactly the time of its
//! schedule, even with more ranks than cores. Any difference between measured and simulated time is therefore overhead
//! of the engine.

use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};
use zero_comm::{Options, threads};
use zero_model::sink::{self, Slot};
use zero_pipeline::simulate::{Costs, LayerCosts, SegmentCosts};
use zero_planner::Plan;
use zero_train::{Activations, Batch, Config, Engine, Layer, Layers, Pass};

use super::figures::{median, summary};

/// Time of one stage for one micro-batch in each of forward, backward of the inputs and backward of the weights.
const PACE: Duration = Duration::from_millis(20);

const SCHEDULES: [(&str, usize); 4] = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)];

struct Paced {
    weight: Tensor,
    pace: Duration,
}

impl Layer for Paced {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        Ok(x.single()?.apply_op2(&self.weight, Pace(self.pace))?.into())
    }

    fn splits(&self) -> bool {
        true
    }
}

struct Pace(Duration);

/// Waits for `pace`. A sleep ends at least 0.1 ms late, so the last part is a busy wait.
fn pause(pace: Duration) {
    const AWAKE: Duration = Duration::from_micros(300);
    let end = Instant::now() + pace;
    std::thread::sleep(pace.saturating_sub(AWAKE));
    while Instant::now() < end {
        std::thread::yield_now();
    }
}

impl CustomOp2 for Pace {
    fn name(&self) -> &'static str {
        "pace"
    }

    fn cpu_fwd(&self, x: &CpuStorage, l: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        pause(self.0);
        Ok((x.clone(), l.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, w: &Tensor, _: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let pace = self.0;
        pause(pace);
        if sink::defers(w) {
            sink::defer(w, move |gradient| {
                pause(pace);
                gradient.fill(0.0);
                Ok(())
            });
            return Ok((Some(dy.clone()), None));
        }
        pause(pace);
        let taken = sink::write(w, |slot| {
            if let Slot::First(gradient) = slot {
                gradient.fill(0.0)
            }
        });
        Ok((Some(dy.clone()), if taken { None } else { Some(w.zeros_like()?) }))
    }
}

/// Builds a model of `chunks` paced layers, one per chunk, between two activations that take no time. The loss is the
/// mean of the outputs.
fn model(chunks: usize, pace: Duration) -> Layers {
    Layers::new()
        .layer("first", |_: VarBuilder| Ok(candle_nn::Activation::Relu))
        .layers("paced", chunks, move |_, vb: VarBuilder| {
            Ok(Paced { weight: vb.get_with_hints(1, "weight", Init::Const(1.0))?, pace })
        })
        .layer("last", |_: VarBuilder| Ok(candle_nn::Activation::Relu))
        .loss(|y, _| y.mean_all())
}

fn config(stages: usize, schedule: &str, micro_batches: usize) -> std::result::Result<Config, zero_config::Errors> {
    let text = format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {micro_batches}\n\
         pipeline: {{stages: {stages}, schedule: {schedule}, partition_method: 'type:paced'}}\n"
    );
    Config::with_world_size("bench", text, stages)
}

/// Prints the simulated and measured step times of each schedule at each number of stages. Returns the exit status.
///
/// # Errors
/// Fails if a rank fails.
pub(crate) fn pipeline(stages: &[usize], micro_batches: usize, repeats: usize) -> anyhow::Result<u8> {
    println!(
        "each stage sleeps {} ms in each forward, input backward and weight backward; {micro_batches} micro-batches; medians of {repeats} steps",
        PACE.as_millis()
    );
    println!(
        "schedule          stages   simulated    measured (spread)                  difference   bubble simulated, measured"
    );
    for &stages in stages {
        for (schedule, chunks) in SCHEDULES {
            let pace = PACE / chunks as u32;
            let config = config(stages, schedule, micro_batches)?;
            let seconds = simulated(&config, stages * chunks, pace)?;
            let times = measured(&config, stages * chunks, pace, repeats)?;
            let found = median(&times).as_secs_f64();
            let work = (3 * micro_batches) as f64 * PACE.as_secs_f64();
            println!(
                "{schedule:<16} {stages:>7} {:>8.1} ms {}   {:>+8.2} %   {:>6.2} %, {:.2} %",
                seconds * 1e3,
                summary(&times),
                (found / seconds - 1.0) * 100.0,
                (1.0 - work / seconds) * 100.0,
                (1.0 - work / found) * 100.0,
            );
        }
    }
    Ok(0)
}

fn simulated(config: &Config, chunks: usize, pace: Duration) -> anyhow::Result<f64> {
    let pace = pace.as_secs_f64();
    let paced = LayerCosts {
        forward: pace,
        backward: 2.0 * pace,
        backward_input: pace,
        backward_weight: pace,
        ..LayerCosts::default()
    };
    let layers = std::iter::once(LayerCosts::default())
        .chain(std::iter::repeat_n(paced, chunks))
        .chain([LayerCosts::default()])
        .collect();
    let segments = vec![SegmentCosts::default(); chunks];
    let costs = Costs::of_compute(layers, segments);
    Ok(Plan::new(config.clone(), model(chunks, Duration::ZERO))?.simulate(&costs)?.makespan())
}

fn measured(config: &Config, chunks: usize, pace: Duration, repeats: usize) -> anyhow::Result<Vec<Duration>> {
    let times: Vec<anyhow::Result<Vec<Duration>>> = std::thread::scope(|scope| {
        let ranks = threads(config.world_size, &Options::default());
        let run = |comm| -> anyhow::Result<Vec<Duration>> {
            let mut engine = Engine::with_communicator(config.clone(), model(chunks, pace), comm)?;
            let samples = engine.config().train_batch_size;
            let x = Tensor::ones((samples, 4), candle_core::DType::F32, &candle_core::Device::Cpu)?;
            let batch = Batch::new(x.clone(), x);
            (0..=repeats).map(|_| Ok(engine.train_batch(&batch)?.duration)).collect()
        };
        let started: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
        let panicked = |_| Err(anyhow::anyhow!("internal error: a rank panicked"));
        started.into_iter().map(|rank| rank.join().unwrap_or_else(panicked)).collect()
    });
    // All ranks end a step together, when they exchange the loss, so the times of one rank suffice. The first step does
    // not count, because it opens connections.
    let times = times.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    Ok(times[0][1..].to_vec())
}
