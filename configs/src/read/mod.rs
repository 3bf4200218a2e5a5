//! Reads the text of a configuration: a YAML tree, changed by `--set`, and the values that keys expect.

pub(super) mod node;
pub(super) mod overrides;
pub(super) mod parse;
pub(super) mod reader;
pub(super) mod scalar;
pub(super) mod source;
