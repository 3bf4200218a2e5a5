//! Assigns parameters to optimizers and settings: the matrices of Muon, `training.param_groups` and layer-wise learning
//! rate decay.

use zero_config as config;
use zero_model::{BuildError, Model, Parameter, ParameterId, Trainable, Tuning};
use zero_optim::norm::Clipping;
use zero_optim::{Average, CustomOptimizer, MatrixStates, ScheduleFree};
use zero_partition::{adafactor_states, muon_states};

use crate::error::Error;
use crate::format::{counted, grouped};
use crate::mup;
use config::{Config, ParameterGroup, ParameterKind};

/// Selects the matrices that optimizers update as a whole: those that Muon orthogonalizes, those whose second moments
/// Adafactor factors, and those that a custom optimizer selects.
///
/// # Errors
/// Fails if a matrix does not exist, or an optimizer has nothing to update.
pub(crate) fn with_matrices(config: &Config, model: Model) -> Result<Model, Error> {
    let members = members(config, &model)?;
    let mut states = vec![None; model.parameters().len()];
    for (group, optimizer) in config.optimizers() {
        let is_own = |&p: &ParameterId| model.parameters()[p].is_trainable() && owner(config, members[p]) == group;
        let own: Vec<ParameterId> = (0..members.len()).filter(is_own).collect();
        let section = group.map_or("optimizer".to_string(), |group| format!("{}.optimizer", at(group)));
        if own.is_empty() && members.iter().any(Option::is_some) {
            let message =
                "the optimizer has no parameters: all trained parameters belong to groups with their own optimizers";
            return Err(Error::setting(&section, message, "remove a group's `optimizer`"));
        }
        for (parameter, matrix) in matrices(optimizer, &section, &own, &model)? {
            states[parameter] = Some(matrix);
        }
    }
    let model = model.with_matrices(states);
    match (&config.optimizer, model.optimizer().cloned()) {
        (config::Optimizer::Custom(_), Some(optimizer)) => check_custom(config, &*optimizer, &model).map(|()| model),
        _ => Ok(model),
    }
}

/// Selects the matrices that an optimizer updates as a whole from its `own` parameters, and returns each with the
/// states that the optimizer keeps of it. `section` is the path of the optimizer's keys.
fn matrices(
    optimizer: &config::Optimizer,
    section: &str,
    own: &[ParameterId],
    model: &Model,
) -> Result<Vec<(ParameterId, MatrixStates)>, Error> {
    let own = own.iter().map(|&p| (p, &model.parameters()[p]));
    let of_two = own.clone().filter_map(|(p, parameter)| match *parameter.shape().dims() {
        [rows, columns] => Some((p, parameter, [rows, columns])),
        _ => None,
    });
    match (optimizer, model.optimizer()) {
        (config::Optimizer::Adafactor(_), _) => {
            if let Some((_, parameter)) = own.clone().find(|(_, parameter)| parameter.shape().rank() > 2) {
                let name = parameter.name();
                let message = format!(
                    "Adafactor is not implemented for parameters with more than two dimensions, such as `{name}`"
                );
                let key = format!("{section}.type");
                return Err(Error::setting(&key, message, "use AdamW, or freeze the parameter"));
            }
            // A single row or column keeps its full second moment, because its factors would be equal to it: see
            // docs/optimizers.md.
            let factored = of_two.filter(|(.., shape)| shape.iter().all(|&size| size > 1));
            Ok(factored.map(|(p, _, shape)| (p, adafactor_states(shape))).collect())
        }
        (config::Optimizer::Custom(_), Some(custom)) => {
            let states = |(p, parameter, shape): (_, &Parameter, _)| Some((p, custom.matrix(parameter.name(), shape)?));
            Ok(of_two.filter_map(states).collect())
        }
        (config::Optimizer::Muon(muon), _) => {
            let key = format!("{section}.params.matrices");
            let patterns = muon.matrices.as_deref();
            for pattern in patterns.into_iter().flatten() {
                let selection = matching(&key, std::slice::from_ref(pattern), model.parameters())?;
                if !of_two.clone().any(|(_, parameter, _)| selection.contains(parameter.name())) {
                    let message = format!("no parameter that matches `{pattern}` has two dimensions");
                    return Err(Error::setting(&key, message, "choose parameters with two dimensions"));
                }
            }
            let selection = patterns.map(|patterns| matching(&key, patterns, model.parameters())).transpose()?;
            let is_hidden = |name: &str| !is_embedding(name) && !name.to_lowercase().contains("lm_head");
            let is_selected =
                |name: &str| selection.as_ref().map_or_else(|| is_hidden(name), |selection| selection.contains(name));
            let selected = of_two.filter(|(_, parameter, _)| is_selected(parameter.name()));
            let selected: Vec<_> = selected.map(|(p, _, shape)| (p, muon_states(shape))).collect();
            if selected.is_empty() {
                let message = "the model has no trainable matrix that Muon can orthogonalize";
                return Err(Error::setting(&key, message, "choose matrices, or use AdamW"));
            }
            Ok(selected)
        }
        _ => Ok(vec![]),
    }
}

