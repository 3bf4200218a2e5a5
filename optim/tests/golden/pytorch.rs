//! Compares the optimizers with trajectories recorded from PyTorch 2.15 (`pytorch.py` wrote `pytorch.txt`).

use zero_optim::{Adagrad, AdamW, NAdam, Optimizer, RAdam, RmsProp, RmsPropVariant, Sgd, Step, update};

fn optimizer(case: &str) -> Optimizer {
    let weight_decay = 0.1;
    match case {
        "adamw" => Optimizer::AdamW(AdamW { weight_decay, ..AdamW::default() }),
        "adam_l2" => Optimizer::AdamW(AdamW {
            betas: (0.8, 0.95),
            eps: 1e-6,
            weight_decay,
            decoupled: false,
            ..AdamW::default()
        }),
        "sgd" => Optimizer::Sgd(Sgd { weight_decay, ..Sgd::default() }),
        "sgd_momentum" => Optimizer::Sgd(Sgd { momentum: 0.9, dampening: 0.3, weight_decay, ..Sgd::default() }),
        "sgd_nesterov" => Optimizer::Sgd(Sgd { momentum: 0.9, nesterov: true, weight_decay, ..Sgd::default() }),
        "adagrad" => Optimizer::Adagrad(Adagrad { weight_decay, ..Adagrad::default() }),
        "rmsprop" => Optimizer::RmsProp(RmsProp { weight_decay, ..RmsProp::default() }),
        "rmsprop_momentum" => Optimizer::RmsProp(RmsProp {
            alpha: 0.9,
            weight_decay,
            variant: RmsPropVariant::Momentum(0.8),
            ..RmsProp::default()
        }),
        "rmsprop_centered" => {
            Optimizer::RmsProp(RmsProp { weight_decay, variant: RmsPropVariant::Centered, ..RmsProp::default() })
        }
        "nadam" => Optimizer::NAdam(NAdam { weight_decay, ..NAdam::default() }),
        "nadam_decoupled" => Optimizer::NAdam(NAdam {
            betas: (0.8, 0.95),
            momentum_decay: 0.1,
            weight_decay,
            decoupled: true,
            ..NAdam::default()
        }),
        "radam" => Optimizer::RAdam(RAdam { weight_decay, ..RAdam::default() }),
        "radam_decoupled" => {
            Optimizer::RAdam(RAdam { betas: (0.8, 0.95), weight_decay, decoupled: true, ..RAdam::default() })
        }
        other => panic!("pytorch.txt has a case {other} that this test does not know"),
    }
}

/// Returns the parameters after `steps` steps, with the start and the gradients of `pytorch.py`. Gradients are passed
/// as 64 times their value, with a scale of 1/64.
fn train(optimizer: &Optimizer, steps: u64) -> Vec<f32> {
    let mut params: Vec<f32> = (0..8).map(|i| (i as f32 - 3.0) / 4.0).collect();
    let mut states = vec![vec![0.0f32; params.len()]; optimizer.states().len()];
    for t in 1..=steps {
        let grads: Vec<f32> = (0..8).map(|i| (((7 * i + 13 * t) % 17) as f32 - 8.0) * 8.0).collect();
        let mut states: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
        let step = Step { step: t, lr: 1e-2, grad_scale: 1.0 / 64.0, grad_limit: f32::INFINITY, decay: true };
        update(optimizer, &step, &mut params, &grads, &mut states).unwrap();
    }
    params
}

#[test]
fn trajectories_match_pytorch() {
    let mut cases = 0;
    for line in include_str!("pytorch.txt").lines() {
        let mut words = line.split(' ');
        let (case, step) = (words.next().unwrap(), words.next().unwrap().parse().unwrap());
        let expected = words.map(|bits| f32::from_bits(u32::from_str_radix(bits, 16).unwrap()));
        for (ours, torchs) in train(&optimizer(case), step).into_iter().zip(expected) {
            // PyTorch rounds in different places (it divides where we multiply, and fuses less), so allow a few units
            // in the last place of parameters of order 1.
            assert!((ours - torchs).abs() <= 4.0 * f32::EPSILON, "{case}, step {step}: {ours} {torchs}");
        }
        cases += 1;
    }
    assert_eq!(cases, 13 * 6);
}
