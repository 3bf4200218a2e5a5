//! Fields that the program changed after the configuration was resolved. They override the written values; everything
//! else is resolved and checked again, as for a file.

use serde_json::Value as Json;

use crate::config::Config;
use crate::errors::{ErrorKind, Errors};
use crate::read::node::{At, Node, Value};
use crate::schema::{TYPE, join};
use crate::typed::Typed;
use crate::write::resolved::{is_space, tree};

impl Config {
    /// Resolves the configuration for `world_size` ranks. Fields that the program has changed count as set by the user.
    /// Derived values, such as the batch sizes, are computed again.
    ///
    /// # Errors
    /// The same errors as for a file with these values, for example a batch size that is not divisible by the number of
    /// ranks.
    pub fn for_world_size(&self, world_size: usize) -> Result<Self, Errors> {
        let before = self.typed.resolve(Some(self.world_size))?;
        let changes = changes(&self.typed, &before, self);
        if changes.is_empty() {
            return match world_size == self.world_size {
                true => Ok(self.clone()),
                false => self.typed.resolve(Some(world_size)),
            };
        }
        let changed = self.typed.with(&changes)?;
        let resolved = changed.resolve(Some(world_size))?;
        finite(&changes, &resolved, changed)?;
        Ok(resolved)
    }
}

/// Returns the values that differ, each with its path. If the file does not contain a section whose keys depend on its
/// `type`, the whole section counts as one value.
fn changes(typed: &Typed, before: &Config, after: &Config) -> Vec<(String, Node)> {
    let mut list = Vec::new();
    compare(typed, "", &tree(before), &tree(after), &mut list);
    list
}

fn compare(typed: &Typed, path: &str, before: &Json, after: &Json, list: &mut Vec<(String, Node)>) {
    let is_typed = |json: &Json| json.get(TYPE).is_some();
    match (before, after) {
        (before, after) if before == after => {}
        (Json::Object(before), Json::Object(entries))
            if before.keys().eq(entries.keys())
                && !is_space(path)
                && (!is_typed(after) || typed.fields.sections.contains_key(path)) =>
        {
            for (name, value) in entries {
                compare(typed, &join(path, name), &before[name], value, list);
            }
        }
        _ => list.push((path.to_string(), Node::of_json(after, At::Program))),
    }
}

/// Checks that the program set no number to NaN or infinity. JSON has neither: such a number turns into null.
fn finite(changes: &[(String, Node)], resolved: &Config, typed: Typed) -> Result<(), Errors> {
    let tree = tree(resolved);
    let mut report = typed.report;
    for (path, node) in changes.iter().filter(|(_, node)| node.value == Value::Null) {
        let now = path.split('.').try_fold(&tree, |json, name| json.get(name));
        if now.is_some_and(Json::is_f64) {
            let message = format!("`{path}` is set to a number that is not finite");
            report.error(ErrorKind::Value, path, node.at, message, None);
        }
    }
    if report.has_errors() { Err(report.into_errors()) } else { Ok(()) }
}
