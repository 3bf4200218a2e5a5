//! `zero-train bench profile`: breaks down the time of a training step by operation, measured inside real steps.

use std::time::Duration;

use candle_core::DType;
use zero_config::Dtype;
use zero_engine::TimeCategory;
use zero_model::ops::measure::{self, Measured};

use super::figures::range;
use super::ranks::{Role, WARM_UP, take_part};
use crate::arguments::ConfigArgs;

/// Prints each operation's share of a step on rank 0, and the rate of matrix products as a percentage of the peak.
/// Returns the exit status.
///
/// # Errors
/// Fails if training would fail.
pub(crate) fn profile(args: &ConfigArgs, steps: usize) -> anyhow::Result<u8> {
    let (config, cores, comm) = match take_part(args)? {
        Role::Launcher(status) => return Ok(status),
        Role::Rank { config, cores, comm } => (config, cores, comm),
    };
    let mut subject = zero_train::train::Steps::open(&config, &comm)?;
    for _ in 0..WARM_UP {
        subject.step()?;
    }
    let dtype = match config.working_dtype() {
        Dtype::F32 => DType::F32,
        Dtype::Bf16 => DType::BF16,
        Dtype::F16 => DType::F16,
    };
    let lanes =
        |subject: &zero_train::train::Steps| TimeCategory::ALL.map(|lane| subject.engine().timing().seconds(lane));
    let (before, mut peaks, mut whole) = (lanes(&subject), vec![], Duration::ZERO);
    measure::start();
    for _ in 0..steps {
        peaks.push(measure::peak_flops(dtype));
        // Without the barrier, the time of the first collective would include waiting for ranks that still measure
        // their peak.
        comm.barrier().wait()?;
        whole += subject.step()?.duration;
    }
    let operations = measure::finish();
    let after = lanes(&subject);
    if comm.rank() == 0 {
        println!("{cores}");
        let lanes = TimeCategory::ALL.map(|lane| (lane, after[lane as usize] - before[lane as usize]));
        let threads = zero_model::ops::threads();
        let peak = range(peaks)[0] * threads as f64;
        print(&operations, lanes, whole.as_secs_f64(), steps as f64, peak);
    }
    comm.barrier().wait()?;
    Ok(0)
}

fn print(
    operations: &[Measured],
    lanes: [(TimeCategory, f64); TimeCategory::ALL.len()],
    whole: f64,
    steps: f64,
    peak: f64,
) {
    println!(
        "a step of rank 0 takes {:.1} ms; peak {:.0} GFLOP/s, measured with multiply-adds in registers",
        whole / steps * 1e3,
        peak / 1e9
    );
    let line = |what: &str, seconds: f64, more: &str| {
        println!("{:>6.1} %  {:>9.2} ms  {what:<34} {more}", seconds / whole * 100.0, seconds / steps * 1e3);
    };
    let (mut products, mut flops) = (0.0, 0.0);
    let mut show = |one: &Measured| {
        let (seconds, calls) = (one.time.as_secs_f64(), one.calls as f64 / steps);
        let what = match one.shape {
            Some([rows, columns, inner]) => format!("product {} {rows} x {columns} x {inner}", one.operation),
            None => one.operation.clone(),
        };
        let Some(done) = one.flops() else { return line(&what, seconds, &format!("{calls:>5} calls")) };
        (products, flops) = (products + seconds, flops + done);
        let rate = done / seconds;
        let more = format!("{calls:>5} calls  {:>6.0} GFLOP/s  {:>5.1} % of the peak", rate / 1e9, rate / peak * 100.0);
        line(&what, seconds, &more);
    };
    let seconds = |wanted: bool| -> f64 {
        operations.iter().filter(|one| one.is_update == wanted).map(|one| one.time.as_secs_f64()).sum()
    };
    let of = |wanted: TimeCategory| lanes.iter().find(|(lane, _)| *lane == wanted).map_or(0.0, |(_, seconds)| *seconds);
    operations.iter().filter(|one| !one.is_update).for_each(&mut show);
    let computing = of(TimeCategory::Forward) + of(TimeCategory::Backward);
    line("rest of forward and backward", computing - seconds(false), "");
    line(TimeCategory::Communication.name(), of(TimeCategory::Communication), "");
    operations.iter().filter(|one| one.is_update).for_each(&mut show);
    match seconds(true) {
        0.0 => line(TimeCategory::Update.name(), of(TimeCategory::Update), ""),
        matrices => line("rest of update", of(TimeCategory::Update) - matrices, ""),
    }
    line(TimeCategory::Data.name(), of(TimeCategory::Data), "");
    line("between instructions", whole - lanes.iter().map(|(_, seconds)| seconds).sum::<f64>(), "");
    if products > 0.0 {
        let rate = flops / products;
        let more = format!("{:>6.0} GFLOP/s  {:>5.1} % of the peak", rate / 1e9, rate / peak * 100.0);
        line("all products together", products, &more);
    }
}
