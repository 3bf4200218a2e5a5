//! From the configuration to how ranks talk, and to what they must have in common.

use std::fs::File;
use std::io::{self, Read};
use std::time::Duration;

use zero_comm::{LauncherEnvironment, Options, Transport, token};
use zero_config::Config;

use crate::error::Error;

/// What each host may have of its own: everything else of the configuration is the same on all ranks.
const OF_HOSTS: [&str; 7] = [
    "launcher.interface",
    "launcher.threads_per_rank",
    "launcher.bind_cores_to_rank",
    "launcher.bind_core_list",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "activation_checkpointing.nvme_path",
];

/// Communication as the configuration asks for it. The job's token comes from `ZERO_TRAIN_TOKEN`, or from the file that
/// `ZERO_TRAIN_TOKEN_FILE` names; ranks of another version, program or configuration are refused.
///
/// # Errors
/// A token's file that cannot be read, or that others can read; an interface that is not there.
pub fn comm_options(config: &Config, place: &LauncherEnvironment) -> Result<Options, Error> {
    if place.world_size > 1 {
        check_interface(config)?;
    }
    let transport = match config.launcher.transport {
        zero_config::Transport::Auto | zero_config::Transport::Threads => Transport::Auto,
        zero_config::Transport::SharedMemory => Transport::SharedMemory,
        zero_config::Transport::Tcp => Transport::Tcp,
    };
    Ok(Options {
        timeout: timeout(config),
        transport,
        interface: config.launcher.interface.clone(),
        token: token::find(|name| std::env::var_os(name))?,
        terms: if place.world_size > 1 { terms(config) } else { vec![] },
        ..Options::default()
    })
}

/// That this host has the interface of `launcher.interface`, if that names one.
///
/// # Errors
/// There is none of that name, with those there are.
pub fn check_interface(config: &Config) -> Result<(), Error> {
    let help = "name one of these, or an address of this host";
    let found = zero_comm::bind_address(config.launcher.interface.as_deref());
    found.map(|_| ()).map_err(|reason| Error::setting("launcher.interface", reason, help))
}

/// How long a rank waits for another.
#[must_use]
pub fn timeout(config: &Config) -> Duration {
    Duration::from_secs_f64(config.launcher.timeout_seconds)
}

/// Version, program, and each value of the configuration that is not a host's own.
fn terms(config: &Config) -> Vec<(String, String)> {
    let mut terms = vec![("the version".to_string(), env!("CARGO_PKG_VERSION").to_string())];
    // Where a system does not show a process its own file, the version has to do.
    terms.extend(program().map(|program| ("the program's file".to_string(), program)));
    terms.extend(config.leaves().into_iter().filter(|(path, _)| !OF_HOSTS.contains(&path.as_str())));
    terms
}

/// Length and checksum of this program's file, also if another has been put in its place meanwhile. Some milliseconds: the file was read
/// to be run.
fn program() -> io::Result<String> {
    let mut file = File::open("/proc/self/exe")?;
    let (mut buffer, mut length, mut checksum) = (vec![0; 1 << 18], 0, 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(format!("{length} bytes, crc32c {checksum:08x}")),
            count => {
                length += count;
                checksum = crc32c::crc32c_append(checksum, &buffer[..count]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hosts_may_have_of_their_own_is_in_the_configuration_and_not_in_the_terms() {
        let text = "train_batch_size: 1\nactivation_checkpointing: {device: nvme, nvme_path: a}\nzero_optimization:\n  \
                    stage: 3\n  offload_optimizer: {device: nvme, nvme_path: a}\n  offload_param: {device: nvme, nvme_path: a}\n";
        let config = Config::parse("ds.yaml", text).expect("valid");
        let (leaves, terms) = (config.leaves(), terms(&config));
        for own in OF_HOSTS {
            assert!(leaves.iter().any(|(path, _)| path == own), "{own} is no key");
            assert!(!terms.iter().any(|(path, _)| path == own), "{own}");
        }
        assert_eq!(terms.len(), leaves.len() + 2 - OF_HOSTS.len());
        assert!(terms.iter().any(|(path, value)| path == "zero_optimization.stage" && value == "3"));
    }

    #[test]
    fn a_program_has_one_checksum() {
        let file = std::fs::read(std::env::current_exe().expect("a path")).expect("this test");
        let expected = format!("{} bytes, crc32c {:08x}", file.len(), crc32c::crc32c(&file));
        assert_eq!(program().expect("readable"), expected);
    }
}
