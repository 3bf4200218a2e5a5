//! A disk in turn with its floor: `cargo run --release -p zero-tier --example bench -- FOLDER [megabytes] [repeats] [threads]`.

use std::path::PathBuf;
use zero_tier::bench::{Bench, Load, Size, median};
use zero_tier::{DiskError, Options};

fn main() -> Result<(), DiskError> {
    let mut args = std::env::args().skip(1);
    let folder: PathBuf = args.next().unwrap_or_else(|| ".".into()).into();
    let mut number = |default| args.next().and_then(|arg| arg.parse().ok()).unwrap_or(default);
    let (megabytes, repeats) = (number(1024), number(7));
    let size = Size { file: megabytes << 20, request: 32 << 20, requests: 4, repeats: repeats as usize };
    let options = Options { io_uring: number(0) == 0, ..Options::default() };
    let mut bench = Bench::new(&folder, &size, &options)?;
    for load in Load::ALL {
        let times = bench.compare(load)?;
        let rate = |times: &[_]| {
            times
                .iter()
                .map(|t: &std::time::Duration| format!("{:.2} ", times_rate(size_of_load(&size, load), *t)))
                .collect::<String>()
        };
        println!(
            "{:>7} subject {:.2} GB/s  floor {:.2} GB/s  ratio {:.2?}  [{} | {}]",
            load.name(),
            times_rate(times.bytes, median(&times.subject)),
            times_rate(times.bytes, median(&times.floor)),
            times.ratios(),
            rate(&times.subject),
            rate(&times.floor)
        );
    }
    println!(
        "{:?} {:?} {:?}",
        bench.swap_file().backend(),
        bench.swap_file().notices(),
        bench.swap_file().statistics()
    );
    Ok(())
}
fn size_of_load(size: &Size, load: Load) -> u64 {
    size.file * if load == Load::Update { 2 } else { 1 }
}
fn times_rate(bytes: u64, t: std::time::Duration) -> f64 {
    bytes as f64 / t.as_secs_f64() / 1e9
}
