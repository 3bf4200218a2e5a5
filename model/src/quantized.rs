//! Checks the settings of quantized weights against a model.

use zero_ops::QuantizationOptions;

use crate::adapter::{contains, ends};
use crate::build_error::BuildError;
use crate::parameter::Parameter;

/// Checks that each setting has an effect, and that no quantized weight is trained.
pub(crate) fn check_quantized(options: &QuantizationOptions, parameters: &[Parameter]) -> Result<(), BuildError> {
    let is_missing = |module: &&String| !parameters.iter().any(|parameter| contains(module, parameter.name()));
    if let Some(name) = options.skip.iter().find(is_missing) {
        let all: Vec<String> =
            parameters.iter().filter_map(|p| Some(p.name().rsplit_once('.')?.0.to_string())).collect();
        return Err(BuildError::UnknownSkipped { name: name.clone(), modules: ends(&all) });
    }
    let mut quantized = parameters.iter().filter(|parameter| parameter.quantization().is_some()).peekable();
    if quantized.peek().is_none() {
        return Err(BuildError::NothingQuantized);
    }
    match quantized.find(|parameter| parameter.is_trainable()) {
        Some(parameter) => Err(BuildError::TrainedQuantized(parameter.name().to_string())),
        None => Ok(()),
    }
}
