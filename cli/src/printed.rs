//! Prints output and warnings of commands.

use zero_config::Config;

pub(crate) use zero_engine::printed::{is_dumb_terminal, show, show_line, tell};

/// Prints the warnings of the configuration to standard error.
pub(crate) fn warn(config: &Config) {
    for warning in &config.warnings {
        tell(&warning.to_string());
    }
}
