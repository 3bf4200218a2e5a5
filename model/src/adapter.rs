//! Adapters: small trainable additions to the linear layers of a frozen model. Names follow PEFT's rules.

use zero_model_options::TrainedBias;
use zero_ops::{LinearMap, LoraOptions, names};

use crate::build_error::BuildError;
use crate::parameter::Parameter;

/// The adapters of a model. All other parameters are frozen, except `modules_to_save` and the biases that `bias`
/// selects.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Size of the adapters, and the linear layers that get one.
    pub lora: LoraOptions,
    /// Names of modules of the base model that are trained in full. As in PEFT, a name selects all modules whose path
    /// ends with this text: `norm` also selects `input_layernorm`.
    pub modules_to_save: Vec<String>,
    /// Biases that are trained.
    pub bias: TrainedBias,
    /// LoRA+: the learning rate of the matrices B and of all vectors, as a multiple of the learning rate of all other
    /// matrices. 1 for plain LoRA.
    pub lr_ratio: f64,
}

impl Adapter {
    /// Returns whether a parameter of the base model is trained.
    pub(crate) fn trains(&self, name: &str) -> bool {
        let Some((module, last)) = name.rsplit_once('.') else { return false };
        let bias = last == "bias"
            && match self.bias {
                TrainedBias::None => false,
                TrainedBias::All => true,
                TrainedBias::LoraOnly => self.lora.targets(module),
            };
        bias || self.modules_to_save.iter().any(|module| saves(module, name))
    }

    /// Returns the factor of a trained parameter's learning rate, by the rule of PEFT's `create_loraplus_optimizer`.
    pub(crate) fn lr_factor(&self, name: &str, dims: usize) -> f64 {
        if dims < 2 || name.ends_with(".lora_B.weight") { self.lr_ratio } else { 1.0 }
    }

    /// Checks that each name in the settings matches a linear layer or a module of the model. `maps` are all linear
    /// layers of the model.
    pub(crate) fn check(&self, parameters: &[Parameter], maps: &[LinearMap]) -> Result<(), BuildError> {
        let unknown = |name: &&String| !maps.iter().any(|map| names(name, &map.path));
        if let Some(name) = self.lora.targets.iter().flatten().find(unknown) {
            let paths: Vec<String> = maps.iter().map(|map| map.path.clone()).collect();
            return Err(BuildError::UnknownTarget { name: name.clone(), modules: ends(&paths) });
        }
        if maps.is_empty() {
            return Err(BuildError::NoLinear);
        }
        let is_missing = |module: &&String| !parameters.iter().any(|parameter| saves(module, parameter.name()));
        if let Some(name) = self.modules_to_save.iter().find(is_missing) {
            let all: Vec<String> =
                parameters.iter().filter_map(|p| Some(p.name().rsplit_once('.')?.0.to_string())).collect();
            return Err(BuildError::UnknownModule { name: name.clone(), modules: ends(&all) });
        }
        Ok(())
    }
}

/// Returns whether a module of this name contains the parameter, directly or in a submodule.
pub(crate) fn contains(module: &str, parameter: &str) -> bool {
    parameter.match_indices('.').any(|(at, _)| names(module, &parameter[..at]))
}

/// Returns whether the entry `name` of `modules_to_save` selects the parameter's module or a module that contains it.
/// This is PEFT's rule. With another rule, PEFT could not load the adapters that this project exports, and parameters
/// that PEFT trained would be frozen here.
fn saves(name: &str, parameter: &str) -> bool {
    !name.is_empty() && parameter.match_indices('.').any(|(at, _)| parameter[..at].ends_with(name))
}

