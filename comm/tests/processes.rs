//! Ranks that are real processes, over rings in shared memory, over TCP, and on what counts as two hosts.

#[path = "processes/scenes.rs"]
mod scenes;

/// Large vectors go through rings here.
const IN_PLACE: bool = false;

fn main() {
    scenes::play(&["shm", "tcp", "hosts"]);
}
