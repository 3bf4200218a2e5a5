//! Writes configurations: a resolved one as YAML, and changes to the text of one.

pub(super) mod edit;
pub(super) mod resolved;
pub(super) mod yaml_out;
