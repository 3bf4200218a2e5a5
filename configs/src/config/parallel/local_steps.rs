//! `training.local_steps`: replicates take optimizer steps on their own between outer steps (DiLoCo).

use serde::Serialize;

use crate::schema::*;
use crate::table::section;

section! {
    /// `training.local_steps`.
    #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
    pub struct LocalSteps(keys) in "training.local_steps" {
        pub steps: usize = key(COUNT, REQUIRED, "Optimizer steps that each replicate takes independently between outer steps");
        pub outer_lr: f64 = key(POSITIVE, "0.7", "Learning rate of the outer optimizer, SGD with Nesterov momentum");
        pub outer_momentum: f64 = key(Kind::Float(FRACTION), "0.9", "Momentum of the outer optimizer, as in torch.optim.SGD(nesterov=True); 0: plain SGD, without momentum state");
    }
}
