//! `optimizer`: DeepSpeed's names and defaults.

pub(crate) mod optimizer_params;
pub(super) mod parameter_groups;

use serde::Serialize;

use crate::config::optimizer::optimizer_params::{
    AdafactorParams, AdagradParams, AdamParams, CustomParams, LambParams, LionParams, MIN_8BIT_SIZE, MuAdamParams,
    MuonParams, NAdamParams, RAdamParams, RmsPropParams, ScheduleFreeParams, SgdParams, check_bits,
};
use crate::path::path;
use crate::read::reader::{Find, Read, Reader, Resolver};
use crate::schema::*;
use crate::value::Leaf;

/// An optimizer with its hyperparameters. `training.weight_decay_on` selects the parameters with weight decay.
#[derive(Debug, Clone, PartialEq)]
pub enum Optimizer {
    /// Adam with decoupled weight decay (Loshchilov & Hutter 2019), or plain Adam if `adam_w_mode` is off.
    AdamW(AdamParams),
    /// Stochastic gradient descent, as `torch.optim.SGD`.
    Sgd(SgdParams),
    /// Lion: the sign of an interpolated momentum (Chen et al. 2023).
    Lion(LionParams),
    /// Adagrad: divides by the root of the sum of squared gradients (Duchi et al. 2011).
    Adagrad(AdagradParams),
    /// RMSprop: divides by the root of the mean of squared gradients, as `torch.optim.RMSprop`.
    RmsProp(RmsPropParams),
    /// NAdam: Adam with Nesterov's look-ahead (Dozat 2016), as `torch.optim.NAdam`.
    NAdam(NAdamParams),
    /// RAdam: Adam that rectifies the variance of its adaptive learning rate (Liu et al. 2020), as `torch.optim.RAdam`.
    RAdam(RAdamParams),
    /// Muon: orthogonalized momentum for matrices, AdamW for the rest (Jordan et al. 2024).
    Muon(MuonParams),
    /// LAMB: Adam whose step on each parameter is scaled by a ratio of norms (You et al. 2020), as DeepSpeed's kernel.
    Lamb(LambParams),
    /// Schedule-free AdamW, as `schedulefree.AdamWScheduleFree` (Defazio et al. 2024).
    ScheduleFree(ScheduleFreeParams),
    /// Adafactor: second moments stored per row and per column (Shazeer & Stern 2018), as `torch.optim.Adafactor`.
    Adafactor(AdafactorParams),
    /// An optimizer of the program that reads the configuration.
    Custom(CustomParams),
    /// Adam with L2 decay whose learning rates fall with the width of the model, as `mup.MuAdam` (Yang et al. 2022).
    MuAdam(MuAdamParams),
    /// MuAdam with decoupled weight decay, as `mup.MuAdamW`.
    MuAdamW(MuAdamParams),
    /// Stochastic gradient descent whose learning rates follow the width of the model, as `mup.MuSGD`.
    MuSgd(SgdParams),
}

/// Evaluates an expression of the parameters of any optimizer.
macro_rules! of_params {
    ($optimizer:expr, $params:ident => $value:expr) => {
        of_params! {
            $optimizer, $params => $value, for AdamW Sgd Lion Adagrad RmsProp NAdam RAdam Muon Lamb ScheduleFree
            Adafactor Custom MuAdam MuAdamW MuSgd
        }
    };
    ($optimizer:expr, $params:ident => $value:expr, for $($variant:ident)+) => {
        match $optimizer { $( Optimizer::$variant($params) => $value, )+ }
    };
}

const SECTION: &str = "optimizer";
const ONE_BIT: &str = "use AdamW: DeepSpeed has removed its optimizers with compressed momentum";

impl Optimizer {
    pub(crate) const TYPE: &'static str = path!(SECTION, TYPE);

