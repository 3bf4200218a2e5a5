//! Compares the schedules with recorded tables, and tests them far outside their range.

use super::hugging_face::{Ahead, Curve, Shape};
use super::*;

const BASE: f64 = 6e-4;

/// Compares a schedule with the rates of the first, second, … optimizer step in `table`, which was recorded from
/// DeepSpeed's own scheduler classes (commit edaa7221, August 2026). The tolerance is four units in the last place:
/// this crate takes logarithm and cosine from libm, DeepSpeed from the C library.
fn check(schedule: Schedule, table: &[f64]) {
    for (i, &expected) in table.iter().enumerate() {
        let lr = schedule.lr(BASE, i as u64 + 1);
        assert!((lr - expected).abs() <= 4.0 * f64::EPSILON * expected, "{schedule:?} step {}: {lr} {expected}", i + 1);
    }
}

#[test]
fn constant_is_the_optimizers_rate() {
    check(Schedule::Constant, &[BASE; 5]);
}

#[test]
#[rustfmt::skip]
fn warmup_lr() {
    check(Schedule::WarmupLr { min_lr: 1e-5, max_lr: BASE, num_steps: 6, kind: Warmup::Log },
        &[1e-5, 1e-5, 0.00023824315626837946, 0.00037175684373162043, 0.00046648631253675896, 0.0005399641970053169,
          0.0005999999999999998, 0.0006, 0.0006]);
    check(Schedule::WarmupLr { min_lr: 1e-5, max_lr: 1e-3, num_steps: 6, kind: Warmup::Linear },
        &[1e-5, 1e-5, 0.000175, 0.00034, 0.000505, 0.00067, 0.000835, 0.001, 0.001]);
    check(Schedule::WarmupLr { min_lr: 0.0, max_lr: 1e-3, num_steps: 1, kind: Warmup::Log },
        &[0.0, 0.0, 0.001, 0.001, 0.001]);
}

#[test]
#[rustfmt::skip]
fn warmup_decay_lr() {
    check(Schedule::WarmupDecayLr { min_lr: 1e-5, max_lr: 1e-3, num_steps: 4, kind: Warmup::Log,
        total_num_steps: 10 },
        &[1e-5, 1e-5, 0.000505, 0.0007945564378569724, 0.001, 0.001, 0.000835, 0.00067, 0.000505, 0.00034, 0.000175,
          1e-5, 1e-5]);
    check(Schedule::WarmupDecayLr { min_lr: 0.0, max_lr: 1e-3, num_steps: 4, kind: Warmup::Linear,
        total_num_steps: 10 },
        &[0.0, 0.0, 0.00025, 0.0005, 0.00075, 0.001, 0.0008333333333333334, 0.0006666666666666666, 0.0005,
          0.0003333333333333333, 0.00016666666666666666, 0.0, 0.0]);
    check(Schedule::WarmupDecayLr { min_lr: 0.0, max_lr: 1e-3, num_steps: 4, kind: Warmup::Linear,
        total_num_steps: 2 },
        &[0.0, 0.0, 0.00025, 0.0005, 0.00075, 0.0]);
}

#[test]
#[rustfmt::skip]
fn warmup_cosine_lr() {
    check(Schedule::WarmupCosineLr { total_num_steps: 10, warmup_min_ratio: 0.1, warmup_num_steps: 4,
        cos_min_ratio: 0.05, warmup_type: Warmup::Log },
        &[0.0, 5.9999999999999995e-05, 0.00033, 0.0004879398751947121, 0.0006, 0.000561817240078565,
          0.00045749999999999995, 0.00031499999999999996, 0.00017250000000000005, 6.818275992143496e-05,
          2.9999999999999997e-05, 2.9999999999999997e-05, 2.9999999999999997e-05]);
    check(Schedule::WarmupCosineLr { total_num_steps: 10, warmup_min_ratio: 0.0, warmup_num_steps: 4,
        cos_min_ratio: 1e-4, warmup_type: Warmup::Linear },
        &[0.0, 0.0, 0.00015, 0.0003, 0.00045, 0.000559811640373218, 0.0004500149999999999, 0.00030002999999999996,
          0.00015004500000000004, 4.024835962678192e-05, 6e-08, 6e-08, 6e-08]);
    check(Schedule::WarmupCosineLr { total_num_steps: 3, warmup_min_ratio: 0.0, warmup_num_steps: 3,
        cos_min_ratio: 1e-4, warmup_type: Warmup::Log },
        &[0.0, 0.0, 0.00037855785214287434, 0.0006, 6e-08, 6e-08]);
}

