//! Compares the disk tier with the bare disk: `cargo run --release -p zero-tier --example disk -- FOLDER [mebibytes]
//! [repeats]`.

use std::path::PathBuf;
use std::time::Duration;

use zero_tier::bench::{Bench, Load, Size, median};
use zero_tier::{DiskError, Options};

fn main() -> Result<(), DiskError> {
    let mut args = std::env::args().skip(1);
    let folder: PathBuf = args.next().unwrap_or_else(|| ".".into()).into();
    let mut number = |default| args.next().and_then(|arg| arg.parse().ok()).unwrap_or(default);
    let size = Size { file: number(512) << 20, request: 32 << 20, requests: 4, repeats: number(9).max(1) as usize };
    for io_uring in [true, false] {
        let mut bench = Bench::new(&folder, &size, &Options { io_uring, ..Options::default() })?;
        let file = bench.swap_file();
        println!("{:?}, O_DIRECT: {}", file.backend(), file.is_direct());
        file.notices().iter().for_each(|notice| println!("  {notice}"));
        for load in Load::ALL {
            let times = bench.compare(load)?;
            let rate = |runs: &[Duration]| times.bytes as f64 / median(runs).as_secs_f64() / 1e9;
            let ratios = times.ratios();
            let (low, middle, high) = (ratios[0], ratios[ratios.len() / 2], ratios[ratios.len() - 1]);
            println!(
                "  {:<7}{:>6.2} GB/s, the disk alone {:.2} GB/s: {middle:.2} ({low:.2} – {high:.2}) times its time",
                load.name(),
                rate(&times.subject),
                rate(&times.floor)
            );
        }
    }
    Ok(())
}
