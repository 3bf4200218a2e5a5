//! Optimizers, schedules, norms, exact sums and roundings are bit-identical on every processor. The expected digests in
//! `golden.txt` were recorded on x86-64. After an intended change of results, run `UPDATE_GOLDEN=1 cargo test -p
//! zero-optim --test golden`.

mod pytorch;
mod record;

use half::{bf16, f16};
use record::Record;
use zero_optim::norm::{block_square_sums, clip_coefficient};
use zero_optim::schedule::hugging_face::{Curve, Shape};
use zero_optim::schedule::{CycledMomentum, Half, HuggingFace};
use zero_optim::{
    Adagrad, AdamW, ExactSum, Lion, NAdam, OneCycle, Optimizer, RAdam, Rate, RmsProp, RmsPropVariant, Schedule,
    ScheduleFree, Sgd, Step, Warmup, read_half, rounded, update, write_half,
};

/// Returns numbers of both signs, scaled by 21 powers of two from 2⁻¹⁰ to 2¹⁰. They are computed from integers only.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let number = |i: u64| {
        let bits = (i + 1 + (seed << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let fraction = (bits >> 40) as f32 / 8_388_608.0 - 1.0;
        fraction * f32::from_bits((117 + (bits >> 8) as u32 % 21) << 23)
    };
    (0..count as u64).map(number).collect()
}

fn bits(values: &[f32]) -> impl Iterator<Item = u32> + '_ {
    values.iter().map(|value| value.to_bits())
}

fn wide_bits(values: impl IntoIterator<Item = f64>) -> impl Iterator<Item = u32> {
    values.into_iter().map(f64::to_bits).flat_map(|bits| [bits as u32, (bits >> 32) as u32])
}

fn optimizers(record: &mut Record) {
    let weight_decay = 0.1;
    let adamw = AdamW { betas: (0.9, 0.95), weight_decay, ..AdamW::default() };
    let sgd = Sgd { momentum: 0.9, weight_decay, ..Sgd::default() };
    for (name, optimizer) in [
        ("adamw", Optimizer::AdamW(adamw)),
        ("adamw without bias correction", Optimizer::AdamW(AdamW { bias_correction: false, ..adamw })),
        ("adam with decay in the gradient", Optimizer::AdamW(AdamW { decoupled: false, ..adamw })),
        ("sgd", Optimizer::Sgd(Sgd { momentum: 0.0, ..sgd })),
        ("sgd with momentum", Optimizer::Sgd(Sgd { dampening: 0.3, ..sgd })),
        ("sgd, nesterov", Optimizer::Sgd(Sgd { nesterov: true, ..sgd })),
        ("lion", Optimizer::Lion(Lion { weight_decay, ..Lion::default() })),
        ("adagrad", Optimizer::Adagrad(Adagrad { weight_decay, ..Adagrad::default() })),
        ("rmsprop", Optimizer::RmsProp(RmsProp { weight_decay, ..RmsProp::default() })),
        (
            "rmsprop with momentum",
            Optimizer::RmsProp(RmsProp { weight_decay, variant: RmsPropVariant::Momentum(0.9), ..RmsProp::default() }),
        ),
        (
            "rmsprop, centered",
            Optimizer::RmsProp(RmsProp { weight_decay, variant: RmsPropVariant::Centered, ..RmsProp::default() }),
        ),
        ("nadam", Optimizer::NAdam(NAdam { weight_decay, ..NAdam::default() })),
        ("nadam with decoupled decay", Optimizer::NAdam(NAdam { weight_decay, decoupled: true, ..NAdam::default() })),
        ("radam", Optimizer::RAdam(RAdam { weight_decay, ..RAdam::default() })),
        (
            "schedule-free adamw",
            Optimizer::ScheduleFree(ScheduleFree { weight_decay, share: 0.3, ..ScheduleFree::default() }),
        ),
    ] {
        let mut values = vec![numbers(1, 1037)];
        values.extend(optimizer.states().iter().map(|_| vec![0.0; 1037]));
        // Early and late steps, one of them without decay.
        for (step, decay) in [(1, true), (2, true), (3, false), (1000, true), (123_456_789, true)] {
            let step = Step { step, lr: 3e-3, grad_scale: 0.3, grad_limit: f32::INFINITY, decay };
            let (params, states) = values.split_at_mut(1);
            let mut states: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
            update(&optimizer, &step, &mut params[0], &numbers(step.step, 1037), &mut states).unwrap();
        }
        assert!(values.iter().flatten().all(|value| value.is_finite()), "{name}");
        record.add(name, values.iter().flat_map(|values| bits(values)));
    }
}