#[test]
#[rustfmt::skip]
fn lr_range_test() {
    let test = LrRangeTest { min_lr: 1e-5, step_size: 3, step_rate: 2.0, staircase: false };
    check(Schedule::LrRangeTest(test),
        &[1e-05, 1.6666666666666667e-05, 2.3333333333333332e-05, 3.0000000000000004e-05, 3.6666666666666666e-05,
          4.333333333333334e-05, 5e-05]);
    check(Schedule::LrRangeTest(LrRangeTest { staircase: true, ..test }),
        &[1e-05, 1e-05, 1e-05, 3.0000000000000004e-05, 3.0000000000000004e-05, 3.0000000000000004e-05, 5e-05, 5e-05]);
}

#[test]
#[rustfmt::skip]
fn one_cycle() {
    let momentum = Some(CycledMomentum { min: 0.8, max: 0.9, decay_rate: 0.01 });
    let cycle = OneCycle { min_lr: 1e-5, max_lr: 1e-3,
        halves: [Half { steps: 3, stairs: 0 }, Half { steps: 5, stairs: 0 }],
        decay_step_size: 2, decay_lr_rate: 0.5, momentum };
    check(Schedule::OneCycle(cycle),
        &[1e-05, 0.00034, 0.00067, 0.001, 0.0008020000000000001, 0.000604, 0.00040600000000000006,
          0.00020800000000000001, 1e-05, 8.000000000000001e-06, 6.6666666666666675e-06, 5.7142857142857145e-06]);
    check_betas(&cycle,
        &[0.8, 0.8666666666666667, 0.8333333333333334, 0.8, 0.8200000000000001, 0.8400000000000001, 0.86, 0.88, 0.9,
          0.9045, 0.909, 0.9135]);
    let stairs = OneCycle { halves: [Half { steps: 4, stairs: 2 }; 2], decay_step_size: 0, ..cycle };
    check(Schedule::OneCycle(stairs),
        &[1e-05, 1e-05, 0.000505, 0.000505, 0.001, 0.000505, 0.000505, 1e-05, 1e-05, 1e-05, 1e-05, 1e-05]);
    check_betas(&stairs,
        &[0.8, 0.9, 0.8500000000000001, 0.8500000000000001, 0.8, 0.8500000000000001, 0.8500000000000001, 0.9, 0.9, 0.9]);
    assert_eq!(Schedule::OneCycle(OneCycle { momentum: None, ..cycle }).rate(BASE, 3).betas, None);
}

fn check_betas(cycle: &OneCycle, table: &[f64]) {
    for (step, &beta1) in (1..).zip(table) {
        assert_eq!(Schedule::OneCycle(*cycle).rate(BASE, step).betas, Some((beta1, 0.99)), "step {step}");
    }
}

/// The expected rates were recorded from transformers 5.24.0.
#[test]
#[rustfmt::skip]
fn schedules_of_transformers() {
    let after = |warmup, shape| Schedule::HuggingFace(HuggingFace { warmup, shape });
    check(after(2, Shape::Linear { total: 6 }), &[0.0, 0.0003, 0.0006, 0.00045, 0.0003, 0.00015, 0.0, 0.0, 0.0]);
    check(after(2, Shape::Cosine { total: 6, cycles: 0.5, min: 0.0, ahead: None }),
        &[0.0, 0.0003, 0.0006, 0.0005121320343559641, 0.0003, 8.786796564403575e-05, 0.0]);
    check(after(2, Shape::Restarts { total: 8, cycles: 2 }),
        &[0.0, 0.0003, 0.0006, 0.00045, 0.00015000000000000004, 0.0006, 0.0004500000000000001,
          0.00014999999999999993, 0.0]);
    check(after(2, Shape::Polynomial { total: 6, end: 1e-5, power: 2.0 }),
        &[0.0, 0.0003, 0.0006, 0.000341875, 0.00015749999999999998, 4.6874999999999994e-05, 1e-05, 1e-05, 1e-05]);
    check(after(4, Shape::InverseSqrt { timescale: 4 }),
        &[0.0, 0.00015, 0.0003, 0.00045, 0.0006, 0.0005366563145999494, 0.0004898979485566357, 0.0004535573676110726,
          0.00042426406871192844]);
    check(after(2, Shape::Cosine { total: 6, cycles: 0.5, min: 0.1, ahead: None }),
        &[0.0, 0.0003, 0.0006, 0.0005209188309203678, 0.00033, 0.00013908116907963218, 5.9999999999999995e-05]);
    check(after(2, Shape::Cosine { total: 6, cycles: 0.5, min: 0.1, ahead: Some(Ahead::From(0.25)) }),
        &[0.00015, 0.0006, 0.0005209188309203678, 0.00033, 0.00013908116907963218, 5.9999999999999995e-05]);
    check(after(3, Shape::StableDecay { stable: 2, decay: 4, rise: Curve::Cosine, fall: Curve::OneMinusSqrt, min: 0.1,
        cycles: 0.5 }),
        &[5.9999999999999995e-05, 0.00019499999999999997, 0.0004649999999999999, 0.0006, 0.0006, 0.0006, 0.00033,
          0.00021816233815926428, 0.00013234628195640314, 5.9999999999999995e-05]);
}