/// Returns the group whose optimizer updates the parameters of `group`; `None` if the optimizer of the run does.
fn owner(config: &Config, group: Option<usize>) -> Option<usize> {
    group.filter(|&group| groups(config)[group].optimizer.is_some())
}

/// Checks the states and the matrices of a custom optimizer.
fn check_custom(config: &Config, optimizer: &dyn CustomOptimizer, model: &Model) -> Result<(), Error> {
    let names = optimizer.states();
    let reserved = [Average::STATE, ScheduleFree::OFFSET, ""];
    let is_taken = |(index, name): &(usize, &&str)| reserved.contains(*name) || names[..*index].contains(*name);
    if let Some((_, name)) = names.iter().enumerate().find(is_taken) {
        let message = format!("the custom optimizer has a state named `{name}`, but this name is already taken");
        return Err(Error::setting("optimizer.type", message, "give each state a unique name"));
    }
    let mut matrices = model.parameters().iter().filter_map(|parameter| Some((parameter.name(), parameter.matrix()?)));
    let Some((name, _)) = matrices.clone().next() else { return Ok(()) };
    let states = names.len();
    if let Some((name, matrix)) = matrices.find(|(_, matrix)| matrix.values.len() > states) {
        let count = matrix.values.len();
        let message = format!("the custom optimizer keeps {count} states of `{name}`, but names only {states}");
        return Err(Error::setting(
            "optimizer.type",
            message,
            "return a name for each state from `CustomOptimizer::states`",
        ));
    }
    if config.bf16.bf16_optimizer_states || config.bf16.bf16_master_weights_and_grads {
        let message = format!("the custom optimizer updates `{name}` as a whole, which is not implemented in bf16");
        return Err(Error::setting("bf16", message, "keep the optimizer states and the copy of the parameters in f32"));
    }
    if config.gradient_dtype() != config::Dtype::F32 {
        let message = format!("the custom optimizer updates `{name}` as a whole, which needs gradients in f32");
        return Err(Error::setting("data_types.grad_accum_dtype", message, "set `grad_accum_dtype: fp32`"));
    }
    Ok(())
}

