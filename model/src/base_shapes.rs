//! The base model of maximal update parametrization (µP): which dimensions of each parameter are widths.
//!
//! Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer", 2022. The
//! rules come from the Python package `mup`: a dimension is a width if it differs between a base model and a wider
//! model, the delta.

use std::collections::BTreeMap;

use candle_core::DType;

use crate::build_error::BuildError;
use crate::layers::Layers;
use crate::parameter::Parameter;

/// The dimensions of each parameter in the base model; `None` for a dimension that is not a width.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BaseShapes(BTreeMap<String, Vec<Option<usize>>>);

impl FromIterator<(String, Vec<Option<usize>>)> for BaseShapes {
    fn from_iter<I: IntoIterator<Item = (String, Vec<Option<usize>>)>>(shapes: I) -> Self {
        Self(shapes.into_iter().collect())
    }
}

impl BaseShapes {
    /// Compares a base model with a `delta` whose widths are all larger, as `mup.make_base_shapes` does. Allocates no
    /// parameters.
    ///
    /// # Errors
    /// Fails if one of the models cannot be built, or the two have different parameters.
    pub fn new(base: Layers, delta: Layers) -> Result<Self, BuildError> {
        let build = |layers: Layers| layers.build(DType::F32).map_err(|error| BuildError::Base(error.into()));
        let (base, delta) = (build(base)?, build(delta)?);
        let all = |parameter: &Parameter| {
            (parameter.name().to_string(), parameter.shape().dims().iter().copied().map(Some).collect())
        };
        let shapes: Self = base.parameters().iter().map(all).collect();
        shapes.check(delta.parameters())?;
        let marked = |parameter: &Parameter| {
            let sizes = parameter.shape().dims().iter();
            let base =
                shapes.0[parameter.name()].iter().zip(sizes).map(|(&of_base, &size)| of_base.filter(|&b| b != size));
            (parameter.name().to_string(), base.collect())
        };
        Ok(delta.parameters().iter().map(marked).collect())
    }

    /// Returns each parameter's name and its dimensions in the base model.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[Option<usize>])> {
        self.0.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()))
    }

    /// Checks that the base model has the same parameters as a model, each with the same number of dimensions.
    fn check(&self, parameters: &[Parameter]) -> Result<(), BuildError> {
        let is_in_model = |name: &&String| !parameters.iter().any(|parameter| parameter.name() == **name);
        if let Some(name) = self.0.keys().find(is_in_model) {
            return Err(BuildError::BaseShapes(format!(
                "the base model has a parameter `{name}`, but the model does not"
            )));
        }
        for parameter in parameters {
            let (name, rank) = (parameter.name(), parameter.shape().rank());
            match self.0.get(name) {
                None => {
                    let message = format!("the model has a parameter `{name}`, but the base model does not");
                    return Err(BuildError::BaseShapes(message));
                }
                Some(base) if base.len() != rank || base.contains(&Some(0)) => {
                    let base: Vec<String> =
                        base.iter().map(|size| size.map_or("null".to_string(), |size| size.to_string())).collect();
                    let message = format!(
                        "`{name}` is {:?} in the model, but [{}] in the base model",
                        parameter.shape().dims(),
                        base.join(", ")
                    );
                    return Err(BuildError::BaseShapes(message));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Sets the widths of each parameter.
    pub(crate) fn set(&self, parameters: &mut [Parameter]) -> Result<(), BuildError> {
        self.check(parameters)?;
        for parameter in parameters {
            let base = self.0[parameter.name()].iter().zip(parameter.whole_shape());
            let multipliers = base.map(|(base, &size)| base.map(|base| size as f64 / base as f64)).collect();
            parameter.set_widths(multipliers);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zoo::{Activation, MlpConfig, mlp};

    fn layers(input_size: usize, hidden_sizes: [usize; 2]) -> Layers {
        let hidden_sizes = hidden_sizes.to_vec();
        mlp(&MlpConfig { input_size, hidden_sizes, num_labels: 3, hidden_act: Activation::Relu, base: None })
    }

    #[test]
    fn dimensions_that_differ_from_base_to_delta_are_widths() {
        let shapes = BaseShapes::new(layers(7, [8, 16]), layers(7, [9, 17])).unwrap();
        let model = layers(7, [8, 64]).with_base_shapes(shapes).build(DType::F32).unwrap();
        let of = |name: &str| {
            let parameter = model.parameters().iter().find(|parameter| parameter.name() == name).unwrap();
            let widths = parameter.widths().unwrap();
            (widths.count(), widths.multiplier(), widths.fan_in_to_fan_out())
        };
        assert_eq!(of("layers.0.weight"), (1, 1.0, 1.0));
        assert_eq!(of("layers.1.weight"), (2, 1.0, 0.25));
        assert_eq!(of("layers.1.bias"), (1, 4.0, 0.25));
        assert_eq!(of("layers.2.weight"), (1, 4.0, 4.0));
        assert_eq!(of("layers.2.bias"), (0, 1.0, 1.0));
    }

    #[test]
    fn base_shapes_of_other_parameters_are_errors() {
        let of = |name: &str, base: Vec<Option<usize>>| {
            let shapes = BaseShapes::new(layers(7, [8, 16]), layers(7, [9, 17])).unwrap();
            let shapes = shapes.0.into_iter().filter(|(old, _)| old != name).chain([(name.to_string(), base)]);
            layers(7, [8, 64]).with_base_shapes(shapes.collect()).build(DType::F32).unwrap_err().to_string()
        };
        let error = of("layers.9.bias", vec![Some(1)]);
        assert!(error.contains("the base model has a parameter `layers.9.bias`, but the model does not"), "{error}");
        let error = of("layers.0.weight", vec![None]);
        assert!(error.contains("`layers.0.weight` is [8, 7] in the model, but [null] in the base model"), "{error}");
    }
}
