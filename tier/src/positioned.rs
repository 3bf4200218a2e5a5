//! The thread backend: each thread transfers one block at a time with `pread` or `pwrite`.

use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::io::{pread, pwrite};

use crate::error::DiskError;
use crate::queue::{Queue, Watch};
use crate::schedule::Direction;

/// Starts `count` threads, which serve the queue until it closes, and adds them to `threads`.
pub(crate) fn start(queue: &Arc<Queue>, count: usize, threads: &mut Vec<JoinHandle<()>>) -> Result<(), DiskError> {
    for index in 0..count {
        let serving = Arc::clone(queue);
        let thread = std::thread::Builder::new().name(format!("disk {index}"));
        let thread = thread.spawn(move || serve(&serving));
        threads.push(thread.map_err(|error| DiskError::refused(&queue.folder, "start a thread", error))?);
    }
    Ok(())
}

fn serve(queue: &Queue) {
    let _watch = Watch(queue);
    while let Some(mut block) = queue.next() {
        loop {
            let outcome = match block.direction {
                Direction::Read => pread(&queue.file, block.part.as_room(), block.at).map(|(read, _)| read.len()),
                Direction::Write => pwrite(&queue.file, block.part.as_bytes(), block.at),
            };
            match queue.report(block, outcome) {
                Some(rest) => block = rest,
                None => break,
            }
        }
    }
}
