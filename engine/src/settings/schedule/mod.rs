//! Converts the `scheduler` section to a schedule.

use zero_config::{self as config, Config};
use zero_optim::schedule::hugging_face::{Ahead, Shape};
use zero_optim::schedule::{CycledMomentum, Half, HuggingFace};
use zero_optim::{LrRangeTest, OneCycle, Schedule};

use crate::error::Error;

#[cfg(test)]
mod tests;

pub(super) fn schedule(config: &Config) -> Result<Schedule, Error> {
    use config::Scheduler as From;
    let total = |steps: Option<usize>| {
        let key = match config.scheduler {
            From::WarmupDecayLR(_) | From::WarmupCosineLR(_) => "scheduler.params.total_num_steps",
            _ => "scheduler.params.num_training_steps",
        };
        steps.map(|steps| steps as u64).ok_or_else(|| {
            let help = "set `training.max_steps` or this key";
            Error::setting(key, "`auto` needs to know the number of steps", help)
        })
    };
    let base_lr = config.optimizer.lr();
    let hugging_face = |warmup: usize, shape| Schedule::HuggingFace(HuggingFace { warmup: warmup as u64, shape });
    // The configuration sets exactly one of `lr` and `rate`.
    let smallest = |lr: Option<f64>, rate: Option<f64>| rate.or(lr.map(|lr| lr / base_lr)).unwrap_or(0.0);
    Ok(match config.scheduler {
        From::Constant => match config.optimizer {
            config::Optimizer::ScheduleFree(free) if free.warmup_steps > 0 => Schedule::Ramp(free.warmup_steps),
            _ => Schedule::Constant,
        },
        From::WarmupLR(warmup) => Schedule::WarmupLr {
            min_lr: warmup.warmup_min_lr,
            max_lr: warmup.warmup_max_lr,
            num_steps: warmup.warmup_num_steps as u64,
            kind: warmup.warmup_type,
        },
        From::WarmupDecayLR(decay) => Schedule::WarmupDecayLr {
            min_lr: decay.warmup_min_lr,
            max_lr: decay.warmup_max_lr,
            num_steps: decay.warmup_num_steps as u64,
            kind: decay.warmup_type,
            total_num_steps: total(decay.total_num_steps)?,
        },
        From::WarmupCosineLR(cosine) => Schedule::WarmupCosineLr {
            total_num_steps: total(cosine.total_num_steps)?,
            warmup_min_ratio: cosine.warmup_min_ratio,
            warmup_num_steps: cosine.warmup_num_steps as u64,
            cos_min_ratio: cosine.cos_min_ratio,
            warmup_type: cosine.warmup_type,
        },
        From::LRRangeTest(test) => Schedule::LrRangeTest(LrRangeTest {
            min_lr: test.lr_range_test_min_lr,
            step_size: test.lr_range_test_step_size as u64,
            step_rate: test.lr_range_test_step_rate,
            staircase: test.lr_range_test_staircase,
        }),
        From::OneCycle(cycle) => Schedule::OneCycle(one_cycle(&cycle, config.optimizer.betas().is_some())),
        From::ConstantWithWarmup(constant) => hugging_face(constant.num_warmup_steps, Shape::Constant),
        From::Linear(linear) => {
            hugging_face(linear.num_warmup_steps, Shape::Linear { total: total(linear.num_training_steps)? })
        }
        From::Cosine(cosine) => {
            let (total, cycles) = (total(cosine.num_training_steps)?, cosine.num_cycles);
            hugging_face(cosine.num_warmup_steps, Shape::Cosine { total, cycles, min: 0.0, ahead: None })
        }
        From::CosineWithMinLr(cosine) => {
            let (total, cycles) = (total(cosine.num_training_steps)?, cosine.num_cycles);
            let min = smallest(cosine.min_lr, cosine.min_lr_rate);
            hugging_face(cosine.num_warmup_steps, Shape::Cosine { total, cycles, min, ahead: None })
        }
        From::CosineWarmupWithMinLr(cosine) => {
            let (total, cycles) = (total(cosine.num_training_steps)?, cosine.num_cycles);
            let min = smallest(cosine.min_lr, cosine.min_lr_rate);
            let ahead = Some(cosine.warmup_lr_rate.map_or(Ahead::Whole, Ahead::From));
            hugging_face(cosine.num_warmup_steps, Shape::Cosine { total, cycles, min, ahead })
        }
        From::CosineWithRestarts(cosine) => {
            let (total, cycles) = (total(cosine.num_training_steps)?, cosine.num_cycles as u64);
            hugging_face(cosine.num_warmup_steps, Shape::Restarts { total, cycles })
        }
        From::Polynomial(polynomial) => {
            let (total, end, power) = (total(polynomial.num_training_steps)?, polynomial.lr_end, polynomial.power);
            hugging_face(polynomial.num_warmup_steps, Shape::Polynomial { total, end, power })
        }
        From::InverseSqrt(root) => {
            hugging_face(root.num_warmup_steps, Shape::InverseSqrt { timescale: root.timescale as u64 })
        }
        From::WarmupStableDecay(stages) => {
            let moving = (stages.num_warmup_steps + stages.num_decay_steps) as i64;
            let stable = match stages.num_stable_steps {
                Some(steps) => steps as i64,
                None => total(stages.num_training_steps)? as i64 - moving,
            };
            let shape = Shape::StableDecay {
                stable,
                decay: stages.num_decay_steps as u64,
                rise: stages.warmup_type,
                fall: stages.decay_type,
                min: stages.min_lr_ratio,
                cycles: stages.num_cycles,
            };
            hugging_face(stages.num_warmup_steps, shape)
        }
    })
}

/// Converts the section `OneCycle`. As in DeepSpeed, the cycle does not change the betas of the AdamW that Muon uses
/// for other parameters.
fn one_cycle(cycle: &config::OneCycle, has_betas: bool) -> OneCycle {
    let half = |steps, stairs| Half { steps: steps as u64, stairs: stairs as u64 };
    let momentum =
        CycledMomentum { min: cycle.cycle_min_mom, max: cycle.cycle_max_mom, decay_rate: cycle.decay_mom_rate };
    OneCycle {
        min_lr: cycle.cycle_min_lr,
        max_lr: cycle.cycle_max_lr,
        halves: [
            half(cycle.cycle_first_step_size, cycle.cycle_first_stair_count),
            half(cycle.cycle_second_step_size, cycle.cycle_second_stair_count),
        ],
        decay_step_size: cycle.decay_step_size as u64,
        decay_lr_rate: cycle.decay_lr_rate,
        momentum: (cycle.cycle_momentum && has_betas).then_some(momentum),
    }
}
