//! Ranks as real processes, over rings in shared memory, over TCP, and on two simulated hosts. The program starts
//! itself as each rank, so it has a `main` of its own.

mod scenes;

/// Large vectors pass through rings in this program.
const IN_PLACE: bool = false;

fn main() {
    scenes::play(&["shm", "tcp", "hosts"]);
}