    #[rustfmt::skip]
    pub(crate) const VARIANTS: Variants = Variants {
        params: Some(PARAMS),
        shared: &[rejected("legacy_fusion", "false", "the key selects an old code path for fp16")],
        list: &[
            variant(ADAMW, "Adam with decoupled weight decay", AdamParams::SECTION.keys),
            variant("Adam", "AdamW, unless `adam_w_mode` is false", AdamParams::SECTION.keys),
            variant("SGD", "Stochastic gradient descent with momentum", SgdParams::SECTION.keys),
            variant("Lion", "Sign of an interpolated momentum", LionParams::SECTION.keys),
            variant("Adagrad", "Sum of squared gradients", AdagradParams::SECTION.keys),
            variant("RMSprop", "Mean of squared gradients", RmsPropParams::SECTION.keys),
            variant("NAdam", "Adam with Nesterov's look-ahead", NAdamParams::SECTION.keys),
            variant("RAdam", "Adam with a correction of the second moment's variance", RAdamParams::SECTION.keys),
            variant(SCHEDULE_FREE, "AdamW with an average of the iterates instead of a schedule", ScheduleFreeParams::SECTION.keys),
            variant("Muon", "Orthogonalized momentum for matrices, AdamW for the rest", MuonParams::SECTION.keys),
            variant("Lamb", "Adam with a trust ratio for each parameter", LambParams::SECTION.keys),
            variant("Adafactor", "Second moments factored into one value per row and column", AdafactorParams::SECTION.keys),
            variant("Custom", "An optimizer that your program provides with `Trainer::optimizer`", CustomParams::SECTION.keys),
            variant("MuAdam", "Adam with L2 regularization in the maximal update parametrization; requires the `mup` section", MuAdamParams::SECTION.keys),
            variant("MuAdamW", "AdamW in the maximal update parametrization; requires the `mup` section", MuAdamParams::SECTION.keys),
            variant("MuSGD", "SGD in the maximal update parametrization; requires the `mup` section", SgdParams::SECTION.keys),
            Variant { status: Status::Removed, ..variant("OneBitAdam", ONE_BIT, &[]) },
            Variant { status: Status::Removed, ..variant("ZeroOneAdam", ONE_BIT, &[]) },
            Variant { status: Status::Removed, ..variant("OneBitLamb", ONE_BIT, &[]) },
        ],
    };

    /// Checks the parameters against each other and against the `type` in the user's configuration. The paths of the
    /// keys begin with `prefix`. `has_eight_bits` is whether some of the optimizer's states have 8 bits.
    pub(crate) fn check_params(&self, prefix: &str, has_eight_bits: bool, resolver: &mut Resolver<'_>) {
        let at = |key: &str| format!("{prefix}{key}");
        let is_adamw = match resolver.fields.values.get(&at(Self::TYPE)).map(|field| &field.leaf) {
            Some(Leaf::Text(kind)) => kind == ADAMW,
            _ => true,
        };
        if let Some((bits, _)) = self.optim_bits() {
            check_bits(bits, &at(AdamParams::optim_bits), resolver);
        }
        let mut fail = |keys: &[&str], message: &str, help: Option<&str>| {
            let paths: Vec<String> = keys.iter().map(|key| at(key)).collect();
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            resolver.contradiction(&paths, message.to_string(), help.map(String::from));
        };
        if self.optim_bits().is_some_and(|(_, smallest)| smallest != MIN_8BIT_SIZE) && !has_eight_bits {
            let help = Some("set `optim_bits: 8`, or remove `min_8bit_size`");
            fail(
                &[AdamParams::min_8bit_size, AdamParams::optim_bits],
                "`min_8bit_size` has no effect: all states have 32 bits",
                help,
            );
        }
        match self {
            Self::Sgd(sgd) | Self::MuSgd(sgd) if sgd.nesterov && (sgd.momentum == 0.0 || sgd.dampening != 0.0) => {
                let message = "Nesterov momentum needs `momentum` greater than 0 and `dampening` 0";
                fail(&[SgdParams::nesterov, SgdParams::momentum, SgdParams::dampening], message, None);
            }
            Self::AdamW(adam) if !adam.adam_w_mode && is_adamw => {
                let message = "`type: AdamW` means Adam with `adam_w_mode: true`, not `false`";
                fail(&[AdamParams::adam_w_mode, Self::TYPE], message, Some("for L2 regularization use `type: Adam`"));
            }
            Self::RmsProp(rmsprop) if rmsprop.centered && rmsprop.momentum > 0.0 => {
                let message = "`centered` together with `momentum` needs a third state, which is not implemented";
                fail(&[RmsPropParams::centered, RmsPropParams::momentum], message, Some("remove one of the two"));
            }
            Self::Lamb(lamb) if lamb.min_coeff > lamb.max_coeff => {
                fail(
                    &[LambParams::min_coeff, LambParams::max_coeff],
                    "the smallest trust ratio, `min_coeff`, is larger than the largest, `max_coeff`",
                    None,
                );
            }
            _ => {}
        }
    }

