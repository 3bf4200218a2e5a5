//! `zero-train bench ops`: times every operation of the models at the shapes of two GPTs, and compares it with the
//! limit of the CPU.
//!
//! The limit of a matrix product is the rate of multiply-adds in registers; candle's product is timed too. The limit of
//! any other operation is the rate at which the bytes that it must read and write can be copied, in the same cache.
//! Measurements of the limit and of the operation alternate, so that other load on the machine slows both.

mod cases;
mod gemm;
mod limits;
mod machine;

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::{DType, Result};
use zero_comm::SharedAllocator;
use zero_isa::Isa;
use zero_model::ops::measure::{self, Measured};
use zero_model::ops::set_threads;
use zero_model::random::Stream;

use cases::{Case, Minimum, SHAPES, Shape};
use gemm::Gemm;
use limits::{Floor, peak_flops};
use zero_train::process;

use super::figures::{median, range};

/// Operations that are slower than this fraction of their limit are marked in the output.
const ENOUGH: f64 = 0.6;

/// Selects what to measure.
pub(crate) struct Selection {
    /// Skip attention and element-wise operations.
    pub(crate) products_only: bool,
    /// Number of threads of each operation.
    pub(crate) threads: usize,
    /// Runs of each operation.
    pub(crate) repeats: usize,
}

/// A reference that runs after each run of an operation. All runs use the same buffers.
enum Beside {
    /// The same matrix product by the `gemm` crate.
    Product(Gemm),
    Copy(Floor),
    Nothing,
}

/// The results of one operation. There is one entry per run.
struct Row {
    work: Minimum,
    beside: Beside,
    times: Vec<Duration>,
    /// FLOP/s or bytes/s, and the fraction of the limit.
    rates: Vec<(f64, f64)>,
    /// FLOP/s of the `gemm` crate; empty unless the operation is a matrix product.
    gemm: Vec<f64>,
}

/// Runs the selected operations and prints one row for each. Returns the exit status.
///
/// # Errors
/// Fails if an operation fails.
pub(crate) fn ops(chosen: &Selection) -> anyhow::Result<u8> {
    let Selection { threads, repeats, .. } = *chosen;
    // Use the same thread count and allocator settings as a training rank.
    process::prepare(threads, 1)?;
    set_threads(threads);
    keep_pages();
    println!("{}: {}", Isa::current(), machine::described());
    println!(
        "{}; {repeats} runs of each operation alternate with runs of its limit; columns: time, rate, share of the limit (lowest – highest); `<` marks shares below {:.0} %",
        zero_engine::counted(threads, "thread", "threads"),
        ENOUGH * 100.0
    );
    println!(
        "gemm: rate of candle's gemm crate for the same product in f32 with the same instruction set, and our rate divided by that rate"
    );
    let (mut below, mut all) = (0, 0);
    for dtype in [DType::F32, DType::BF16] {
        for shape in &SHAPES {
            let Shape { name, batch, time, width, vocabulary, .. } = shape;
            println!("\n{name}, {dtype:?}: {} rows, width {width}, vocabulary {vocabulary}", batch * time);
            for case in cases::cases(shape, dtype)? {
                if chosen.products_only && !case.has_products {
                    continue;
                }
                let mut rows = BTreeMap::new();
                (case.run)()?;
                for _ in 0..repeats {
                    measure_once(&case, dtype, chosen, &mut rows)?;
                }
                for (name, row) in &rows {
                    all += 1;
                    below += usize::from(print(name, row));
                }
            }
        }
    }
    println!("\n{below} of {all} rows below {:.0} % of their limit", ENOUGH * 100.0);
    Ok(0)
}

/// Makes the allocator keep freed pages from now on, as it does in training after the first steps.
///
/// The allocator returns pages to the operating system when the resident bytes would exceed the peak in use, including
/// memory noted with [`SharedAllocator::note_elsewhere`]. Operations would then wait for pages to be mapped again.
fn keep_pages() {
    const MORE_THAN_ALL_CASES: usize = 4 << 30;
    // The first large allocation creates the arena.
    drop(black_box(Vec::<u8>::with_capacity(SharedAllocator::LARGE)));
    SharedAllocator::note_elsewhere(MORE_THAN_ALL_CASES);
    SharedAllocator::note_elsewhere(0);
}