/// Gives each parameter the settings that follow from its group and its depth.
pub(crate) fn tuned(config: &Config, model: Model) -> Result<Model, Error> {
    let (groups, shrinking) = (groups(config), config.training.layerwise_lr_decay);
    let (members, depths) = (members(config, &model)?, depths(&model));
    let deepest = depths.iter().max().copied().unwrap_or(0);
    let clippings = clippings(config);
    let of_parameter = |(parameter, group): (&Parameter, Option<usize>)| {
        let mut tuning = parameter.tuning();
        let owner = owner(config, group);
        let optimizer = owner.and_then(|owner| groups[owner].optimizer.as_ref()).unwrap_or(&config.optimizer);
        tuning.optimizer = index(config, owner);
        let mut lr = optimizer.lr();
        if let (config::Optimizer::Muon(muon), false) = (optimizer, parameter.is_matrix()) {
            (tuning.optimizer, lr) = (tuning.optimizer + 1, muon.lr_of_others());
        }
        let (bits, smallest) = optimizer.optim_bits().unwrap_or((32, 0));
        let bits = group.and_then(|group| groups[group].optim_bits).unwrap_or(bits);
        tuning.eight_bit = bits == 8 && parameter.is_trainable() && parameter.whole_elements() >= smallest;
        tuning.two_passes = matches!(optimizer, config::Optimizer::Lamb(_) | config::Optimizer::Adafactor(_));
        tuning.lr_factor *= shrinking.powi((deepest - depths[parameter.layer()]) as i32);
        tuning.clipping = clippings.iter().position(|(of, _)| Some(*of) == group).map_or(0, |place| place + 1);
        let group = group.map(|group| &groups[group]);
        let lr = group.and_then(|group| group.lr).unwrap_or(lr);
        if lr != config.optimizer.lr() {
            tuning.lr_factor *= lr / config.optimizer.lr();
        }
        if let Some(group) = group {
            tuning.lr_factor *= group.lr_scale.unwrap_or(1.0);
            tuning.weight_decay = group.weight_decay.or(group.optimizer.as_ref().map(config::Optimizer::weight_decay));
            tuning.betas = group.betas.map(|[beta1, beta2]| (beta1, beta2));
        }
        mup::scaled(config, parameter, tuning)
    };
    let tunings: Result<Vec<Tuning>, Error> = model.parameters().iter().zip(members).map(of_parameter).collect();
    Ok(model.with_tunings(&tunings?))
}

/// Returns the groups whose gradients are clipped separately, with their clipping. [`Tuning::clipping`] counts them
/// from 1.
pub(crate) fn clippings(config: &Config) -> Vec<(usize, Clipping)> {
    let clipping = |(index, group): (usize, &ParameterGroup)| {
        let (max_norm, max_value) = group.clipping()?;
        Some((index, Clipping { max_norm, max_value }))
    };
    groups(config).iter().enumerate().filter_map(clipping).collect()
}

fn groups(config: &Config) -> &[ParameterGroup] {
    config.training.param_groups.as_deref().unwrap_or_default()
}

/// Returns the index of the optimizer of a group, or of the run, among the optimizers that update parameters. Muon
/// counts as two; the second updates the parameters that it does not orthogonalize.
fn index(config: &Config, owner: Option<usize>) -> usize {
    let before = config.optimizers().into_iter().take_while(|(group, _)| *group != owner);
    before.map(|(_, optimizer)| if matches!(optimizer, config::Optimizer::Muon(_)) { 2 } else { 1 }).sum()
}

/// Returns, for each parameter, its group in `training.param_groups`: the first group that selects it. Frozen
/// parameters belong to no group.
///
/// # Errors
/// Fails if a group has no parameter left, if it names a pattern that matches nothing or a block that does not exist,
/// or if it sets only `betas` but has only matrices of Muon.
pub fn members(config: &Config, model: &Model) -> Result<Vec<Option<usize>>, Error> {
    let mut members = vec![None; model.parameters().len()];
    for (index, group) in groups(config).iter().enumerate() {
        let selected = selected(index, group, model)?;
        let trained: Vec<usize> = selected.iter().copied().filter(|&p| model.parameters()[p].is_trainable()).collect();
        let fail = |message: String, help: &str| Err(Error::setting(&at(index), message, help));
        let Some(&first) = trained.first() else {
            return match selected.first().map(|&p| model.parameters()[p].name()) {
                Some(name) => fail(
                    format!("all parameters of the group are frozen, such as `{name}`"),
                    "remove the group, or unfreeze one of its parameters",
                ),
                None => fail(
                    "the group selects no parameter of this model".to_string(),
                    "change `params`, `kinds` or `layers`: a parameter must match each of these keys that the group sets",
                ),
            };
        };
        let free: Vec<usize> = trained.into_iter().filter(|&p| members[p].is_none()).collect();
        if free.is_empty() {
            let name = model.parameters()[first].name();
            return fail(
                format!("earlier groups already contain all parameters of this group, such as `{name}`"),
                "list the group that selects fewer parameters first",
            );
        }
        let alone =
            group.betas.is_some() && group.lr.is_none() && group.lr_scale.is_none() && group.weight_decay.is_none();
        if alone && free.iter().all(|&p| model.parameters()[p].is_matrix()) {
            return fail("Muon's matrices have no betas".to_string(), "set `lr` or `weight_decay`");
        }
        free.into_iter().for_each(|p| members[p] = Some(index));
    }
    Ok(members)
}

