//! `training.param_groups`: some of the parameters get their own optimizer, or another learning rate, weight decay,
//! betas or number of bits of the states.

use serde::Serialize;

use crate::choice::{Choice as _, choice};
use crate::config::optimizer::optimizer_params::{Adam, OPTIM_BITS, check_bits};
use crate::config::{Config, Optimizer, Scheduler, Training};
use crate::read::reader::{Find, Reader, Resolver};
use crate::schema::*;
use crate::table::{item_path, last, section};

section! {
    /// A group of `training.param_groups`: the trainable parameters that match all three of `params`, `kinds` and
    /// `layers` and belong to no earlier group.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    pub struct ParameterGroup(keys) in Training::param_groups {
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

/// Returns the path of a key of the group with that index.
fn path(index: usize, key: &'static str) -> String {
    item_path(Training::param_groups, index, key)
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

    /// Checks each group, and the groups against the optimizer and the schedule.
    pub(crate) fn check(groups: &[Self], all: &Optimizer, scheduler: &Scheduler, resolver: &mut Resolver<'_>) {
        for (index, group) in groups.iter().enumerate() {
            group.check_optimizer(index, all, scheduler, resolver);
            let optimizer = group.optimizer.as_ref().unwrap_or(all);
            let at = format!("{}.{index}", Training::param_groups);
            if group.params.is_none() && group.kinds.is_none() && group.layers.is_none() {
                let message = "the group selects no parameters".to_string();
                resolver.contradiction(&[&at], message, Some("set `params`, `kinds` or `layers`".to_string()));
            }
            let changes = [group.lr, group.lr_scale, group.weight_decay, group.betas.map(|[beta1, _]| beta1)];
            let bits = optimizer.optim_bits().map_or(32, |(bits, _)| bits);
            let changes_bits = group.optim_bits.is_some_and(|own| own != bits);
            let changes_clipping = group.clipping().is_some();
            if changes.iter().all(Option::is_none) && !changes_bits && !changes_clipping && group.optimizer.is_none() {
                let message = "the group changes nothing".to_string();
                let help =
                    "set `optimizer`, `lr` or `lr_scale`, `weight_decay`, `betas`, `gradient_clipping`, `gradient_clipping_value`, or `optim_bits`".to_string();
                resolver.contradiction(&[&at], message, Some(help));
            }
            let unknown = |kind: &&String| ParameterKind::from_name(kind).is_none();
            if let Some(kind) = group.kinds.iter().flatten().find(unknown) {
                let message = format!("`{kind}` is not a kind of parameter");
                let help = format!(
                    "use one of {}, or select parameters by name with `params`",
                    ParameterKind::NAMES.join(", ")
                );
                resolver.contradiction(&[&path(index, Self::kinds)], message, Some(help));
            }
            if group.lr.is_some() && group.lr_scale.is_some() {
                let places = [path(index, Self::lr), path(index, Self::lr_scale)];
                let message = "`lr` and `lr_scale` both set the learning rate".to_string();
                resolver.contradiction(&[&places[0], &places[1]], message, Some("keep one of the two".to_string()));
            }
            let rate = match (group.lr, &group.optimizer) {
                (Some(_), _) => Some(path(index, Self::lr)),
                (None, Some(_)) => Some(path(index, Self::optimizer)),
                (None, None) => None,
            };
            if let (Some(rate), 0.0) = (&rate, all.lr()) {
                let message = "the optimizer's `lr` must not be 0: the group's `lr` is relative to it".to_string();
                let help = "set the optimizer's `lr`, and set `lr_scale: 0` in the groups that should not be trained"
                    .to_string();
                resolver.contradiction(&[rate, Config::optimizer], message, Some(help));
            }
            if let Some(rate) = &rate
                && scheduler.peak().is_some_and(|peak| peak != all.lr())
            {
                let message = "the group's `lr` is relative to the optimizer's `lr`, which must be the schedule's largest \
                               learning rate";
                let help = match (scheduler, &group.optimizer) {
                    (Scheduler::LRRangeTest(_), Some(_)) => "use another schedule, or remove the group's `optimizer`",
                    (Scheduler::LRRangeTest(_), None) => "use another schedule, or set `lr_scale`",
                    (_, Some(_)) => "set `lr` of `optimizer.params` to the schedule's largest learning rate",
                    (_, None) => "set `lr_scale`, or set the optimizer's `lr` to the schedule's largest learning rate",
                };
                let (places, help) = ([rate, Config::scheduler, Config::optimizer], help.to_string());
                resolver.contradiction(&places, message.to_string(), Some(help));
            }
            if let (Some(norm), Some(_)) = (group.gradient_clipping, group.gradient_clipping_value)
                && norm > 0.0
            {
                let places = [path(index, Self::gradient_clipping), path(index, Self::gradient_clipping_value)];
                let message =
                    "`gradient_clipping` and `gradient_clipping_value` both clip the gradient of the group".to_string();
                resolver.contradiction(&[&places[0], &places[1]], message, Some("keep one of the two".to_string()));
            }
            if let Some(bits) = group.optim_bits {
                let place = path(index, Self::optim_bits);
                check_bits(bits, &place, resolver);
                if bits == 8 && optimizer.optim_bits().is_none() {
                    let message = "the optimizer does not support 8-bit states".to_string();
                    resolver.contradiction(&[&place, Optimizer::TYPE], message, Some("use AdamW or Lion".to_string()));
                }
            }
            if group.betas.is_none() {
                continue;
            }
            let place = path(index, Self::betas);
            if optimizer.betas().is_none() && !matches!(optimizer, Optimizer::Muon(_) | Optimizer::ScheduleFree(_)) {
                let message = "the optimizer has no betas".to_string();
                resolver.contradiction(&[&place, Optimizer::TYPE], message, Some("remove `betas`".to_string()));
            }
            if let Scheduler::OneCycle(cycle) = scheduler
                && cycle.cycle_momentum
                && group.optimizer.is_none()
                && optimizer.betas().is_some()
            {
                let message = "OneCycle sets the betas of all parameters in each step".to_string();
                let help = Some("remove `betas`, or set `cycle_momentum: false`".to_string());
                resolver.contradiction(&[&place, Config::scheduler], message, help);
            }
        }
    }

    /// Checks the group's optimizer, if it has one, against the optimizer of all other parameters.
    fn check_optimizer(&self, index: usize, all: &Optimizer, scheduler: &Scheduler, resolver: &mut Resolver<'_>) {
        let Some(own) = &self.optimizer else { return };
        let prefix = format!("{}.{index}.", Training::param_groups);
        let at = |key: &str| format!("{prefix}{key}");
        own.check_params(&prefix, own.has_eight_bits(), resolver);
        if let Some(reason) = own.stands_alone() {
            let help = "use another type for the group, or make this type the `optimizer` of the whole run".to_string();
            return resolver.contradiction(
                &[&at(Optimizer::TYPE)],
                format!("{reason}, not only those of a group"),
                Some(help),
            );
        }
        if let Some(reason) = all.stands_alone() {
            let help = "remove the group's `optimizer`, or use another type for the run".to_string();
            return resolver.contradiction(
                &[&at(Config::optimizer), Optimizer::TYPE],
                format!("{reason}, so a group cannot have its own optimizer"),
                Some(help),
            );
        }
        // If a group has its own optimizer, the resolved `optimizer.params` contains all of the optimizer's keys. The
        // group's `lr`, for example, would set the same value again.
        for (is_written, key) in [
            (self.lr.is_some(), Self::lr),
            (self.weight_decay.is_some(), Self::weight_decay),
            // If the optimizer does not have this parameter, the checks of the group's keys report the error.
            (self.betas.is_some() && own.betas().is_some(), Self::betas),
            (self.optim_bits.is_some() && own.optim_bits().is_some(), Self::optim_bits),
        ] {
            if is_written {
                let (key, name) = (path(index, key), last(key));
                let message = format!("`{name}` belongs in the `params` of the group's optimizer");
                resolver.contradiction(&[&key, &at(Config::optimizer)], message, Some("set it there".to_string()));
            }
        }
        if own.has_f32_states() != all.has_f32_states() {
            let of = |optimizer: &Optimizer| match optimizer.fp32_optimizer_states() {
                Some(_) => Adam::fp32_optimizer_states,
                None => Optimizer::TYPE,
            };
            let places = [at(of(own)), of(all).to_string()];
            let help = "remove `fp32_optimizer_states: false`; `bf16.bf16_optimizer_states` keeps the states of all optimizers \
                        in bf16"
                .to_string();
            let message = "all optimizers of a run must keep their states in the same data type".to_string();
            resolver.contradiction(&[&places[0], &places[1]], message, Some(help));
        }
        if let Scheduler::OneCycle(cycle) = scheduler
            && cycle.cycle_momentum
            && all.betas().is_some()
        {
            let message = "OneCycle cycles the betas of one optimizer, but the run has several".to_string();
            let help = Some("set `cycle_momentum: false`, or remove the group's optimizer".to_string());
            resolver.contradiction(&[&at(Config::optimizer), Config::scheduler], message, help);
        }
    }
}