fn measure_once(case: &Case, dtype: DType, chosen: &Selection, rows: &mut BTreeMap<String, Row>) -> Result<()> {
    let peak = peak_flops(dtype, chosen.threads);
    if !case.work.is_empty() {
        // The limits were measured after the previous run, which replaced the data in the caches. Therefore run once
        // untimed.
        (case.run)()?;
    }
    measure::start();
    let outcome = (case.run)();
    let measured = measure::finish();
    outcome?;
    for one in measured {
        let Some((name, work)) = named(&one, case, chosen) else { continue };
        let each = one.time.div_f64(one.calls as f64);
        let row = rows.entry(name).or_insert_with(|| Row::new(work, &one, case));
        let (amount, limit) = match (work, &mut row.beside) {
            (Minimum::Moves(bytes), Beside::Copy(floor)) => (bytes, floor.rate(chosen.threads)),
            (Minimum::Moves(amount) | Minimum::Computes(amount), _) => (amount, peak),
        };
        if let (Beside::Product(product), Some(flops)) = (&mut row.beside, one.flops()) {
            let started = Instant::now();
            product.run(Isa::current(), chosen.threads);
            row.gemm.push(flops / one.calls as f64 / started.elapsed().as_secs_f64());
        }
        let rate = amount / each.as_secs_f64();
        row.times.push(each);
        row.rates.push((rate, rate / limit));
    }
    Ok(())
}

/// Returns the printed name of an operation and the work of one call. Returns `None` if the operation is not reported.
fn named(one: &Measured, case: &Case, chosen: &Selection) -> Option<(String, Minimum)> {
    let Measured { operation, shape, calls, .. } = one;
    if let (Some([m, n, k]), Some(flops)) = (shape, one.flops()) {
        return Some((format!("product {operation} {m} x {n} x {k}"), Minimum::Computes(flops / *calls as f64)));
    }
    let (_, work) = case.work.iter().find(|(name, _)| name == operation)?;
    (!chosen.products_only).then(|| (operation.clone(), *work))
}

impl Row {
    fn new(work: Minimum, one: &Measured, case: &Case) -> Self {
        let beside = match (work, one.shape) {
            (Minimum::Moves(bytes), _) => Beside::Copy(Floor::new(bytes, case.touches)),
            (_, Some(shape)) => {
                let [m, n, k] = shape;
                let transposed = [0, 1].map(|operand| one.operation.as_bytes().get(operand) == Some(&b'T'));
                let filled = |stream, len| {
                    let mut values = vec![0.0; len];
                    Stream::new(stream, "bench", 0).fill_normal(0, &mut values);
                    values
                };
                let mut product = Gemm::new(transposed, shape, filled(1, m * k), filled(2, k * n));
                // The first run faults in the packing buffers.
                product.run(Isa::current(), 1);
                Beside::Product(product)
            }
            _ => Beside::Nothing,
        };
        Self { work, beside, times: vec![], rates: vec![], gemm: vec![] }
    }
}

/// Prints the row, and returns whether it is marked as below [`ENOUGH`].
fn print(name: &str, row: &Row) -> bool {
    let [share, low, high] = range(row.rates.iter().map(|(_, share)| share * 100.0).collect());
    let [rate, ..] = range(row.rates.iter().map(|(rate, _)| rate / 1e9).collect());
    let [over, ..] = range(row.rates.iter().zip(&row.gemm).map(|((rate, _), gemm)| rate / gemm).collect());
    let [gemm, ..] = range(row.gemm.iter().map(|rate| rate / 1e9).collect());
    let gemm = if row.gemm.is_empty() { String::new() } else { format!("gemm {gemm:>6.1}  {over:>5.2} x") };
    let is_below = share < ENOUGH * 100.0;
    let line = format!(
        "  {name:<34} {:>9.3} ms  {rate:>7.1} {}  {share:>6.1} % {} {:<17} {gemm}",
        median(&row.times).as_secs_f64() * 1e3,
        if matches!(row.work, Minimum::Computes(_)) { "GFLOP/s" } else { "GB/s   " },
        if is_below { '<' } else { ' ' },
        format!("({low:.1} – {high:.1})"),
    );
    println!("{}", line.trim_end());
    is_below
}