/// Describes each group of `training.param_groups` and the learning rates of µP, one line each. Returns no lines if the
/// configuration has neither.
///
/// # Errors
/// Fails in the same cases as [`members`].
pub fn described(config: &Config, model: &Model) -> Result<Vec<String>, Error> {
    let members = members(config, model)?;
    let size = |group: Option<usize>| {
        let of_group =
            model.parameters().iter().zip(&members).filter(|(p, member)| p.is_trainable() && **member == group);
        let sizes: Vec<usize> = of_group.map(|(parameter, _)| parameter.whole_elements()).collect();
        let elements = grouped(sizes.iter().sum::<usize>() as u64);
        format!("{elements} parameters in {}", counted(sizes.len(), "tensor", "tensors"))
    };
    let mut lines: Vec<String> = groups(config)
        .iter()
        .enumerate()
        .map(|(index, group)| {
            let changes = [
                group.optimizer.as_ref().map(|optimizer| format!("{} with lr {}", optimizer.name(), optimizer.lr())),
                group.lr.map(|lr| format!("lr {lr}")),
                group.lr_scale.map(|scale| format!("lr × {scale}")),
                group.weight_decay.map(|decay| format!("weight decay {decay}")),
                group.betas.map(|[beta1, beta2]| format!("betas {beta1}, {beta2}")),
                group.clipping().filter(|&limits| limits == (0.0, 0.0)).map(|_| "gradients not clipped".to_string()),
                group
                    .gradient_clipping
                    .filter(|&norm| norm > 0.0)
                    .map(|norm| format!("gradient norm of at most {norm}")),
                group.gradient_clipping_value.map(|value| format!("gradients of at most {value}")),
                group.optim_bits.map(|bits| format!("{bits}-bit states")),
            ];
            let changes: Vec<String> = changes.into_iter().flatten().collect();
            format!("group {index}: {}, {}", size(Some(index)), changes.join(", "))
        })
        .collect();
    if !lines.is_empty() && members.contains(&None) {
        lines.push(format!("no group: {}", size(None)));
    }
    lines.extend(mup::described(config, model));
    Ok(lines)
}

fn at(index: usize) -> String {
    format!("training.param_groups.{index}")
}

/// Returns the parameters that match all selecting keys of a group.
fn selected(index: usize, group: &ParameterGroup, model: &Model) -> Result<Vec<usize>, Error> {
    let parameters = model.parameters();
    let patterns = group.params.as_deref();
    let patterns = patterns.map(|patterns| matching(&format!("{}.params", at(index)), patterns, parameters));
    let (patterns, blocks) = (patterns.transpose()?, blocks(model));
    if let Some(missing) = group.layers.iter().flatten().find(|number| !blocks.contains(&Some(**number))) {
        let key = format!("{}.layers", at(index));
        let help = format!("the blocks are {}", ranges(blocks.iter().copied().flatten()));
        return Err(Error::setting(&key, format!("the model has no block {missing}"), help));
    }
    let (kinds, selected_kinds) = (Kinds::new(model), group.selected_kinds());
    let is_selected = |parameter: &Parameter| {
        patterns.as_ref().is_none_or(|patterns| patterns.contains(parameter.name()))
            && selected_kinds.as_ref().is_none_or(|of| of.iter().any(|&kind| kinds.has(kind, parameter)))
            && group
                .layers
                .as_ref()
                .is_none_or(|numbers| blocks[parameter.layer()].is_some_and(|block| numbers.contains(&block)))
    };
    Ok((0..parameters.len()).filter(|&p| is_selected(&parameters[p])).collect())
}

