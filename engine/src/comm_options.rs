//! From the configuration to how ranks talk.

use std::time::Duration;

use zero_comm::{Options, Transport};
use zero_config::Config;

/// Communication as the configuration asks for it. The job's token comes from `ZERO_TRAIN_TOKEN`.
#[must_use]
pub fn comm_options(config: &Config) -> Options {
    let transport = match config.launcher.transport {
        zero_config::Transport::Auto | zero_config::Transport::Threads => Transport::Auto,
        zero_config::Transport::SharedMemory => Transport::SharedMemory,
        zero_config::Transport::Tcp => Transport::Tcp,
    };
    Options {
        timeout: Duration::from_secs_f64(config.launcher.timeout_seconds),
        transport,
        interface: config.launcher.interface.clone(),
        token: std::env::var("ZERO_TRAIN_TOKEN").ok(),
        ..Options::default()
    }
}
