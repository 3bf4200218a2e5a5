//! `training.param_groups`: some of the parameters get their own optimizer, or another learning rate, weight decay,
//! betas or number of bits of the states.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::Optimizer;
use crate::config::optimizer::optimizer_params::OPTIM_BITS;
use crate::read::reader::{Find, Reader};
use crate::schema::*;
use crate::table::section;

section! {
    /// A group of `training.param_groups`: the trainable parameters that match all three of `params`, `kinds` and
    /// `layers` and belong to no earlier group.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct ParameterGroup(keys) in "training.param_groups" {
        pub params: Option<Vec<String>> = key(Kind::Names, "= all", "Glob over parameter names, such as `*.attn.*`, or a list of globs; each must match a parameter");
        pub kinds: Option<Vec<String>> = key(Kind::Names, "= all", "Kind of parameter, or a list of kinds: norm (weight and bias of a normalization), bias (all biases), embedding, head (parameters of the last layer)");
        pub layers: Option<Vec<usize>> = key(Kind::Ints { min: 0, max: u32::MAX as u64 }, "= all", "Numbers of the blocks, from 0. Blocks are the layers whose names end with a number, or all layers if no name does");
        pub optimizer: Option<Optimizer> = key(Kind::Variants(&Optimizer::VARIANTS), "null", "`type` and `params` of an optimizer for this group only, with the keys of the `optimizer` section");
        pub lr: Option<f64> = key(NON_NEGATIVE, "null", "Learning rate in place of the optimizer's `lr`; the schedule scales both alike");
        pub lr_scale: Option<f64> = key(NON_NEGATIVE, "null", "Factor on the optimizer's learning rate, instead of `lr`");
        pub weight_decay: Option<f64> = key(NON_NEGATIVE, "null", "Weight decay of all parameters of the group, whatever `training.weight_decay_on` says");
        pub betas: Option<[f64; 2]> = key(Kind::Pair(FRACTION), "null", "Decay rates of the first and second moments in place of the optimizer's");
        pub gradient_clipping: Option<f64> = key(NON_NEGATIVE, "null", "Clip the L2 norm of the group's gradient to this value, and exclude the group from the run's clipping; 0: do not clip the group");
        pub gradient_clipping_value: Option<f64> = key(POSITIVE, "null", "Clip each element of the group's gradient to this absolute value, instead of clipping its norm with `gradient_clipping`");
        pub optim_bits: Option<usize> = key(OPTIM_BITS, "null", "Bits per value of the optimizer state, 8 or 32, in place of the optimizer's `optim_bits`");
    }
}

choice! {
    /// A kind of parameters.
    pub enum ParameterKind {
        /// Weight and bias of a normalization.
        Norm = "norm",
        /// Biases.
        Bias = "bias",
        /// Embeddings.
        Embedding = "embedding",
        /// Parameters of the last layer.
        Head = "head",
    }
}

impl Find for Vec<ParameterGroup> {
    fn find(keys: &mut Reader<'_, '_>, name: &'static str) -> Option<Self> {
        keys.list(name, ParameterGroup::of)
    }
}

impl ParameterGroup {
    /// Returns the kinds of parameters that the group selects; `None` for all.
    pub fn selected_kinds(&self) -> Option<Vec<ParameterKind>> {
        let kinds = |names: &Vec<String>| names.iter().filter_map(|name| ParameterKind::from_name(name)).collect();
        self.kinds.as_ref().map(kinds)
    }

    /// Returns the limits on the norm and on the values of the group's gradient, 0 for no limit. `None` if the group is
    /// clipped together with all other parameters.
    pub fn clipping(&self) -> Option<(f64, f64)> {
        let (norm, value) = (self.gradient_clipping, self.gradient_clipping_value);
        (norm.is_some() || value.is_some()).then(|| (norm.unwrap_or(0.0), value.unwrap_or(0.0)))
    }
}