    /// Returns its `type`. Adam without decoupled decay is DeepSpeed's type `Adam`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AdamW(AdamParams { adam_w_mode: false, .. }) => "Adam",
            Self::AdamW(_) => ADAMW,
            Self::Sgd(_) => "SGD",
            Self::Lion(_) => "Lion",
            Self::Adagrad(_) => "Adagrad",
            Self::RmsProp(_) => "RMSprop",
            Self::NAdam(_) => "NAdam",
            Self::RAdam(_) => "RAdam",
            Self::ScheduleFree(_) => SCHEDULE_FREE,
            Self::Muon(_) => "Muon",
            Self::Lamb(_) => "Lamb",
            Self::Adafactor(_) => "Adafactor",
            Self::Custom(_) => "Custom",
            Self::MuAdam(_) => "MuAdam",
            Self::MuAdamW(_) => "MuAdamW",
            Self::MuSgd(_) => "MuSGD",
        }
    }

    /// Returns whether `fp32_optimizer_states` keeps the states in f32; true for an optimizer without this parameter.
    pub fn has_f32_states(&self) -> bool {
        self.fp32_optimizer_states().unwrap_or(true)
    }

    /// Returns the value of `fp32_optimizer_states`, if the optimizer has this parameter.
    pub(crate) fn fp32_optimizer_states(&self) -> Option<bool> {
        match self {
            Self::AdamW(AdamParams { fp32_optimizer_states, .. })
            | Self::Adagrad(AdagradParams { fp32_optimizer_states, .. }) => Some(*fp32_optimizer_states),
            _ => None,
        }
    }

    /// Returns the optimizer's name if it updates whole parameters (in f32, in host memory); otherwise `None`.
    pub fn of_whole_parameters(&self) -> Option<&'static str> {
        match self {
            Self::Muon(_) => Some("Muon"),
            Self::Lamb(_) => Some("LAMB"),
            Self::Adafactor(_) => Some("Adafactor"),
            _ => None,
        }
    }

    /// Returns the reason why a run with this optimizer cannot have a second one; `None` if it can.
    pub(crate) fn stands_alone(&self) -> Option<&'static str> {
        match self {
            Self::ScheduleFree(_) => Some("AdamWScheduleFree averages the weights of all parameters"),
            Self::Custom(_) => Some("a custom optimizer updates all parameters"),
            Self::MuAdam(_) | Self::MuAdamW(_) | Self::MuSgd(_) => Some("µP sets the learning rates of all parameters"),
            _ => None,
        }
    }

    /// Returns whether learning rates follow the widths of a base model.
    pub fn is_mu(&self) -> bool {
        matches!(self, Self::MuAdam(_) | Self::MuAdamW(_) | Self::MuSgd(_))
    }

    /// Returns the bits per value of the states, and the minimum number of elements of a parameter with 8-bit states.
    /// `None` if the optimizer does not support 8-bit states.
    pub fn optim_bits(&self) -> Option<(usize, usize)> {
        match self {
            Self::AdamW(AdamParams { optim_bits, min_8bit_size, .. })
            | Self::Lion(LionParams { optim_bits, min_8bit_size, .. }) => Some((*optim_bits, *min_8bit_size)),
            _ => None,
        }
    }

    /// Returns whether the optimizer's `optim_bits` is 8.
    pub(crate) fn has_eight_bits(&self) -> bool {
        self.optim_bits().is_some_and(|(bits, _)| bits == 8)
    }

    /// Returns the betas that a schedule may change, if the optimizer has any. DeepSpeed's schedules do not change the
    /// betas of Muon's AdamW. The average of a schedule-free optimizer needs a constant β₁.
    pub fn betas(&self) -> Option<[f64; 2]> {
        match self {
            Self::AdamW(AdamParams { betas, .. })
            | Self::Lion(LionParams { betas, .. })
            | Self::NAdam(NAdamParams { betas, .. })
            | Self::RAdam(RAdamParams { betas, .. })
            | Self::MuAdam(MuAdamParams { betas, .. })
            | Self::MuAdamW(MuAdamParams { betas, .. })
            | Self::Lamb(LambParams { betas, .. }) => Some(*betas),
            Self::Sgd(_)
            | Self::MuSgd(_)
            | Self::Adagrad(_)
            | Self::RmsProp(_)
            | Self::Muon(_)
            | Self::Adafactor(_)
            | Self::Custom(_)
            | Self::ScheduleFree(_) => None,
        }
    }

    /// Returns the weight decay.
    pub fn weight_decay(&self) -> f64 {
        of_params!(self, params => params.weight_decay)
    }

    /// Returns the learning rate before any schedule.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Muon(muon) => muon.muon_lr.unwrap_or(muon.lr),
            _ => of_params!(self, params => params.lr),
        }
    }
}

