//! Simulates two hosts by two network namespaces that a virtual cable connects.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::case::{Case, text};
use crate::launch::cable::Cable;

/// Addresses of the interface `eth0` of the two hosts.
pub(crate) const ADDRESSES: [&str; 2] = ["10.231.0.1", "10.231.0.2"];

/// Prefix of a namespace's name. The ID of the test's process follows.
const PREFIX: &str = "zero-train-test-";

/// Two network namespaces. Dropping it deletes them, also when a test fails.
pub(crate) struct Hosts {
    names: [String; 2],
}

impl Hosts {
    /// Creates and connects two namespaces. Prints the reason and returns `None` if that is not permitted.
    pub(crate) fn new() -> Option<Self> {
        let veth = |[first, second]: [&str; 2]| {
            ip(&["link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second])
        };
        Some(Self::connected_by(veth)?.0)
    }

    /// Like [`Hosts::new`], with a cable that damages frames on request.
    pub(crate) fn with_damaging_cable() -> Option<(Self, Cable)> {
        Self::connected_by(Cable::start)
    }

    fn connected_by<T>(cable: impl FnOnce([&str; 2]) -> Result<T, String>) -> Option<(Self, T)> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        remove_those_of_ended_tests();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |host: usize| format!("{PREFIX}{}-{number}-{host}", std::process::id());
        let hosts = Self { names: [0, 1].map(name) };
        match hosts.connect(cable) {
            Ok(cable) => Some((hosts, cable)),
            Err(reason) => {
                eprintln!("skipped, no network namespaces: {reason}");
                None
            }
        }
    }

    fn connect<T>(&self, cable: impl FnOnce([&str; 2]) -> Result<T, String>) -> Result<T, String> {
        let names = [self.name(0), self.name(1)];
        for name in names {
            ip(&["netns", "add", name])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        let cable = cable(names)?;
        for (host, address) in ADDRESSES.iter().enumerate() {
            ip(&["-n", self.name(host), "address", "add", &format!("{address}/30"), "dev", "eth0"])?;
            ip(&["-n", self.name(host), "link", "set", "eth0", "up"])?;
        }
        Ok(cable)
    }

    pub(crate) fn name(&self, host: usize) -> &str {
        &self.names[host]
    }

    /// Connects (`up`) or disconnects (`down`) the cable.
    pub(crate) fn link(&self, state: &str) {
        ip(&["-n", self.name(0), "link", "set", "eth0", state]).unwrap();
    }

    /// Returns a command that runs the binary on a host.
    pub(crate) fn command(&self, case: &Case, host: usize, args: &[&str]) -> Command {
        let there = ["netns", "exec", self.name(host), env!("CARGO_BIN_EXE_zero-train")];
        case.command_of(Path::new("ip"), &[&there, args].concat())
    }

    /// Returns the bytes that the host has sent over the cable, with the headers of all layers.
    pub(crate) fn sent(&self, host: usize) -> u64 {
        let counter = "/sys/class/net/eth0/statistics/tx_bytes";
        ip(&["netns", "exec", self.name(host), "cat", counter]).unwrap().trim().parse().unwrap()
    }

    /// Returns the TCP ports on which a process of the host listens.
    pub(crate) fn listening(&self, host: usize) -> Vec<u16> {
        let table = ip(&["netns", "exec", self.name(host), "cat", "/proc/net/tcp"]).unwrap();
        // Columns: index, local address:port, remote address:port, state. All are hexadecimal; state 0A is LISTEN.
        let port = |line: &str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let listens = fields[3] == "0A";
            listens.then(|| u16::from_str_radix(fields[1].rsplit_once(':').unwrap().1, 16).unwrap())
        };
        table.lines().skip(1).filter_map(port).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // Fails for a namespace that was never created.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

/// Deletes the namespaces of test processes that were killed.
fn remove_those_of_ended_tests() {
    for name in ip(&["netns", "list"]).unwrap_or_default().split_whitespace() {
        let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

/// Runs `ip`. Returns its output, or the reason of its failure.
fn ip(args: &[&str]) -> Result<String, String> {
    let output = Command::new("ip").args(args).output().map_err(|error| format!("ip: {error}"))?;
    let line = || format!("ip {}: {}", args.join(" "), text(&output.stderr).trim());
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(line()) }
}