/// Parses globs over parameter names. Each glob must match a parameter.
fn matching(key: &str, patterns: &[String], parameters: &[Parameter]) -> Result<Trainable, Error> {
    let selection = Trainable::new(Some(patterns), &[]);
    let checked = selection.and_then(|selection| selection.check_matches(parameters).map(|()| selection));
    checked.map_err(|error| of_patterns(key, error, "correct it"))
}

/// Describes an error in the patterns of a key.
pub(crate) fn of_patterns(key: &str, error: BuildError, help: &str) -> Error {
    match error {
        BuildError::UnmatchedPattern { pattern, names } => {
            let help = format!("some of the parameters are {}", names.join(", "));
            Error::setting(key, format!("no parameter matches `{pattern}`"), help)
        }
        error => Error::setting(key, error.to_string(), help),
    }
}

/// The kinds of a model's parameters.
struct Kinds<'a> {
    /// Modules whose weight has one dimension.
    norms: Vec<&'a str>,
    last_layer: usize,
}

impl<'a> Kinds<'a> {
    fn new(model: &'a Model) -> Self {
        let weights = model.parameters().iter().filter(|parameter| parameter.shape().rank() == 1);
        let norms = weights.filter_map(|parameter| parameter.name().strip_suffix(".weight")).collect();
        Self { norms, last_layer: model.layers().len() - 1 }
    }

    /// Returns whether a parameter is of this kind.
    fn has(&self, kind: ParameterKind, parameter: &Parameter) -> bool {
        let (module, name) = parameter.name().rsplit_once('.').unwrap_or(("", parameter.name()));
        match kind {
            ParameterKind::Bias => name == "bias",
            ParameterKind::Norm => self.norms.contains(&module),
            ParameterKind::Embedding => parameter.shape().rank() >= 2 && is_embedding(parameter.name()),
            ParameterKind::Head => parameter.layer() == self.last_layer,
        }
    }
}

/// Returns whether a parameter has the name of an embedding, by DeepSpeed's rule or as in GPT-2.
fn is_embedding(name: &str) -> bool {
    let name = name.to_lowercase();
    ["embed", "wte", "wpe"].iter().any(|part| name.contains(part))
}

/// Returns the block number of each layer: the number at the end of its name, or its position if no layer's name ends
/// with a number.
fn blocks(model: &Model) -> Vec<Option<usize>> {
    let names = model.layers().iter().map(|layer| layer.name());
    let numbers: Vec<Option<usize>> = names.map(|name| name.rsplit('.').next()?.parse().ok()).collect();
    match numbers.iter().all(Option::is_none) {
        true => (0..numbers.len()).map(Some).collect(),
        false => numbers,
    }
}

/// Returns the depth of each layer: the number of blocks up to and including the layer, and one more for layers after
/// the last block.
fn depths(model: &Model) -> Vec<usize> {
    let blocks = blocks(model);
    let last = blocks.iter().rposition(Option::is_some).unwrap_or(0);
    let until = |layer: usize| blocks[..=layer].iter().flatten().count() + usize::from(layer > last);
    (0..blocks.len()).map(until).collect()
}

/// Writes numbers as ranges: `0–3, 5`.
fn ranges(numbers: impl Iterator<Item = usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = vec![];
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let written = ranges.into_iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}–{last}"),
    });
    written.collect::<Vec<_>>().join(", ")
}
