//! Checks `preference` against the data, the model and the adapter.

use crate::config::{
    Adapter, Chat, ChatType, Config, Data, DataFormat, DpoLoss, LoraInit, Model, Preference, PreferenceType, Training,
};
use crate::path::last;
use crate::read::node::At;
use crate::read::reader::Resolver;

impl Preference {
    /// Reports keys that contradict `preference`, and keys that have no effect with it.
    pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
        let Some(preference) = &config.preference else {
            if config.data.as_ref().and_then(|data| data.chat.as_ref()).is_some_and(|c| c.kind == ChatType::Preference)
            {
                let message = format!("`{}: preference` needs the `preference` section", Chat::kind);
                let help = Some(format!("add a `{}` section, for example `type: dpo`", Config::preference));
                resolver.contradiction(&[Chat::kind, Config::preference], message, help);
            }
            return;
        };
        let mut unused = |key: &'static str, has_effect: bool, with: &str, help: &str| {
            if !has_effect && resolver.at(key) != At::Default {
                let message = format!("`{}` has no effect with `{}`", last(key), with);
                resolver.contradiction(&[key, Self::kind], message, Some(help.to_string()));
            }
        };
        let is_robust = preference.has_reference() && preference.loss_type == DpoLoss::Robust;
        let kind = format!("{}: {}", Self::kind, preference.kind);
        unused(Self::loss_type, preference.has_reference(), &kind, "remove it, or set `type: dpo`");
        unused(Self::label_smoothing, is_robust, &kind, "remove it, or set `loss_type: robust`");
        unused(Self::simpo_gamma, preference.kind == PreferenceType::SimPo, &kind, "remove it, or set `type: simpo`");
        for key in [Chat::roles_to_train, Chat::train_on_inputs, Chat::train_on_eos, Chat::message_field_training] {
            unused(key, false, Config::preference, "remove it: the tokens of both answers are trained on");
        }
        let is_off = config.training.z_loss == 0.0;
        unused(Training::z_loss, is_off, Config::preference, "remove it: losses of pairs have no z-loss term");
        preference.fits(config, resolver);
    }

    fn fits(&self, config: &Config, resolver: &mut Resolver<'_>) {
        if let Some(data) = &config.data {
            if data.datasets.is_some() {
                let message = "several data sets of pairs are not implemented".to_string();
                let help = Some(format!("list all files under `{}`", Data::train));
                resolver.contradiction(&[Data::datasets, Config::preference], message, help);
            }
            if data.format != DataFormat::Chat {
                let message = format!("`{}: {}` has no pairs of answers", Data::format, data.format);
                let help = Some("use `format: chat`, and records with `prompt`, `chosen` and `rejected`".to_string());
                resolver.contradiction(&[Data::format, Config::preference], message, help);
            }
            if data.sample_packing {
                let message = "`preference` does not support `sample_packing`: each sample is one pair".to_string();
                resolver.contradiction(
                    &[Data::sample_packing, Config::preference],
                    message,
                    Some("remove `sample_packing`".to_string()),
                );
            }
            if let Some(chat) = &data.chat
                && !matches!(chat.kind, ChatType::Auto | ChatType::Preference)
            {
                let message = format!(
                    "records of `{}: {}` have one answer, but `preference` compares two",
                    Chat::kind,
                    chat.kind
                );
                let help = Some("set `type: preference`, or remove the `preference` section".to_string());
                resolver.contradiction(&[Chat::kind, Config::preference], message, help);
            }
        }
        if matches!(config.model, Some(Model::Mlp(_))) {
            let message = "`preference` compares answers of a language model, and an mlp generates none".to_string();
            resolver.contradiction(
                &[Model::TYPE, Config::preference],
                message,
                Some("train a language model".to_string()),
            );
        }
        if let Some(adapter) = &config.adapter
            && adapter.init_lora_weights == LoraInit::Random
            && adapter.pretrained.is_none()
            && self.has_reference()
        {
            let message = "`init_lora_weights: false` would give the reference model a random adapter".to_string();
            let help = Some("remove `init_lora_weights`, so that training starts from the base model".to_string());
            resolver.contradiction(&[Adapter::init_lora_weights, Config::preference], message, help);
        }
    }
}
