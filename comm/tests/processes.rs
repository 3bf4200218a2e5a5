//! Ranks that are real processes, over rings in shared memory and over TCP.

#[path = "processes/scenes.rs"]
mod scenes;

/// Large vectors go through rings here.
const IN_PLACE: bool = false;

fn main() {
    scenes::play(&["shm", "tcp"]);
}
