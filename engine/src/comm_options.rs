//! Derives from the configuration the communication options, and the values that must be equal on all ranks.

use std::fs::File;
use std::io::{self, Read};
use std::time::Duration;

use zero_comm::{Communicator, LauncherEnvironment, Options, ProcessTransport, token};
use zero_config::Config;
use zero_model::Model;

use crate::error::Error;

/// Keys that may differ between hosts. All other keys must be equal on all ranks.
const HOST_SPECIFIC: [&str; 7] = [
    "launcher.interface",
    "launcher.threads_per_rank",
    "launcher.bind_cores_to_rank",
    "launcher.bind_core_list",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "activation_checkpointing.nvme_path",
];

/// Reads this process's rank and the number of ranks from the launcher's environment.
///
/// # Errors
/// Fails if the environment's variables contradict each other.
pub fn place() -> Result<LauncherEnvironment, Error> {
    LauncherEnvironment::from_environment(|name| std::env::var(name).ok()).map_err(|error| {
        let help = "unset the launcher's variables, such as RANK and WORLD_SIZE, or start all ranks with one launcher";
        Error::setting("launcher", error.to_string(), help)
    })
}

/// Converts the configuration to communication options. The job's token comes from `ZERO_TRAIN_TOKEN`, or from the file
/// that `ZERO_TRAIN_TOKEN_FILE` names. A rank whose version, program file or configuration differs is rejected when it
/// connects.
///
/// # Errors
/// Fails if the token file cannot be read, if other users can read it, or if the host lacks the configured interface.
pub fn comm_options(config: &Config, place: &LauncherEnvironment) -> Result<Options, Error> {
    if place.world_size > 1 {
        check_interface(config)?;
    }
    let transport = match config.launcher.transport {
        zero_config::Transport::Auto | zero_config::Transport::Threads => ProcessTransport::Auto,
        zero_config::Transport::SharedMemory => ProcessTransport::SharedMemory,
        zero_config::Transport::Tcp => ProcessTransport::Tcp,
    };
    Ok(Options {
        timeout: timeout(config),
        transport,
        interface: config.launcher.interface.clone(),
        token: token::find(|name| std::env::var_os(name))?,
        terms: if place.world_size > 1 { terms_at(config, place) } else { vec![] },
        ..Options::default()
    })
}

/// Checks that this host has the interface of `launcher.interface`, if that key is set.
///
/// # Errors
/// Fails if the interface does not exist; the error lists the existing ones.
pub fn check_interface(config: &Config) -> Result<(), Error> {
    let help = "set it to one of the host's interfaces or addresses";
    let found = zero_comm::bind_address(config.launcher.interface.as_deref());
    found.map(|_| ()).map_err(|reason| Error::setting("launcher.interface", reason, help))
}

/// Returns how long a rank waits for another rank before it reports an error.
#[must_use]
pub fn timeout(config: &Config) -> Duration {
    Duration::from_secs_f64(config.launcher.timeout_seconds)
}

/// Resolves the configuration for the ranks of `comm`, and checks that all ranks have the same configuration, except
/// for host-specific keys. Collective. Processes that connected with [`comm_options`] were compared when they
/// connected; this function is for ranks that connect in another way, such as threads.
///
/// # Errors
/// Fails if the configuration does not match the number of ranks. Fails on every rank if the configurations of two
/// ranks differ. The error names the first key that differs and both values.
pub fn agreed(config: &Config, comm: &dyn Communicator) -> Result<Config, Error> {
    let config = config.for_world_size(comm.size()).inspect_err(|error| comm.abort(&error.to_string()))?;
    if comm.size() > 1 {
        zero_comm::agree(comm, &shared(&config))?;
    }
    Ok(config)
}

/// Checks that all ranks have built the same model: the same layers and parameters in the same order. Ranks whose
/// models differ only in the order of equal shapes would otherwise mix the values of different parameters. Collective.
///
/// # Errors
/// Fails on every rank if the models of two ranks differ. The error names the first layer or parameter that differs.
pub(crate) fn agree_on(model: &Model, comm: &dyn Communicator) -> Result<(), Error> {
    if comm.size() > 1 {
        zero_comm::agree(comm, &parts(model))?;
    }
    Ok(())
}

/// Returns the layers, parameters and buffers of a model. The shape of a parameter that is divided among ranks is the
/// shape of this rank's part, so only the number of its elements is compared.
fn parts(model: &Model) -> Vec<(String, String)> {
    let layers = model.layers().iter().map(|layer| format!("`{}`", layer.name()));
    let parameters = model.parameters().iter().map(|parameter| match parameter.cut() {
        Some(_) => format!("`{}` with {} elements", parameter.name(), parameter.whole_elements()),
        None => format!("`{}` {:?}", parameter.name(), parameter.shape()),
    });
    let buffers = model.buffers().iter().map(|buffer| format!("`{}` {:?}", buffer.name(), buffer.shape()));
    let named = |kind: &'static str| move |(index, part)| (format!("{kind} {index} of the program's model"), part);
    let layers = layers.enumerate().map(named("layer"));
    let parameters = parameters.enumerate().map(named("parameter"));
    layers.chain(parameters).chain(buffers.enumerate().map(named("buffer"))).collect()
}

