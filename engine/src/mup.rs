//! Maximal update parametrization (µP): scales learning rates and weight decays by the widths of each parameter.
//!
//! Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer", 2022. The
//! rules come from `MuAdam`, `MuAdamW` and `MuSGD` in the Python package `mup`. `zero_model::zoo` initializes and
//! scales the models.

use std::fs;

use zero_config::{self as config, Config, WeightDecayOn};
use zero_model::{BaseShapes, Layers, Model, Parameter, Tuning, Widths};

use crate::error::Error;
use crate::format::{counted, grouped};

const FILE: &str = "mup.base_shapes";

/// Adds the base shapes from the file `mup.base_shapes` to the layers of a model that is built in code.
pub(crate) fn with_base_shapes(config: &Config, layers: Layers) -> Result<Layers, Error> {
    let Some(path) = config.mup.as_ref().and_then(|mup| mup.base_shapes.as_deref()) else { return Ok(layers) };
    if layers.has_base_shapes() {
        let message = "the program already sets a base model with `Layers::with_base_shapes`";
        return Err(Error::setting(FILE, message, "remove this key or the call to `Layers::with_base_shapes`"));
    }
    let text = fs::read_to_string(path).map_err(|error| {
        Error::io(path)(error).named(FILE, "give a file that `mup.make_base_shapes` or `mup.save_base_shapes` wrote")
    })?;
    let shape = |(name, sizes): (&String, &serde_json::Value)| {
        let size = |size: &serde_json::Value| match size.as_u64() {
            Some(size) => Some(usize::try_from(size).ok()),
            None => size.is_null().then_some(None),
        };
        Some((name.clone(), sizes.as_array()?.iter().map(size).collect::<Option<Vec<_>>>()?))
    };
    let shapes =
        config::yaml(&text).and_then(|file| file.as_object()?.iter().map(shape).collect::<Option<BaseShapes>>());
    match shapes {
        Some(shapes) => Ok(layers.with_base_shapes(shapes)),
        None => {
            let message = format!("{path} is not YAML with a list of sizes for each parameter");
            Err(Error::setting(FILE, message, "use lines such as `layer.weight: [128, null]`"))
        }
    }
}

/// Returns the number that divides a parameter's learning rate and multiplies its weight decay. It is often 1.
fn divisor(optimizer: &config::Optimizer, widths: &Widths) -> f64 {
    match (matches!(optimizer, config::Optimizer::MuSgd(_)), widths.count()) {
        (true, 1) => 1.0 / widths.multiplier(),
        (true, 2) => widths.fan_in_to_fan_out(),
        (false, 2) => widths.multiplier(),
        _ => 1.0,
    }
}

/// With MuAdam, MuAdamW or MuSGD, scales the learning rate and the weight decay of a parameter by its widths.
///
/// # Errors
/// Fails if the model has no base model, or if more than two dimensions of the parameter differ from the base model.
pub(crate) fn scaled(config: &Config, parameter: &Parameter, mut tuning: Tuning) -> Result<Tuning, Error> {
    let (config::Optimizer::MuAdam(config::MuAdamParams { weight_decay, .. })
    | config::Optimizer::MuAdamW(config::MuAdamParams { weight_decay, .. })
    | config::Optimizer::MuSgd(config::SgdParams { weight_decay, .. })) = &config.optimizer
    else {
        return Ok(tuning);
    };
    let Some(widths) = parameter.widths() else {
        let message = "the optimizer scales learning rates by the widths of a base model, but no base model is set";
        let help = "set `mup.base_shapes`, call `Layers::with_base_shapes`, or use another optimizer";
        return Err(Error::setting("optimizer.type", message, help));
    };
    if widths.count() > 2 {
        let message = format!("more than two dimensions of `{}` differ from the base model", parameter.name());
        return Err(Error::setting("mup", message, "change at most two dimensions of a parameter"));
    }
    let divisor = divisor(&config.optimizer, widths);
    if divisor != 1.0 {
        let decays = config.training.weight_decay_on == WeightDecayOn::All || parameter.shape().rank() >= 2;
        tuning.lr_factor /= divisor;
        tuning.weight_decay = tuning.weight_decay.or(decays.then_some(*weight_decay)).map(|decay| decay * divisor);
    }
    Ok(tuning)
}

/// Describes the scaled learning rates, one line per factor; no lines without a µP optimizer.
pub(crate) fn described(config: &Config, model: &Model) -> Vec<String> {
    let mut of_divisors: Vec<(f64, Vec<usize>)> = vec![];
    for parameter in model.parameters().iter().filter(|parameter| parameter.is_trainable() && config.optimizer.is_mu())
    {
        let divisor = parameter.widths().map_or(1.0, |widths| divisor(&config.optimizer, widths));
        match of_divisors.iter_mut().find(|(other, _)| *other == divisor) {
            Some((_, sizes)) => sizes.push(parameter.whole_elements()),
            None => of_divisors.push((divisor, vec![parameter.whole_elements()])),
        }
    }
    let line = |(divisor, sizes): (f64, Vec<usize>)| {
        let rate = match divisor {
            1.0 => "lr unchanged".to_string(),
            ..1.0 => format!("lr × {}", short(1.0 / divisor)),
            _ => format!("lr / {}", short(divisor)),
        };
        let elements = grouped(sizes.iter().sum::<usize>() as u64);
        format!("µP: {rate} for {elements} parameters in {}", counted(sizes.len(), "tensor", "tensors"))
    };
    of_divisors.into_iter().map(line).collect()
}

/// Formats a number of at least 1 with at most 4 digits after the decimal point.
fn short(number: f64) -> String {
    format!("{number:.4}").trim_end_matches('0').trim_end_matches('.').to_string()
}
