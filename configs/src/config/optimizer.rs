//! `optimizer`: DeepSpeed's names and defaults.

use serde::Serialize;

use crate::reader::{Reader, Resolver};

/// An optimizer with its hyperparameters. `training.weight_decay_on` selects the parameters that are decayed.
#[derive(Debug, Clone, PartialEq)]
pub enum Optimizer {
    /// Adam with decoupled weight decay (Loshchilov & Hutter 2019), or plain Adam if `adam_w_mode` is off.
    AdamW {
        /// Learning rate; a scheduler may replace it step by step.
        lr: f64,
        /// Decay of the first and second moment.
        betas: [f64; 2],
        /// Added to the square root of the second moment.
        eps: f64,
        /// Weight decay.
        weight_decay: f64,
        /// Divide the moments by 1 − βᵗ.
        bias_correction: bool,
        /// `true`: decay the weights directly (AdamW). `false`: add the decay to the gradient (L2).
        adam_w_mode: bool,
    },
    /// Stochastic gradient descent, as `torch.optim.SGD`.
    Sgd {
        /// Learning rate.
        lr: f64,
        /// Momentum; 0 keeps no state.
        momentum: f64,
        /// Dampening of the gradient that enters the momentum.
        dampening: f64,
        /// Nesterov momentum.
        nesterov: bool,
        /// L2 weight decay, added to the gradient.
        weight_decay: f64,
    },
    /// Lion: the sign of an interpolated momentum (Chen et al. 2023).
    Lion {
        /// Learning rate.
        lr: f64,
        /// Interpolation factor of the update and decay of the momentum.
        betas: [f64; 2],
        /// Decoupled weight decay.
        weight_decay: f64,
    },
    /// Adagrad: divides by the root of the sum of squared gradients (Duchi et al. 2011).
    Adagrad {
        /// Learning rate.
        lr: f64,
        /// Added to the square root of the sum.
        eps: f64,
        /// L2 weight decay, added to the gradient.
        weight_decay: f64,
    },
}

/// Serialises as `{type, params}`. Adam without decoupled decay is DeepSpeed's type `Adam` with
/// `adam_w_mode: false`.
impl Serialize for Optimizer {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde_json::json;
        let (kind, params) = match *self {
            Self::AdamW { lr, betas, eps, weight_decay, bias_correction, adam_w_mode } => (
                if adam_w_mode { "AdamW" } else { "Adam" },
                json!({ "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                        "bias_correction": bias_correction, "adam_w_mode": adam_w_mode }),
            ),
            Self::Sgd { lr, momentum, dampening, nesterov, weight_decay } => (
                "SGD",
                json!({ "lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov,
                        "weight_decay": weight_decay }),
            ),
            Self::Lion { lr, betas, weight_decay } => {
                ("Lion", json!({ "lr": lr, "betas": betas, "weight_decay": weight_decay }))
            }
            Self::Adagrad { lr, eps, weight_decay } => {
                ("Adagrad", json!({ "lr": lr, "eps": eps, "weight_decay": weight_decay }))
            }
        };
        json!({ "type": kind, "params": params }).serialize(serializer)
    }
}

impl Optimizer {
    pub(crate) fn read(resolver: &mut Resolver<'_>) -> Self {
        let (kind, mut keys) = resolver.variant("optimizer", "AdamW");
        match kind {
            "SGD" => {
                let (momentum, dampening) = (keys.float("momentum"), keys.float("dampening"));
                let sgd = Self::Sgd {
                    lr: rate(&mut keys),
                    momentum,
                    dampening,
                    nesterov: keys.bool("nesterov"),
                    weight_decay: keys.float("weight_decay"),
                };
                if matches!(sgd, Self::Sgd { nesterov: true, .. }) && (momentum == 0.0 || dampening != 0.0) {
                    let message = "Nesterov momentum needs `momentum` greater than 0 and `dampening` 0".to_string();
                    let paths = ["nesterov", "momentum", "dampening"].map(|name| format!("optimizer.params.{name}"));
                    resolver.contradiction(&paths.each_ref().map(String::as_str), message, None);
                }
                sgd
            }
            "Lion" => {
                Self::Lion { lr: rate(&mut keys), betas: keys.pair("betas"), weight_decay: keys.float("weight_decay") }
            }
            "Adagrad" => {
                Self::Adagrad { lr: rate(&mut keys), eps: keys.float("eps"), weight_decay: keys.float("weight_decay") }
            }
            _ => {
                let adam = Self::adam(&mut keys);
                if kind == "AdamW" && matches!(adam, Self::AdamW { adam_w_mode: false, .. }) {
                    let message = "type AdamW is Adam with `adam_w_mode`, which is switched off".to_string();
                    let help = Some("for L2 decay write `type: Adam`".to_string());
                    resolver.contradiction(&["optimizer.params.adam_w_mode", "optimizer.type"], message, help);
                }
                adam
            }
        }
    }

    fn adam(keys: &mut Reader<'_, '_>) -> Self {
        Self::AdamW {
            lr: rate(keys),
            betas: keys.pair("betas"),
            eps: keys.float("eps"),
            weight_decay: keys.float("weight_decay"),
            bias_correction: keys.bool("bias_correction"),
            adam_w_mode: keys.bool("adam_w_mode"),
        }
    }

    /// Returns the learning rate before any schedule.
    pub fn lr(&self) -> f64 {
        match *self {
            Self::AdamW { lr, .. } | Self::Sgd { lr, .. } | Self::Lion { lr, .. } | Self::Adagrad { lr, .. } => lr,
        }
    }
}

/// Hugging Face's Trainer replaces an `lr` of `auto` by the default of its `learning_rate`.
const TRAINER: f64 = 5e-5;

fn rate(keys: &mut Reader<'_, '_>) -> f64 {
    keys.optional_float("lr").unwrap_or(TRAINER)
}
