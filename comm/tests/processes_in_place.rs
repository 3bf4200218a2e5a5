//! Ranks as real processes that access each other's buffers in place, in a program of its own with the shared
//! allocator.

#[path = "processes/scenes.rs"]
mod scenes;

/// Large vectors are accessed in place in this program.
const IN_PLACE: bool = true;

#[global_allocator]
static ALLOCATOR: zero_comm::SharedAllocator = zero_comm::SharedAllocator;

fn main() {
    scenes::play(&["shm"]);
}