#[test]
fn degenerate_schedules_are_finite() {
    let extremes = [0, 1, 2, u64::MAX];
    let shapes = |total: u64, other: u64| {
        [
            Shape::Constant,
            Shape::Linear { total },
            Shape::Cosine { total, cycles: 1.5, min: 0.1, ahead: None },
            Shape::Cosine { total, cycles: 0.5, min: 0.1, ahead: Some(Ahead::Whole) },
            Shape::Cosine { total, cycles: 0.5, min: 0.1, ahead: Some(Ahead::From(0.5)) },
            Shape::Restarts { total, cycles: other },
            Shape::Polynomial { total, end: 1e-7, power: 0.0 },
            Shape::Polynomial { total, end: 0.0, power: 3.5 },
            Shape::InverseSqrt { timescale: other },
            Shape::StableDecay {
                stable: total as i64,
                decay: other,
                rise: Curve::OneMinusSqrt,
                fall: Curve::Linear,
                min: 0.1,
                cycles: 0.5,
            },
        ]
    };
    for (warmup, total) in extremes.into_iter().flat_map(|warmup| extremes.map(|total| (warmup, total))) {
        for (other, step) in
            extremes.into_iter().flat_map(|other| [0, 1, 2, 3, 5, 1 << 40, u64::MAX].map(|s| (other, s)))
        {
            for shape in shapes(total, other) {
                let lr = Schedule::HuggingFace(HuggingFace { warmup, shape }).lr(BASE, step);
                assert!((0.0..=BASE * (1.0 + 1e-12)).contains(&lr), "{shape:?}, warm-up {warmup}, step {step}: {lr}");
            }
            let cycle = OneCycle {
                min_lr: 1e-5,
                max_lr: 1e-3,
                halves: [Half { steps: warmup, stairs: other }, Half { steps: total, stairs: other }],
                decay_step_size: other,
                decay_lr_rate: 0.5,
                momentum: Some(CycledMomentum { min: 0.8, max: 0.9, decay_rate: 0.5 }),
            };
            let Rate { lr, betas } = Schedule::OneCycle(cycle).rate(BASE, step);
            assert!((0.0..=1.0001e-3).contains(&lr), "{cycle:?}, step {step}: {lr}");
            assert!(
                betas.is_some_and(|(beta1, _)| (0.7999..1.0).contains(&beta1)),
                "{cycle:?}, step {step}: {betas:?}"
            );
            let test = LrRangeTest { min_lr: 1e-5, step_size: total, step_rate: 1.0, staircase: other == 0 };
            assert!((1e-5..1e16).contains(&Schedule::LrRangeTest(test).lr(BASE, step)), "{test:?}, step {step}");
        }
    }
}

#[test]
fn is_finite_everywhere() {
    for steps in [0, 1, u64::MAX] {
        for kind in [Warmup::Log, Warmup::Linear] {
            let decay =
                Schedule::WarmupDecayLr { min_lr: 0.0, max_lr: 1.0, num_steps: steps, kind, total_num_steps: 0 };
            let cosine = Schedule::WarmupCosineLr {
                total_num_steps: 0,
                warmup_min_ratio: 0.0,
                warmup_num_steps: steps,
                cos_min_ratio: 0.0,
                warmup_type: kind,
            };
            for step in [0, 1, 2, 3, 4, u64::MAX] {
                assert!((0.0..=1.0).contains(&decay.lr(1.0, step)) && (0.0..=1.0).contains(&cosine.lr(1.0, step)));
            }
        }
    }
}
