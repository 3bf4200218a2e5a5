//! Checks `optimizer`, `training.param_groups` and `scheduler` against each other and the run.

use crate::choice::Choice as _;
use crate::config::optimizer::optimizer_params::check_bits;
use crate::config::{
    AdamParams, Config, LinearDecay, MuonParams, OneCycle, Optimizer, ParameterGroup, ParameterKind,
    ScheduleFreeParams, Scheduler, Training, WarmupLr,
};
use crate::path::{item_path, last};
use crate::read::node::At;
use crate::read::reader::Resolver;

impl Optimizer {
    /// Checks this optimizer as the run's main optimizer, which updates all parameters that have no optimizer of their
    /// own.
    pub(crate) fn check(&self, config: &Config, resolver: &mut Resolver<'_>) {
        let mut without_own = config.training.param_groups.iter().flatten().filter(|group| group.optimizer.is_none());
        let has_eight_bits = self.has_eight_bits() || without_own.any(|group| group.optim_bits == Some(8));
        self.check_params("", has_eight_bits, resolver);
        match self {
            Self::Muon(muon) if self.lr() == 0.0 && muon.lr_of_others() != 0.0 => {
                let message =
                    "the learning rate of the matrices must not be 0: the learning rate of the other parameters is \
                     relative to it"
                        .to_string();
                let help = Some("use AdamW, and freeze the matrices with `training.frozen`".to_string());
                resolver.contradiction(&[MuonParams::muon_lr, MuonParams::adam_lr], message, help);
            }
            Self::ScheduleFree(free) if free.warmup_steps > 0 && config.scheduler != Scheduler::Constant => {
                let message = "`warmup_steps` and `scheduler` both set the learning rate of a step".to_string();
                let help = Some("keep one of the two; AdamWScheduleFree needs no decay".to_string());
                resolver.contradiction(&[ScheduleFreeParams::warmup_steps, Config::scheduler], message, help);
            }
            Self::ScheduleFree(_) if config.training.ema.is_some() => {
                let message =
                    "AdamWScheduleFree already keeps an average of the weights, which is evaluated and exported"
                        .to_string();
                let help = Some("remove `training.ema`".to_string());
                resolver.contradiction(&[Training::ema, Self::TYPE], message, help);
            }
            _ => {}
        }
    }
}

/// Returns the path of a key of the group with that index.
fn path(index: usize, key: &'static str) -> String {
    item_path(Training::param_groups, index, key)
}

impl ParameterGroup {
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
                Some(_) => AdamParams::fp32_optimizer_states,
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

impl Scheduler {
    /// Checks the parameters against each other, the optimizer and the run. Warns if the warm-up is longer than the
    /// run, for example because of DeepSpeed's default of 1000 steps. `max_steps` is `None` in a run whose length is
    /// given in epochs.
    pub(crate) fn check(&self, optimizer: &Optimizer, max_steps: Option<usize>, resolver: &mut Resolver<'_>) {
        let total = self.clone().total_steps_mut().map_or(max_steps, |total| *total);
        if let (Some(total), Some(warmup)) = (total, self.warmup())
            && total < warmup
        {
            let message = format!("the warm-up of {warmup} steps is longer than the schedule of {total}");
            let key = match self {
                Self::WarmupLR(_) | Self::WarmupDecayLR(_) | Self::WarmupCosineLR(_) => WarmupLr::warmup_num_steps,
                _ => LinearDecay::num_warmup_steps,
            };
            resolver.warn(key, message);
        }
        match self {
            Self::OneCycle(cycle) => cycle.check(optimizer, max_steps, resolver),
            _ => self.check_transformers(optimizer.lr(), max_steps, resolver),
        }
    }
}

impl OneCycle {
    fn check(&self, optimizer: &Optimizer, max_steps: Option<usize>, resolver: &mut Resolver<'_>) {
        let mut above = |low: &'static str, high: &'static str| {
            let message = "the smallest value of the cycle is above the largest".to_string();
            resolver.contradiction(&[low, high], message, Some("exchange them".to_string()));
        };
        if self.cycle_min_lr > self.cycle_max_lr {
            above(Self::cycle_min_lr, Self::cycle_max_lr);
        }
        if self.cycle_min_mom > self.cycle_max_mom {
            above(Self::cycle_min_mom, Self::cycle_max_mom);
        }
        if !self.cycle_momentum {
            return;
        }
        let constant = match optimizer {
            Optimizer::NAdam(_) => Some("NAdam's step depends on all earlier values of β₁"),
            Optimizer::ScheduleFree(_) => Some("the average of AdamWScheduleFree is defined for one value of β₁"),
            _ => None,
        };
        if let Some(reason) = constant {
            let message = format!("{reason}, so β₁ must be constant");
            let help = Some("set `cycle_momentum: false`".to_string());
            resolver.contradiction(&[Self::cycle_momentum, Optimizer::TYPE], message, help);
            return;
        }
        let Some([_, beta2]) = optimizer.betas() else {
            let message = "cycling β₁ has no effect: the optimizer has no betas; DeepSpeed disables it too".to_string();
            resolver.warn(Self::cycle_momentum, message);
            return;
        };
        if beta2 != 0.99 && resolver.at(AdamParams::betas) != At::Default {
            let message = "OneCycle replaces both betas: β₁ cycles, and β₂ is 0.99, as in DeepSpeed; `cycle_momentum: \
                           false` keeps yours";
            resolver.warn(AdamParams::betas, message.to_string());
        }
        // A program with its own loop need not train for the default number of steps, so only a written number counts.
        let written = max_steps.filter(|_| resolver.at(Training::max_steps) != At::Default);
        let after = written.map(|max| max.saturating_sub(self.cycle_first_step_size + self.cycle_second_step_size));
        if let (Some(after), size @ 1..) = (after, self.decay_step_size)
            && self.cycle_max_mom * (1.0 + self.decay_mom_rate * after as f64 / size as f64) >= 1.0
        {
            let message =
                "β₁ grows after the cycle and reaches 1 before the end of the run, and Adam diverges with β₁ = 1";
            let help = Some("set `decay_mom_rate: 0`, or a larger `decay_step_size`".to_string());
            resolver.contradiction(&[Self::decay_mom_rate, Self::decay_step_size], message.to_string(), help);
        }
    }
}
