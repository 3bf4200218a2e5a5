//! Tests requests, errors and closing of the queue.

use super::*;

/// Returns a queue on a file of `size` bytes, with one request for four one-page blocks, all of which are in flight.
fn four_blocks(direction: Direction, size: u64) -> (Queue, Pending, Vec<Block>) {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(size).expect("a length");
    let queue = Queue::new(file, "/nvme".into(), ALIGNMENT as u64, vec![]);
    let buffer = AlignedBuffer::zeroed(4 * ALIGNMENT).expect("memory");
    let pending = queue.submit(direction, 0, buffer, 4 * ALIGNMENT);
    let blocks: Vec<Block> = std::iter::from_fn(|| queue.try_next()).collect();
    assert_eq!(blocks.iter().map(|block| block.at).collect::<Vec<_>>(), [0, 4096, 8192, 12288]);
    (queue, pending, blocks)
}

#[test]
fn a_request_fails_with_its_first_error_after_all_blocks_are_reported() {
    let cases = [
        (Direction::Read, Errno::IO, "/nvme: cannot read 4096 bytes at offset 12288 of the swap file: "),
        (Direction::Write, Errno::IO, "/nvme: cannot write 4096 bytes at offset 12288 of the swap file: "),
        (Direction::Write, Errno::NOSPC, "/nvme: no space left to write 4096 bytes at offset 12288"),
        (Direction::Write, Errno::DQUOT, "/nvme: no space left to write 4096 bytes at offset 12288"),
    ];
    for (direction, errno, text) in cases {
        let (queue, pending, mut blocks) = four_blocks(direction, 1 << 20);
        let outcomes = [Err(errno), Ok(ALIGNMENT), Err(Errno::NXIO), Ok(ALIGNMENT)];
        for outcome in outcomes {
            assert!(pending.state.as_ref().expect("in flight").try_recv().is_err(), "completed too early");
            assert!(queue.report(blocks.pop().expect("four"), outcome).is_none());
        }
        let error = pending.wait().expect_err("two errors").to_string();
        assert!(error.starts_with(text), "{error}");
        let Statistics { reads, writes, read_bytes, written_bytes, .. } = queue.statistics();
        assert_eq!((reads + writes, read_bytes + written_bytes), (0, 8192));
        // The queue still accepts requests.
        let next = queue.submit(direction, 0, AlignedBuffer::zeroed(1).expect("memory"), ALIGNMENT);
        queue.report(queue.try_next().expect("a block"), Ok(ALIGNMENT));
        next.wait().expect("done");
    }
}

#[test]
fn short_transfers_are_resumed() {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(1 << 20).expect("a length");
    let queue = Queue::new(file, "/nvme".into(), 1 << 20, vec![]);
    let buffer = || AlignedBuffer::zeroed(4 * ALIGNMENT).expect("memory");
    let pending = queue.submit(Direction::Read, 0, buffer(), 4 * ALIGNMENT);
    let block = queue.report(queue.try_next().expect("a block"), Err(Errno::INTR)).expect("the whole block");
    assert_eq!((block.at, block.part.len()), (0, 4 * ALIGNMENT));
    let block = queue.report(block, Ok(ALIGNMENT + 5)).expect("the rest");
    assert_eq!((block.at, block.part.len()), (4096, 3 * ALIGNMENT));
    assert!(queue.report(block, Ok(3 * ALIGNMENT)).is_none());
    pending.wait().expect("done");
    assert_eq!((queue.statistics().reads, queue.statistics().read_bytes), (1, 4 * 4096));
    // Within the file, a transfer of less than a page is an error, because it cannot be resumed.
    for direction in [Direction::Read, Direction::Write] {
        let pending = queue.submit(direction, 4096, buffer(), ALIGNMENT);
        assert!(queue.report(queue.try_next().expect("a block"), Ok(0)).is_none());
        assert!(matches!(pending.wait(), Err(DiskError::Read { .. } | DiskError::Write { .. })));
    }
}

#[test]
fn closing_fails_waiting_requests_and_completes_blocks_in_flight() {
    let (queue, whole, blocks) = four_blocks(Direction::Write, 1 << 20);
    let waiting = queue.submit(Direction::Read, 0, AlignedBuffer::zeroed(1).expect("memory"), ALIGNMENT);
    queue.close("it was dropped");
    assert!(waiting.wait().expect_err("not started").to_string().contains("it was dropped"));
    let late = queue.submit(Direction::Read, 0, AlignedBuffer::zeroed(1).expect("memory"), ALIGNMENT);
    assert!(matches!(late.wait(), Err(DiskError::Closed { .. })));
    for block in blocks {
        assert!(queue.report(block, Ok(ALIGNMENT)).is_none());
    }
    assert_eq!(whole.wait().expect("all of it was done").len(), 4 * ALIGNMENT);
    assert!(queue.next().is_none());
}

#[test]
fn abandoned_blocks_keep_their_memory() {
    let (queue, pending, mut blocks) = four_blocks(Direction::Read, 1 << 20);
    queue.abandon("io_uring failed");
    assert!(pending.wait().expect_err("an abandoned request").to_string().ends_with("closed: io_uring failed"));
    let mut block = blocks.pop().expect("four");
    block.part.as_room().fill(std::mem::MaybeUninit::new(1));
    assert!(queue.report(block, Ok(ALIGNMENT)).is_none());
}

#[test]
fn a_panic_of_a_service_thread_fails_pending_requests() {
    let (queue, pending, blocks) = four_blocks(Direction::Read, 1 << 20);
    let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _watch = Watch(&queue);
        let _blocks = blocks;
        panic!("a mistake of ours");
    }));
    assert!(served.is_err());
    assert!(matches!(pending.wait(), Err(DiskError::Closed { .. })));
}