/// Returns the last part of each path, without duplicates, in order of appearance.
pub(crate) fn ends(paths: &[String]) -> Vec<String> {
    let mut ends: Vec<String> = vec![];
    for path in paths {
        let end = path.rsplit('.').next().unwrap_or(path);
        if !ends.iter().any(|other| other == end) {
            ends.push(end.to_string());
        }
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, zoo};
    use candle_core::DType;
    use zero_ops::LoraInit;

    fn build(targets: Option<&[&str]>, modules_to_save: &[&str], bias: TrainedBias) -> Result<Model, BuildError> {
        let config = zoo::Gpt2Config { n_layer: 1, n_embd: 8, n_head: 2, ..zoo::Gpt2Config::default() };
        let targets = targets.map(|targets| targets.iter().map(ToString::to_string).collect());
        let lora = LoraOptions { rank: 2, scale: 2.0, dropout: 0.0, init: LoraInit::Zero, magnitudes: true, targets };
        let modules_to_save = modules_to_save.iter().map(ToString::to_string).collect();
        zoo::gpt2(&config).adapter(Adapter { lora, modules_to_save, bias, lr_ratio: 16.0 }).build(DType::F32)
    }

    fn trained(model: &Model) -> Vec<&str> {
        model.parameters().iter().filter(|p| p.is_trainable()).map(|p| p.name()).collect()
    }

    #[test]
    fn target_names_select_linear_layers() {
        let model = build(Some(&["c_attn"]), &[], TrainedBias::None).unwrap();
        let of = |map: &str| {
            ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector"]
                .map(|end| format!("transformer.h.0.{map}.{end}"))
        };
        assert_eq!(trained(&model), of("attn.c_attn"));
        let shapes: Vec<&[usize]> =
            model.parameters().iter().filter(|p| p.is_adapter()).map(|p| p.shape().dims()).collect();
        assert_eq!(shapes, [&[2, 8][..], &[24, 2][..], &[24][..]]);
        let factors: Vec<f64> =
            model.parameters().iter().filter(|p| p.is_adapter()).map(|p| p.tuning().lr_factor).collect();
        assert_eq!(factors, [1.0, 16.0, 16.0]);
        let maps = model.linear_maps();
        assert!(maps.iter().all(|map| map.inputs_first) && maps.len() == 4, "{maps:?}");
        let all = build(None, &[], TrainedBias::None).unwrap();
        assert_eq!(trained(&all).len(), 12, "c_attn, c_proj, c_fc, c_proj");
        let both = build(Some(&["attn.c_proj", "c_fc"]), &["ln_f", "wte"], TrainedBias::LoraOnly).unwrap();
        let expected = ["wte.weight", "h.0.attn.c_proj.bias", "h.0.mlp.c_fc.bias", "ln_f.weight", "ln_f.bias"];
        for name in expected {
            assert!(trained(&both).contains(&&*format!("transformer.{name}")), "{name}: {:?}", trained(&both));
        }
        assert_eq!(trained(&both).len(), 6 + 5);
        let suffix = build(Some(&["c_attn"]), &["n_1", "_f"], TrainedBias::None).unwrap();
        let saved = ["h.0.ln_1.weight", "h.0.ln_1.bias", "ln_f.weight", "ln_f.bias"];
        for name in saved {
            assert!(trained(&suffix).contains(&&*format!("transformer.{name}")), "{name}: {:?}", trained(&suffix));
        }
        assert_eq!(trained(&suffix).len(), 3 + 4);
    }

    #[test]
    fn names_without_effect_are_errors() {
        let error =
            |targets: Option<&[&str]>, save: &[&str]| build(targets, save, TrainedBias::None).unwrap_err().to_string();
        let unknown = error(Some(&["c_attn", "q_proj"]), &[]);
        assert!(unknown.contains("`q_proj`") && unknown.contains("`c_attn`, `c_proj`, `c_fc`"), "{unknown}");
        assert!(error(Some(&["attn"]), &[]).contains("`attn`"));
        assert!(error(Some(&["c_attn"]), &["score"]).contains("`score`"));
        assert!(error(Some(&["c_attn"]), &[""]).contains("``"));
    }
}
