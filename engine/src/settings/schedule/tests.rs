//! Compares every schedule that a configuration can set with the schedules of DeepSpeed and transformers, at every
//! step.

use std::fmt::Write as _;

use serde_json::{Value, json};
use zero_config::Config;
use zero_optim::schedule::Rate;

use super::schedule;
use crate::python::python;

const STEPS: u64 = 80;
/// The value of `training.max_steps`. The comparison continues beyond this number of steps.
const RUN: u64 = 60;
const LR: f64 = 6e-4;

/// Prints the learning rate and the betas of each step as hexadecimal floats.
const DEEPSPEED: &str = r"
import logging, torch
from deepspeed.runtime import lr_schedules
logging.disable()
for kind, params in CASES:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    for step in range(STEPS):
        group = optimizer.param_groups[0]
        print('rate', float(group['lr']).hex(), *[float(beta).hex() for beta in group['betas']])
        optimizer.step()
        scheduler.step()
";

const TRANSFORMERS: &str = r"
import torch
from transformers import get_scheduler
for kind, params in CASES:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    warmup, steps = params.pop('num_warmup_steps', 0), params.pop('num_training_steps', RUN)
    scheduler = get_scheduler(kind, optimizer, warmup, steps, params)
    for step in range(STEPS):
        group = optimizer.param_groups[0]
        print('rate', float(group['lr']).hex(), *[float(beta).hex() for beta in group['betas']])
        optimizer.step()
        scheduler.step()
";

fn configured(kind: &str, params: &Value) -> Result<Config, zero_config::Errors> {
    let text = format!(
        "train_batch_size: 1\noptimizer: {{type: AdamW, params: {{lr: {LR}}}}}\ntraining: {{max_steps: {RUN}}}\n\
         scheduler: {{type: {kind}, params: {params}}}\n"
    );
    Config::parse("ds.yaml", text)
}

/// Returns the rate of each step. `betas` is `None` if the schedule does not change the betas.
fn rates(kind: &str, params: &Value) -> Vec<Rate> {
    let config = configured(kind, params).unwrap_or_else(|errors| panic!("{kind} {params}: {errors}"));
    let schedule = schedule(&config).unwrap();
    (1..=STEPS).map(|step| schedule.rate(config.optimizer.lr(), step)).collect()
}

fn hex(text: &str) -> f64 {
    let (sign, text) = text.strip_prefix('-').map_or((1.0, text), |text| (-1.0, text));
    let (digits, exponent) = text.strip_prefix("0x").unwrap().split_once('p').unwrap();
    let digits = digits.replacen('.', "", 1);
    let places = 4 * (digits.len() as i32 - 1);
    sign * u64::from_str_radix(&digits, 16).unwrap() as f64 * 2f64.powi(exponent.parse::<i32>().unwrap() - places)
}

fn compare(packages: &[&str], script: &str, cases: &[(&str, Value)]) {
    let mut list = String::new();
    for (kind, params) in cases {
        let params = params.to_string().replace("true", "True").replace("false", "False").replace("null", "None");
        write!(list, "('{kind}', {params}),").unwrap();
    }
    let script = format!("LR, STEPS, RUN, CASES = {LR}, {STEPS}, {RUN}, [{list}]\n{script}");
    let Some(output) = python(packages, &script) else { return };
    let mut found = output.lines().filter_map(|line| line.strip_prefix("rate ")).map(|line| {
        let mut numbers = line.split(' ').map(hex);
        let mut next = || numbers.next().unwrap();
        (next(), (next(), next()))
    });
    for (kind, params) in cases {
        for (index, rate) in rates(kind, params).into_iter().enumerate() {
            let (lr, betas) = found.next().expect("a line for each step");
            let at = || format!("{kind} {params}, step {}: {rate:?}, not {lr} {betas:?}", index + 1);
            // Logarithm, cosine and power come from libm here and from the C library in Python. If 1 + cos x is near 0,
            // an error of one unit in the last place of the cosine changes the rate by up to `EPSILON * LR`.
            assert!((rate.lr - lr).abs() <= 4.0 * f64::EPSILON * lr.abs() + f64::EPSILON * LR, "{}", at());
            assert_eq!(rate.betas.unwrap_or((0.9, 0.999)), betas, "{}", at());
        }
    }
    assert_eq!(found.next(), None);
}

