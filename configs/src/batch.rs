//! Resolves the batch sizes: `train_batch_size` = `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps`
//! × data-parallel ranks.
//!
//! Any two of the three values determine the third. If only one of the batch sizes is given, the accumulation is 1,
//! as in DeepSpeed.

use crate::config::Config;
use crate::errors::ErrorKind;
use crate::facts::Batch;
use crate::origin::Origin;
use crate::read::node::At;
use crate::read::reader::{Find as _, Resolver};
use crate::world::World;

const TRAIN: &str = Config::train_batch_size;
const MICRO: &str = Config::train_micro_batch_size_per_gpu;
const ACCUMULATION: &str = Config::gradient_accumulation_steps;
/// Default `per_device_train_batch_size` of Hugging Face's Trainer, which replaces a micro-batch size of `auto`. The
/// Trainer also computes a global batch size of `auto` from it.
const TRAINER: usize = 8;

/// Computes the missing sizes from the given ones, for the data-parallel ranks of `world`.
pub(crate) fn resolve(resolver: &mut Resolver<'_>, world: World) -> Batch {
    let (ranks, name) = (world.data_parallel(), world.data_parallel_name());
    let mut keys = resolver.top();
    let typed = [TRAIN, MICRO, ACCUMULATION].map(|name| usize::find(&mut keys, name));
    for (path, value) in [TRAIN, MICRO, ACCUMULATION].into_iter().zip(typed) {
        if value.is_none() {
            resolver.origins.record(path.to_string(), Origin::Auto);
        }
    }
    let [train, micro, accumulation] = typed;
    match (train, micro, accumulation) {
        (Some(train), Some(micro), Some(accumulation)) => {
            let product = product(micro, accumulation, ranks);
            if product != train as u128 {
                let message = format!(
                    "{TRAIN} {train} is not {MICRO} × {ACCUMULATION} × {name} = {micro} × {accumulation} × {ranks} = {product}"
                );
                let help = "remove one of the three keys: it is computed from the other two".to_string();
                contradiction(resolver, &[TRAIN, MICRO, ACCUMULATION], world, message, help);
            }
            Batch { train, micro, accumulation }
        }
        (Some(train), Some(micro), None) => {
            let accumulation = quotient(resolver, train, (MICRO, micro), world);
            Batch { train, micro, accumulation }
        }
        (Some(train), None, Some(accumulation)) => {
            let micro = quotient(resolver, train, (ACCUMULATION, accumulation), world);
            Batch { train, micro, accumulation }
        }
        (Some(train), None, None) => {
            let micro = quotient(resolver, train, (ACCUMULATION, 1), world);
            Batch { train, micro, accumulation: 1 }
        }
        (None, Some(micro), accumulation) => {
            let accumulation = accumulation.unwrap_or(1);
            let train = usize::try_from(product(micro, accumulation, ranks)).unwrap_or_else(|_| {
                let message = format!("the batch size {micro} × {accumulation} × {ranks} overflows");
                contradiction(resolver, &[MICRO, ACCUMULATION], world, message, "use smaller numbers".to_string());
                usize::MAX
            });
            Batch { train, micro, accumulation }
        }
        (None, None, accumulation) if [MICRO, TRAIN].iter().any(|path| resolver.fields.is_auto(path)) => {
            let accumulation = accumulation.unwrap_or(1);
            let train = usize::try_from(product(TRAINER, accumulation, ranks)).unwrap_or(usize::MAX);
            Batch { train, micro: TRAINER, accumulation }
        }
        (None, None, accumulation) => {
            if ![TRAIN, MICRO, ACCUMULATION].iter().any(|path| resolver.report.is_poisoned(path)) {
                let place = resolver.at(MICRO);
                let message = format!("`{MICRO}` or `{TRAIN}` is missing");
                let help = format!("set `{MICRO}`: the number of samples that one rank processes at a time");
                resolver.report.error(ErrorKind::Missing, MICRO, place, message, Some(help));
            }
            Batch { train: 1, micro: 1, accumulation: accumulation.unwrap_or(1) }
        }
    }
}

/// Returns `train` / (`known` × data-parallel ranks). A remainder is reported as an error.
fn quotient(resolver: &mut Resolver<'_>, train: usize, known: (&str, usize), world: World) -> usize {
    let (ranks, name) = (world.data_parallel(), world.data_parallel_name());
    let divisor = product(known.1, 1, ranks);
    if !(train as u128).is_multiple_of(divisor) {
        let written = resolver.at(known.0) != At::Default;
        let (of, paths) = match written {
            true => (format!("{} × {name} = {} × {ranks} = {divisor}", known.0, known.1), vec![TRAIN, known.0]),
            false => (format!("the number of {name} {ranks}"), vec![TRAIN]),
        };
        let message = format!("{TRAIN} {train} is not a multiple of {of}");
        let next = (train as u128).div_ceil(divisor) * divisor;
        contradiction(resolver, &paths, world, message, format!("the next multiple is {next}"));
    }
    usize::try_from(train as u128 / divisor).unwrap_or(1).max(1)
}

fn contradiction(resolver: &mut Resolver<'_>, paths: &[&str], world: World, message: String, help: String) {
    let mut places: Vec<(&str, At)> = paths.iter().map(|path| (*path, resolver.at(path))).collect();
    places.extend(world.places(resolver));
    resolver.report.contradiction(&places, message, Some(help));
}

fn product(micro: usize, accumulation: usize, ranks: usize) -> u128 {
    // Each factor is below 2^32, so the product fits into 128 bits.
    micro as u128 * accumulation as u128 * ranks as u128
}
