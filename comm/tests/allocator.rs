//! Tests the shared allocator in a program of its own, whose memory is measured. Blocks are disjoint and zeroed on
//! request, and survive growing, shrinking and moving between arena and system.

use std::os::unix::process::CommandExt;
use std::process::Command;

use zero_comm::SharedAllocator;

#[global_allocator]
static ALLOCATOR: SharedAllocator = SharedAllocator;

const LARGE: usize = 256 * 1024;

/// A pseudo-random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// A block filled with a value of its own.
struct Marked {
    words: Vec<u64>,
    value: u64,
}

impl Marked {
    fn check(&self) {
        assert!(self.words.iter().all(|word| *word == self.value), "{:p}", self.words.as_ptr());
    }
}

#[test]
fn many_threads_allocate_resize_and_free() {
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            scope.spawn(move || {
                let mut random = Random(thread);
                let mut held: Vec<Marked> = Vec::new();
                for round in 0..400u64 {
                    let words = random.below(3 * LARGE / 8);
                    let value = thread << 32 | (round + 1);
                    match random.below(5) {
                        0 => {
                            let zeros = vec![0u64; words];
                            assert!(zeros.iter().all(|word| *word == 0), "the block is not zeroed");
                        }
                        1 if !held.is_empty() => {
                            let index = random.below(held.len());
                            let block = &mut held[index];
                            block.check();
                            block.words.resize(words, block.value);
                            block.words.shrink_to_fit();
                        }
                        2 | 3 if held.len() > 6 => held.swap_remove(random.below(held.len())).check(),
                        _ => held.push(Marked { words: vec![value; words], value }),
                    }
                }
                held.iter().for_each(Marked::check);
            });
        }
    });
}

#[test]
fn freed_memory_is_reused() {
    let resident = || -> usize {
        let status = std::fs::read_to_string("/proc/self/status").expect("a status");
        let line = status.lines().find(|line| line.starts_with("RssShmem:")).expect("shared memory");
        line.split_whitespace().nth(1).and_then(|kilobytes| kilobytes.parse().ok()).expect("a number")
    };
    for _ in 0..200 {
        assert!(std::hint::black_box(vec![1u8; 8 << 20]).iter().all(|byte| *byte == 1));
    }
    // The limit allows for the blocks of the other tests and for the allocator's slack.
    assert!(resident() < 400 << 10, "{} KiB", resident());
}

#[test]
fn an_allocation_larger_than_memory_fails() {
    let mut vector = Vec::<u8>::new();
    assert!(vector.try_reserve_exact(1 << 46).is_err());
    assert!(vector.try_reserve_exact(1 << 20).is_ok());
}

#[test]
fn children_do_not_inherit_the_arena() {
    drop(vec![1u8; LARGE]);
    let own = std::fs::read_dir("/proc/self/fd").expect("descriptors").flatten();
    let is_arena = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|path| path.to_string_lossy().contains("zero-comm-arena"))
    };
    assert_eq!(own.filter(is_arena).count(), 1);
    let output = Command::new("ls").arg0("ls").args(["-l", "/proc/self/fd"]).output().expect("ls runs");
    assert!(output.status.success() && !output.stdout.is_empty());
    assert!(!String::from_utf8_lossy(&output.stdout).contains("zero-comm"));
}
