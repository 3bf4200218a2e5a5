//! Names of modules in options.

/// Returns whether `name` is the whole path of a module, or its end after a dot.
#[must_use]
pub fn names(name: &str, path: &str) -> bool {
    path.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}