fn schedules(record: &mut Record) {
    let (max_lr, min_lr, num_steps, total_num_steps) = (1e-3, 1e-5, 100, 700);
    for (name, kind) in [("linear", Warmup::Linear), ("logarithmic", Warmup::Log)] {
        for (shape, schedule) in [
            ("warm-up", Schedule::WarmupLr { min_lr, max_lr, num_steps, kind }),
            ("warm-up and decay", Schedule::WarmupDecayLr { min_lr, max_lr, num_steps, kind, total_num_steps }),
            (
                "warm-up and cosine",
                Schedule::WarmupCosineLr {
                    total_num_steps,
                    warmup_min_ratio: 0.1,
                    warmup_num_steps: num_steps,
                    cos_min_ratio: 0.05,
                    warmup_type: kind,
                },
            ),
        ] {
            record.add(format!("{name} {shape}"), wide_bits((1..=1000).map(|step| schedule.lr(6e-4, step))));
        }
    }
    let cycle = OneCycle {
        min_lr,
        max_lr,
        halves: [Half { steps: 170, stairs: 0 }, Half { steps: 330, stairs: 7 }],
        decay_step_size: 90,
        decay_lr_rate: 0.7,
        momentum: Some(CycledMomentum { min: 0.8, max: 0.9, decay_rate: 0.01 }),
    };
    let rates = (1..=1000).map(|step| Schedule::OneCycle(cycle).rate(6e-4, step));
    let beta1 = |rate: Rate| rate.betas.map_or(0.0, |(beta1, _)| beta1);
    record.add("one cycle", wide_bits(rates.flat_map(|rate| [rate.lr, beta1(rate)])));
    let total = total_num_steps;
    for (name, shape) in [
        ("cosine waves", Shape::Cosine { total, cycles: 1.7, min: 0.05, ahead: None }),
        ("cosine restarts", Shape::Restarts { total, cycles: 3 }),
        ("polynomial", Shape::Polynomial { total, end: 1e-6, power: 1.7 }),
        ("inverse root", Shape::InverseSqrt { timescale: 80 }),
        (
            "stages",
            Shape::StableDecay {
                stable: 300,
                decay: 300,
                rise: Curve::Cosine,
                fall: Curve::OneMinusSqrt,
                min: 0.05,
                cycles: 0.5,
            },
        ),
    ] {
        let schedule = Schedule::HuggingFace(HuggingFace { warmup: num_steps, shape });
        record.add(name, wide_bits((1..=1000).map(|step| schedule.lr(6e-4, step))));
    }
}

fn sums(record: &mut Record) {
    let values = numbers(7, 5 * 1024 + 77);
    record.add("squares of blocks", wide_bits(block_square_sums(&values)));
    let mut sum = ExactSum::new();
    sum.add_parameter_range(&values);
    for (i, &value) in values.iter().enumerate() {
        // The magnitudes lie between 2⁻¹⁰²¹ and 2⁹⁹⁶.
        sum.add(f64::from(value) * f64::from_bits((((i * 37) % 2000 + 12) as u64) << 52));
    }
    let limbs = sum.limbs().iter().flat_map(|&limb| [limb as u32, (limb >> 32) as u32]);
    record.add("limbs of an exact sum", limbs);
    record.add("exact sum", wide_bits([sum.to_f64()]));
    let norms = values.iter().map(|&value| f64::from(value.abs()));
    record.add("clip coefficients", wide_bits(norms.map(|norm| clip_coefficient(norm, 0.7))));
}

fn roundings(record: &mut Record) {
    let mut values = numbers(9, 1000);
    // Ties, subnormal numbers of all three types, and values too large for f16.
    values.extend((0..2000u32).map(|i| f32::from_bits(0x3f80_0000 + (i << 11))));
    values.extend((0..2000u32).map(|i| f32::from_bits(i << 15)));
    values.extend([65504.0, 65519.9, 65520.0, -1e9, f32::MAX, f32::INFINITY, -0.0]);
    let (mut narrow, mut wide) = (vec![bf16::ZERO; values.len()], vec![0.0; values.len()]);
    write_half(&values, &mut narrow).unwrap();
    assert!(narrow == rounded(&values));
    read_half(&narrow, &mut wide).unwrap();
    record.add("bf16", narrow.iter().map(|value| u32::from(value.to_bits())).chain(bits(&wide)));
    let mut narrow = vec![f16::ZERO; values.len()];
    write_half(&values, &mut narrow).unwrap();
    read_half(&narrow, &mut wide).unwrap();
    record.add("f16", narrow.iter().map(|value| u32::from(value.to_bits())).chain(bits(&wide)));
}

#[test]
fn results_match_the_golden_digests() {
    let mut record = Record::default();
    optimizers(&mut record);
    schedules(&mut record);
    sums(&mut record);
    roundings(&mut record);
    record.compare(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/golden.txt"));
}
