//! Adapters: small trainable additions to the linear maps of a frozen model, with PEFT's rules for names.

use zero_ops::{LoraOptions, names};

use crate::model::BuildError;
use crate::parameter::Parameter;

/// The biases of the base model that are trained: PEFT's `bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrainedBias {
    /// None of them.
    #[default]
    None,
    /// All of them.
    All,
    /// Those of the linear maps with an adapter.
    LoraOnly,
}

/// The adapters of a model. All other parameters are frozen.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Size and place of the adapters.
    pub lora: LoraOptions,
    /// Modules of the base model that are trained as a whole, named by their path or the end of it.
    pub modules_to_save: Vec<String>,
    /// Biases that are trained.
    pub bias: TrainedBias,
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
        bias || self.modules_to_save.iter().any(|module| contains(module, name))
    }

    /// Checks that each name has an effect. `maps` are the paths of all linear maps.
    pub(crate) fn check(&self, parameters: &[Parameter], maps: &[String]) -> Result<(), BuildError> {
        let unknown = |name: &&String| !maps.iter().any(|path| names(name, path));
        if let Some(name) = self.lora.targets.iter().flatten().find(unknown) {
            return Err(BuildError::UnknownTarget { name: name.clone(), modules: ends(maps) });
        }
        if maps.is_empty() {
            return Err(BuildError::NoLinear);
        }
        let is_missing = |module: &&String| !parameters.iter().any(|parameter| contains(module, parameter.name()));
        if let Some(name) = self.modules_to_save.iter().find(is_missing) {
            let all: Vec<String> =
                parameters.iter().filter_map(|p| Some(p.name().rsplit_once('.')?.0.to_string())).collect();
            return Err(BuildError::UnknownModule { name: name.clone(), modules: ends(&all) });
        }
        Ok(())
    }
}

/// Returns whether a module of this name contains a parameter, directly or in a module inside it.
fn contains(module: &str, parameter: &str) -> bool {
    parameter.match_indices('.').any(|(at, _)| names(module, &parameter[..at]))
}

/// Returns the last parts of paths, each once, in order of appearance.
fn ends(paths: &[String]) -> Vec<String> {
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
        let lora = LoraOptions { rank: 2, scale: 2.0, dropout: 0.0, init: LoraInit::Zero, targets };
        let modules_to_save = modules_to_save.iter().map(ToString::to_string).collect();
        zoo::gpt2(&config).adapter(Adapter { lora, modules_to_save, bias }).build(DType::F32)
    }

    fn trained(model: &Model) -> Vec<&str> {
        model.parameters().iter().filter(|p| p.is_trainable()).map(|p| p.name()).collect()
    }

    #[test]
    fn names_select_linear_maps() {
        let model = build(Some(&["c_attn"]), &[], TrainedBias::None).unwrap();
        let of = |map: &str| ["lora_A", "lora_B"].map(|side| format!("transformer.h.0.{map}.{side}.weight"));
        assert_eq!(trained(&model), of("attn.c_attn"));
        let shapes: Vec<&[usize]> =
            model.parameters().iter().filter(|p| p.is_adapter()).map(|p| p.shape().dims()).collect();
        assert_eq!(shapes, [&[2, 8][..], &[24, 2][..]]);
        let all = build(None, &[], TrainedBias::None).unwrap();
        assert_eq!(trained(&all).len(), 8, "c_attn, c_proj, c_fc, c_proj");
        let both = build(Some(&["attn.c_proj", "c_fc"]), &["ln_f", "wte"], TrainedBias::LoraOnly).unwrap();
        let expected = ["wte.weight", "h.0.attn.c_proj.bias", "h.0.mlp.c_fc.bias", "ln_f.weight", "ln_f.bias"];
        for name in expected {
            assert!(trained(&both).contains(&&*format!("transformer.{name}")), "{name}: {:?}", trained(&both));
        }
        assert_eq!(trained(&both).len(), 4 + 5);
    }

    #[test]
    fn names_without_effect_are_errors() {
        let error =
            |targets: Option<&[&str]>, save: &[&str]| build(targets, save, TrainedBias::None).unwrap_err().to_string();
        let unknown = error(Some(&["c_attn", "q_proj"]), &[]);
        assert!(unknown.contains("`q_proj`") && unknown.contains("`c_attn`, `c_proj`, `c_fc`"), "{unknown}");
        assert!(error(Some(&["attn"]), &[]).contains("`attn`"));
        assert!(error(Some(&["c_attn"]), &["score"]).contains("`score`"));
    }
}
