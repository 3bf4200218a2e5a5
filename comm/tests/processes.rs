//! Ranks as real processes, over rings in shared memory, over TCP, and on two simulated hosts.

#[path = "processes/scenes.rs"]
mod scenes;

/// Large vectors pass through rings in this program.
const IN_PLACE: bool = false;

fn main() {
    scenes::play(&["shm", "tcp", "hosts"]);
}
