//! Checks `mup` against the optimizer and the model.

use crate::config::{Config, Gpt2, Mup, Optimizer};
use crate::read::reader::Resolver;

impl Mup {
    /// Checks the section against the optimizer and the model.
    pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
        let mut fail = |paths: &[&str], message: &str, help: &str| {
            resolver.contradiction(paths, message.to_string(), Some(help.to_string()));
        };
        let Some(mup) = &config.mup else {
            if config.optimizer.is_mu() && config.model.is_some() {
                let message = "the optimizer scales learning rates by the widths of a base model, but the `mup` section is missing";
                fail(&[Optimizer::TYPE], message, "add `mup: {base: …}` with the widths for which `lr` was tuned");
            }
            return;
        };
        if !config.optimizer.is_mu() {
            let message = "`mup` needs an optimizer that scales learning rates with the width";
            fail(&[Config::mup, Optimizer::TYPE], message, "use MuAdamW, MuAdam or MuSGD, or remove the section");
        }
        if config.adapter.is_some() {
            let message = "`mup` does not support adapters";
            fail(&[Config::mup, Config::adapter], message, "keep one of the two");
        }
        match (mup, &config.model) {
            (Self { base: Some(_), base_shapes: Some(_) }, _) => {
                fail(
                    &[Self::base, Self::base_shapes],
                    "`base` and `base_shapes` both describe the base model",
                    "keep one of the two",
                );
            }
            (Self { base: None, base_shapes: None }, _) => {
                fail(&[Config::mup], "`mup` does not describe a base model", "set `base: …`");
            }
            (Self { base: Some(_), .. }, None) => {
                let message = "`mup.base` needs a `model` section";
                fail(
                    &[Self::base],
                    message,
                    "add a `model` section, or set `base_shapes` for a model that the program builds",
                );
            }
            (Self { base_shapes: Some(_), .. }, Some(_)) => {
                let message = "`mup.base_shapes` is for a model that the program builds, not for a `model` section";
                fail(&[Self::base_shapes, Config::model], message, "set `base` to the widths of the base model");
            }
            (Self { base: Some(base), .. }, Some(model)) => {
                if model.pretrained().is_some() {
                    let message = "`mup` does not support pretrained models";
                    fail(&[Config::mup, Gpt2::pretrained], message, "keep one of the two");
                }
                if let Err((path, message, help)) = base.base_of(model) {
                    fail(&[&path], &message, &help);
                }
            }
            (Self { base_shapes: Some(_), .. }, None) => {}
        }
    }
}
