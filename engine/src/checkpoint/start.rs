//! The initial values of an engine's parameters.

use std::path::Path;

use serde_json::{Value, json};
use zero_checkpoint::CheckpointError;
use zero_comm::Communicator;
use zero_config::{Adapter, Config};
use zero_model::ops::{MAGNITUDES, weight_norms};
use zero_partition::{Kind, ShardedState};

use crate::checkpoint::stored::{other_arithmetic, wrong_type};
use crate::error::Error;

/// The source of an engine's initial parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The weights that the configuration names, or random values from the seed if it names none.
    Anew,
    /// Random values from the seed, because a checkpoint is loaded next. The weights that the configuration names may
    /// no longer exist.
    GoesOn,
}

impl Start {
    /// Overwrites the randomly initialized parameters with the weights that the configuration names, if any.
    /// Collective.
    pub(crate) fn load(self, config: &Config, zero: &mut ShardedState, comm: &dyn Communicator) -> Result<(), Error> {
        if self == Self::GoesOn {
            return Ok(());
        }
        if let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained()) {
            zero_checkpoint::load_pretrained(folder.as_ref(), zero, comm).map_err(of_pretrained)?;
        }
        if let Some(adapter) = &config.adapter
            && let Some(folder) = &adapter.pretrained
        {
            let named = |error: Error| error.named("adapter.pretrained", "give a folder that PEFT has saved");
            same_adapter(adapter, folder.as_ref()).map_err(named)?;
            zero_checkpoint::load_adapter(folder.as_ref(), zero, comm).map_err(|error| match error {
                CheckpointError::Mismatch { .. } => {
                    Error::setting("adapter.pretrained", error.to_string(), SAME_MODULES)
                }
                other => named(other.into()),
            })?;
        }
        if let Some(sources) = &config.training.initial_weights {
            let named =
                |error: Error| error.named("training.initial_weights", "specify readable safetensors files or a glob");
            let files = crate::files::expand(sources).map_err(|error| named(error.into()))?;
            let mup = config.mup.as_ref().map(|mup| json!(mup).to_string());
            zero_checkpoint::load_weights(&files, mup.as_deref(), zero, comm).map_err(|error| named(error.into()))?;
        }
        match &config.adapter {
            Some(adapter) if adapter.use_dora && adapter.pretrained.is_none() => initial_magnitudes(adapter, zero),
            _ => Ok(()),
        }
    }
}

/// Sets DoRA's magnitude vectors to the norms of the initial weights. Collective.
fn initial_magnitudes(adapter: &Adapter, zero: &mut ShardedState) -> Result<(), Error> {
    let model = zero.model().clone();
    let parameters = model.parameters();
    let index = |name: String| parameters.iter().position(|parameter| parameter.name() == name);
    for map in model.linear_maps() {
        let of = |name: &str| index(format!("{}.{name}", map.path));
        let (Some(magnitudes), Some(weight), Some(a), Some(b)) =
            (of(MAGNITUDES), of("weight"), of("lora_A.weight"), of("lora_B.weight"))
        else {
            continue;
        };
        let mut full = |id| zero.full(Kind::Parameter, id);
        let (weight, a, b) = (full(weight)?, full(a)?, full(b)?);
        let norms = weight_norms(&weight, [&a, &b], adapter.r, adapter.scale() as f32, map.inputs_first);
        zero.write_parameter(magnitudes, &norms)?;
    }
    Ok(())
}

/// Checks that a PEFT folder describes the configured adapters. The shapes of its tensors do not show the adapters'
/// scale.
fn same_adapter(adapter: &Adapter, folder: &Path) -> Result<(), Error> {
    let path = folder.join("adapter_config.json");
    let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
    let saved: Value = serde_json::from_str(&text)
        .map_err(|error| Error::setting("adapter.pretrained", format!("{}: {error}", path.display()), READABLE))?;
    if saved["peft_type"] != "LORA" {
        let message = format!("{} does not describe a LoRA adapter", path.display());
        return Err(Error::setting("adapter.pretrained", message, READABLE));
    }
    if let Some(reason) = wrong_type(&saved) {
        let message = format!("{}: {reason}", path.display());
        return Err(Error::setting("adapter.pretrained", message, READABLE));
    }
    if let Some(reason) = other_arithmetic(&saved) {
        let message = format!("{}: {reason}", path.display());
        return Err(Error::setting("adapter.pretrained", message, "merge the adapter into its base model in PEFT"));
    }
    same_keys(adapter, &saved, &path)
}

/// Checks that the keys which an adapter's tensors do not determine, such as its scale, have the configured values in
/// `saved`, the contents of the file `path`.
pub(crate) fn same_keys(adapter: &Adapter, saved: &Value, path: &Path) -> Result<(), Error> {
    let written = [
        ("r", json!(adapter.r)),
        ("lora_alpha", json!(adapter.lora_alpha)),
        ("use_rslora", json!(adapter.use_rslora)),
        ("use_dora", json!(adapter.use_dora)),
    ];
    for (key, configured) in written {
        let is_equal = match (saved[key].as_f64(), configured.as_f64()) {
            (Some(saved), Some(configured)) => saved == configured,
            _ => saved[key].as_bool().unwrap_or(false) == configured.as_bool().unwrap_or(false),
        };
        if !is_equal {
            let message = format!("it is {configured}, but {} in {}", saved[key], path.display());
            return Err(Error::setting(&format!("adapter.{key}"), message, format!("set it to {}", saved[key])));
        }
    }
    Ok(())
}

const SAME_MODULES: &str = "use the base model that the adapter was trained for, and the `target_modules`, \
                            `modules_to_save` and `bias` of its adapter_config.json";

const READABLE: &str = "give a folder in which PEFT saved a LoRA adapter";

/// Adds the key `model.pretrained` to an error about its folder.
pub fn of_pretrained(error: CheckpointError) -> Error {
    Error::from(error)
        .named("model.pretrained", "give a folder with config.json and model.safetensors, as transformers saves it")
}