/// Returns the values that all ranks must share. If the layout depends on hosts, these values include the order of
/// ranks, because the launcher must then number the ranks host by host.
fn terms_at(config: &Config, place: &LauncherEnvironment) -> Vec<(String, String)> {
    let order = config.depends_on_hosts().then(|| ("the order of ranks".to_string(), order(place)));
    terms(config).into_iter().chain(order).collect()
}

/// Describes whether this rank's number is consistent with numbering ranks host by host. The number of rank 0 always
/// is.
fn order(place: &LauncherEnvironment) -> String {
    let (local, size) = (place.local_rank, place.local_world_size.max(1));
    if place.rank % size == local {
        return "host by host".into();
    }
    format!("not host by host (it is local rank {local} of {size})")
}

/// Returns the values that all ranks must share: version, program file, and every configuration key that is not
/// host-specific.
fn terms(config: &Config) -> Vec<(String, String)> {
    let mut terms = vec![("the version".to_string(), env!("CARGO_PKG_VERSION").to_string())];
    // If `/proc/self/exe` is unavailable, only the version is compared, not the program file.
    terms.extend(program().map(|program| ("the program's file".to_string(), program)));
    terms.extend(shared(config));
    terms
}

/// Returns the keys that are not host-specific, with their values. If values depend on the number of ranks per host,
/// that number comes first.
fn shared(config: &Config) -> Vec<(String, String)> {
    let hosts = config.depends_on_hosts().then(|| ("ranks per host".to_string(), config.ranks_per_host().to_string()));
    let keys = config.leaves().into_iter().filter(|(path, _)| !HOST_SPECIFIC.contains(&path.as_str()));
    hosts.into_iter().chain(keys).collect()
}

/// Returns the length and the CRC-32C of the running program's file, even if the file has been replaced since the
/// start. This takes only a few milliseconds, because the file is in the page cache.
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
    fn ranks_do_not_compare_host_specific_keys() {
        let text = "train_batch_size: 1\nactivation_checkpointing: {device: nvme, nvme_path: a}\nzero_optimization:\n  \
                    stage: 3\n  offload_optimizer: {device: nvme, nvme_path: a}\n  offload_param: {device: nvme, nvme_path: a}\n";
        let config = Config::parse("ds.yaml", text).expect("valid");
        let (leaves, terms) = (config.leaves(), terms(&config));
        for own in HOST_SPECIFIC {
            assert!(leaves.iter().any(|(path, _)| path == own), "{own} is not a key");
            assert!(!terms.iter().any(|(path, _)| path == own), "{own}");
        }
        assert_eq!(terms.len(), leaves.len() + 2 - HOST_SPECIFIC.len());
        assert!(terms.iter().any(|(path, value)| path == "zero_optimization.stage" && value == "3"));
    }

    #[test]
    fn a_layout_that_depends_on_hosts_needs_ranks_host_by_host() {
        let place = |rank, local_rank| LauncherEnvironment {
            rank,
            world_size: 4,
            local_rank,
            local_world_size: 2,
            ..LauncherEnvironment::alone()
        };
        let text = "train_batch_size: 4\nzero_optimization: {stage: 3}\nmesh: {data_parallel_shard_degree: auto}\n";
        let config = Config::parse("ds.yaml", text).expect("valid");
        let order = |place| terms_at(&config, &place).pop().expect("terms").1;
        for (rank, local_rank) in [(0, 0), (1, 1), (2, 0), (3, 1)] {
            assert_eq!(order(place(rank, local_rank)), "host by host");
        }
        // Ranks 0 and 2 are on one host, and ranks 1 and 3 on the other.
        assert_eq!(order(place(1, 0)), "not host by host (it is local rank 0 of 2)");
        assert_eq!(order(place(2, 1)), "not host by host (it is local rank 1 of 2)");
        let plain = Config::parse("ds.yaml", "train_batch_size: 4").expect("valid");
        assert_eq!(terms_at(&plain, &place(1, 0)), terms(&plain));
    }

    #[test]
    fn the_checksum_is_of_the_program_file() {
        let file = std::fs::read(std::env::current_exe().expect("a path")).expect("this test");
        let expected = format!("{} bytes, crc32c {:08x}", file.len(), crc32c::crc32c(&file));
        assert_eq!(program().expect("readable"), expected);
    }
}
