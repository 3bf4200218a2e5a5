//! Writes a resolved configuration as YAML. The output can be used as a configuration unchanged.

use std::fmt::Write as _;

use serde_json::Value;

use crate::config::{Autotuning, Config, Sweep};
use crate::schema::join;
use crate::write::yaml_out::flow;

/// Column of the comments, unless the line is longer.
const COMMENT_COLUMN: usize = 50;

impl Config {
    /// Returns the full configuration with every default and `auto` filled in. The output can be used as a
    /// configuration unchanged.
    pub fn to_yaml(&self) -> String {
        write(self, false)
    }

    /// Like [`to_yaml`](Self::to_yaml), with a comment about the origin of each value: `# line 12`, `# --set`,
    /// `# default`, `# auto`.
    pub fn to_yaml_with_origins(&self) -> String {
        write(self, true)
    }

    /// Returns the path of each value (`zero_optimization.stage`) and the value as YAML, in the order of the file.
    /// Use it to compare configurations key by key.
    pub fn leaves(&self) -> Vec<(String, String)> {
        leaves(self)
    }
}

/// Returns the configuration in the shape of `ds.yaml`, with its keys in order.
pub(crate) fn tree(config: &Config) -> Value {
    // Serialisation cannot fail: the configuration is plain data with string keys.
    serde_json::to_value(config).unwrap_or_default()
}

pub(crate) fn leaves(config: &Config) -> Vec<(String, String)> {
    let mut list = Vec::new();
    visit("", &tree(config), 0, &mut |_, path, _, value| {
        if let Some(value) = value {
            list.push((path.to_string(), value));
        }
    });
    list
}

fn write(config: &Config, origins: bool) -> String {
    let mut out = String::new();
    let mut was_inside = false;
    visit("", &tree(config), 0, &mut |depth, path, name, value| {
        let is_section = value.is_none();
        // Blank lines separate the sections of the file.
        if depth == 0 && (is_section || was_inside) {
            out.push('\n');
        }
        was_inside = depth > 0;
        let mut line = format!("{:indent$}{name}:", "", indent = 2 * depth);
        if let Some(value) = &value {
            let _ = write!(line, " {value}");
            if origins {
                let origin = config.origins.of_value(path, value);
                line = format!("{line:<COMMENT_COLUMN$} # {origin}");
            }
        }
        out.push_str(&line);
        out.push('\n');
    });
    out
}

/// Calls `each` with depth, path, name and text of every key; a section has no text. The values of a key in a
/// search space are written on one line.
fn visit(path: &str, value: &Value, depth: usize, each: &mut impl FnMut(usize, &str, &str, Option<String>)) {
    let Value::Object(entries) = value else { return };
    let path_of_section = path;
    for (name, value) in entries {
        let path = join(path, name);
        match value {
            Value::Object(inner) if !inner.is_empty() && !is_space(path_of_section) => {
                each(depth, &path, name, None);
                visit(&path, value, depth + 1, each);
            }
            value => each(depth, &path, name, Some(flow(value))),
        }
    }
}

/// Returns whether the keys of the section at `path` are dimensions of a search space.
pub(crate) fn is_space(path: &str) -> bool {
    [Autotuning::space, Sweep::space].contains(&path)
}

/// Two configurations are equal if they describe the same run. The origins of values are not compared.
impl PartialEq for Config {
    fn eq(&self, other: &Self) -> bool {
        self.world_size == other.world_size && tree(self) == tree(other)
    }
}
