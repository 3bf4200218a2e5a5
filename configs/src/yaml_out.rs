//! Writes a resolved configuration as YAML that runs again as it is.

use serde::Serializer;

use crate::Config;

/// Serialises `None` as `auto`.
pub(crate) fn auto<S: Serializer>(value: &Option<usize>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(number) => serializer.serialize_u64(*number as u64),
        None => serializer.serialize_str("auto"),
    }
}

/// The configuration in the shape of `ds.yaml`, keys in order.
pub(crate) fn tree(config: &Config) -> serde_json::Value {
    // Plain data with text keys: there is nothing in it that could fail to serialise.
    serde_json::to_value(config).unwrap_or_default()
}
