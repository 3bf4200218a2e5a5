//! Translates the rotary embedding: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before.

use serde_json::{Map, Value as Json};

use super::Reader;
use super::json::{map, node, short};
use super::keys::{GEMMA3, PHI3};
use crate::config::{
    FULL_ATTENTION, Llama, ROPE_ORIGINAL, ROPE_TYPE as ROPE_TYPE_PATH, SLIDING_ATTENTION, rope_keys_of,
};
use crate::path::last;
use crate::read::node::Value;
use crate::schema::TYPE;

const THETA: &str = last(Llama::rope_theta);
const LOCAL_THETA: &str = last(Llama::rope_local_base_freq);
const SCALING: &str = last(Llama::rope_scaling);
const PARAMETERS: &str = "rope_parameters";
const PARTIAL: &str = last(Llama::partial_rotary_factor);
const ROPE_TYPE: &str = last(ROPE_TYPE_PATH);
const ORIGINAL: &str = last(ROPE_ORIGINAL);

/// Values for keys of the section `model`.
pub(super) struct Rope {
    pub(super) theta: Value,
    pub(super) scaling: Value,
    /// The fraction of each head that is rotated.
    pub(super) partial: Value,
    /// The base in layers with sliding attention; null means `theta`.
    pub(super) local_theta: Value,
}

impl Reader<'_> {
    /// Returns the rotary embedding. `positions` and `theta` are the defaults of the type.
    pub(super) fn rope(&mut self, kind: &str, positions: usize, theta: f64) -> Rope {
        let (mut parameters, local) = match kind {
            GEMMA3 => self.parameters_by_layer_type(),
            _ => {
                let name = if self.get(SCALING).is_some() { SCALING } else { PARAMETERS };
                (self.section(name), Map::new())
            }
        };
        let local_theta = match kind {
            GEMMA3 => {
                if self.scaling(kind, positions, &local) != Value::Null {
                    let message = format!("scaled frequencies of `{SLIDING_ATTENTION}` are not implemented yet");
                    self.refuse(PARAMETERS, message, None);
                }
                let written = self.get(LOCAL_THETA);
                local.get(THETA).or(written).map_or(Value::Float(10_000.0), node)
            }
            _ => Value::Null,
        };
        let written = self.get(THETA);
        let theta = parameters.get(THETA).or(written).map_or(Value::Float(theta), node);
        let partial = match kind {
            PHI3 => {
                let written = self.get(PARTIAL);
                parameters.remove(PARTIAL).as_ref().or(written).map_or(Value::Float(1.0), node)
            }
            _ => Value::Float(1.0),
        };
        Rope { theta, scaling: self.scaling(kind, positions, &parameters), partial, local_theta }
    }

    /// Returns a section of `config.json`, empty if it is missing.
    fn section(&mut self, name: &'static str) -> Map<String, Json> {
        match self.get(name).map(Json::as_object) {
            None => Map::new(),
            Some(Some(section)) => section.clone(),
            Some(None) => {
                self.refuse(name, format!("`{name}` should be a section"), None);
                Map::new()
            }
        }
    }

    /// Returns the parameters of layers with full attention and of layers with sliding attention. `rope_scaling`
    /// applies to full attention.
    fn parameters_by_layer_type(&mut self) -> (Map<String, Json>, Map<String, Json>) {
        let mut of = self.section(PARAMETERS);
        let [mut full, local] = [FULL_ATTENTION, SLIDING_ATTENTION].map(|layers| match of.remove(layers) {
            None | Some(Json::Null) => Map::new(),
            Some(Json::Object(section)) => section,
            Some(other) => {
                self.not_implemented(&format!("{PARAMETERS}.{layers}"), &other, Some("use a section"));
                Map::new()
            }
        });
        if let Some((name, value)) = of.iter().next() {
            let help = format!("the supported layer types are `{FULL_ATTENTION}` and `{SLIDING_ATTENTION}`");
            self.not_implemented(&format!("{PARAMETERS}.{name}"), value, Some(&help));
        }
        full.extend(self.section(SCALING));
        (full, local)
    }

    /// Returns the section `rope_scaling`; null if frequencies are not scaled.
    fn scaling(&mut self, kind: &str, positions: usize, parameters: &Map<String, Json>) -> Value {
        let written = parameters.get(ROPE_TYPE).or(parameters.get(TYPE)).filter(|written| !written.is_null());
        let written = written.cloned().unwrap_or("default".into());
        // A value that is not a string becomes the empty name, which is rejected below.
        let type_of = written.as_str().unwrap_or_default();
        // Older Phi files use these names.
        let type_of = if kind == PHI3 && ["su", "yarn"].contains(&type_of) { "longrope" } else { type_of };
        let implemented: &[&str] = match kind {
            PHI3 => &["default", "longrope"],
            _ => &["default", "linear", "llama3", "longrope"],
        };
        if !implemented.contains(&type_of) {
            let message = format!("`rope_type: {}` is not implemented yet", short(&written));
            self.refuse(
                SCALING,
                message,
                Some(&format!("the types supported for {kind} are {}", implemented.join(", "))),
            );
            return Value::Null;
        }
        let (required, optional) = rope_keys_of(type_of);
        let used = || required.iter().chain(optional).map(|path| last(path));
        // The original length next to the section takes precedence over the one in the section. Phi-3's class has a
        // default.
        let beside = self.get(ORIGINAL).cloned().or((kind == PHI3).then(|| 4096.into()));
        let longest = self.get(last(Llama::max_position_embeddings)).cloned().unwrap_or(positions.into());
        let mut entries = vec![(ROPE_TYPE, Value::Text(type_of.into()))];
        for name in used() {
            let written = parameters.get(name).filter(|value| !value.is_null());
            let value = match name {
                ORIGINAL => beside.as_ref().or(written).or(Some(&longest)),
                _ => written,
            };
            entries.extend(value.map(|value| (name, node(value))));
        }
        for (name, value) in parameters {
            let is_one = name == PARTIAL && value.as_f64() == Some(1.0);
            let is_known = [ROPE_TYPE, TYPE, THETA].contains(&name.as_str()) || used().any(|used| used == name);
            if !value.is_null() && !is_known && !is_one {
                let message = format!("`{name}: {}` of the rotary embedding is not implemented yet", short(value));
                self.refuse(SCALING, message, None);
            }
        }
        if type_of == "default" { Value::Null } else { map(entries) }
    }
}
