//! Ranks that are real processes and reach into each other's buffers.

#[path = "processes/scenes.rs"]
mod scenes;

/// Large vectors stay where they are here.
const IN_PLACE: bool = true;

#[global_allocator]
static ALLOCATOR: zero_comm::SharedAllocator = zero_comm::SharedAllocator;

fn main() {
    scenes::play(&["shm"]);
}