pub(crate) const ADAMW: &str = "AdamW";
const SCHEDULE_FREE: &str = "AdamWScheduleFree";

impl Find for Optimizer {
    fn find(keys: &mut Reader<'_, '_>, name: &'static str) -> Option<Self> {
        keys.inner(name).is_some().then(|| Self::read(keys, name))
    }
}

impl Read for Optimizer {
    fn read(keys: &mut Reader<'_, '_>, name: &'static str) -> Self {
        let (kind, mut keys) = keys.variant(name, ADAMW);
        match kind {
            "SGD" => Self::Sgd(SgdParams::of(&mut keys)),
            "Lion" => Self::Lion(LionParams::of(&mut keys)),
            "Adagrad" => Self::Adagrad(AdagradParams::of(&mut keys)),
            "RMSprop" => Self::RmsProp(RmsPropParams::of(&mut keys)),
            "NAdam" => Self::NAdam(NAdamParams::of(&mut keys)),
            "RAdam" => Self::RAdam(RAdamParams::of(&mut keys)),
            SCHEDULE_FREE => Self::ScheduleFree(ScheduleFreeParams::of(&mut keys)),
            "Muon" => Self::Muon(MuonParams::of(&mut keys)),
            "Lamb" => Self::Lamb(LambParams::of(&mut keys)),
            "Adafactor" => Self::Adafactor(AdafactorParams::of(&mut keys)),
            "Custom" => Self::Custom(CustomParams::of(&mut keys)),
            "MuAdam" => Self::MuAdam(MuAdamParams::of(&mut keys)),
            "MuAdamW" => Self::MuAdamW(MuAdamParams::of(&mut keys)),
            "MuSGD" => Self::MuSgd(SgdParams::of(&mut keys)),
            _ => Self::AdamW(AdamParams::of(&mut keys)),
        }
    }
}

/// Serialises as `{type, params}`. Adam without decoupled decay is DeepSpeed's type `Adam` with
/// `adam_w_mode: false`.
impl Serialize for Optimizer {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde_json::json;
        let params = of_params!(self, params => json!(params));
        json!({ TYPE: self.name(), PARAMS: params }).serialize(serializer)
    }
}