#[test]
fn deepspeeds_schedules_at_every_step() {
    let mut cases = vec![
        ("LRRangeTest", json!({})),
        ("LRRangeTest", json!({"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 7})),
        (
            "LRRangeTest",
            json!({"lr_range_test_step_size": 9, "lr_range_test_step_rate": 2.5, "lr_range_test_staircase": true}),
        ),
        ("LRRangeTest", json!({"lr_range_test_step_size": 1, "lr_range_test_step_rate": 0.0})),
        ("WarmupLR", json!({"warmup_num_steps": 1})),
        ("WarmupDecayLR", json!({"total_num_steps": 5, "warmup_num_steps": 20})),
        ("WarmupDecayLR", json!({"total_num_steps": 50, "warmup_num_steps": 20, "warmup_type": "linear"})),
        ("WarmupCosineLR", json!({"total_num_steps": 60, "warmup_num_steps": 9, "warmup_min_ratio": 0.2})),
    ];
    let cycle = |with: Value| {
        let mut params = json!({"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3});
        params.as_object_mut().unwrap().extend(with.as_object().unwrap().clone());
        ("OneCycle", params)
    };
    cases.extend([
        cycle(json!({})),
        cycle(json!({"cycle_first_step_size": 10})),
        cycle(json!({"cycle_first_step_size": 7, "cycle_second_step_size": 23, "cycle_momentum": false})),
        cycle(json!({"cycle_first_step_size": 30, "cycle_second_step_size": 0})),
        cycle(json!({"cycle_first_step_size": 1, "cycle_second_step_size": 1, "cycle_min_mom": 0.0})),
        cycle(json!({"cycle_first_step_size": 12, "cycle_first_stair_count": 3})),
        cycle(json!({"cycle_first_step_size": 12, "cycle_second_step_size": 17, "cycle_first_stair_count": 5, "cycle_second_stair_count": 4})),
        cycle(json!({"cycle_first_step_size": 12, "cycle_first_stair_count": 6, "cycle_second_stair_count": 0})),
        cycle(json!({"cycle_first_step_size": 8, "cycle_first_stair_count": 50})),
        cycle(json!({"cycle_first_step_size": 8, "decay_step_size": 5, "decay_lr_rate": 0.3})),
        cycle(json!({"cycle_first_step_size": 8, "decay_step_size": 100, "decay_lr_rate": 0.5, "decay_mom_rate": 0.05, "cycle_min_mom": 0.85, "cycle_max_mom": 0.95})),
        cycle(json!({"cycle_first_step_size": 8, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1})),
        cycle(json!({"cycle_first_step_size": 5, "cycle_min_lr": 0.0, "cycle_max_lr": 0.0, "decay_step_size": 1, "decay_lr_rate": 1.0})),
    ]);
    compare(&["deepspeed", "torch"], DEEPSPEED, &cases);
}

#[test]
fn transformers_schedules_at_every_step() {
    let mut cases = vec![];
    // Pairs of warm-up steps and total steps: no warm-up, ordinary warm-ups, a warm-up that takes all steps but one,
    // and one that is longer than the schedule.
    for (warmup, total) in [(0, RUN), (10, RUN), (10, 45), (59, RUN), (30, 12), (0, 1)] {
        let with = |more: Value| {
            let mut params = json!({"num_warmup_steps": warmup, "num_training_steps": total});
            params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            params
        };
        cases.extend([
            ("linear", with(json!({}))),
            ("cosine", with(json!({}))),
            ("cosine", with(json!({"num_cycles": 1.75}))),
            ("cosine_with_restarts", with(json!({}))),
            ("cosine_with_restarts", with(json!({"num_cycles": 4}))),
            ("cosine_with_min_lr", with(json!({"min_lr": 1e-5}))),
            ("cosine_with_min_lr", with(json!({"min_lr_rate": 0.1, "num_cycles": 1.0}))),
            ("cosine_warmup_with_min_lr", with(json!({"min_lr": 1e-5}))),
            ("cosine_warmup_with_min_lr", with(json!({"min_lr_rate": 0.1, "warmup_lr_rate": 0.25}))),
            ("polynomial", with(json!({}))),
            ("polynomial", with(json!({"lr_end": 1e-5, "power": 2.5}))),
            ("polynomial", with(json!({"lr_end": 0.0, "power": 0.0}))),
        ]);
    }
    for warmup in [0, 1, 10, 70] {
        cases.push(("constant_with_warmup", json!({"num_warmup_steps": warmup})));
        cases.push(("inverse_sqrt", json!({"num_warmup_steps": warmup})));
        cases.push(("inverse_sqrt", json!({"num_warmup_steps": warmup, "timescale": 25})));
    }
    for curve in ["linear", "cosine", "1-sqrt"] {
        let stages = |more: Value| {
            let mut params = json!({"num_decay_steps": 15, "warmup_type": curve, "decay_type": curve});
            params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            ("warmup_stable_decay", params)
        };
        cases.extend([
            stages(json!({})),
            stages(json!({"num_warmup_steps": 8})),
            stages(json!({"num_warmup_steps": 8, "num_stable_steps": 20, "min_lr_ratio": 0.1})),
            stages(json!({"num_warmup_steps": 8, "num_stable_steps": 0, "num_cycles": 1.5})),
            stages(json!({"num_warmup_steps": 45, "min_lr_ratio": 0.2})),
            stages(json!({"num_warmup_steps": 5, "num_decay_steps": 0})),
        ]);
    }
    compare(&["transformers", "torch"], TRANSFORMERS, &cases);
}
