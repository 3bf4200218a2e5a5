//! `zero-train bench optimizers`: times the update of each optimizer. AdamW is also timed with values in bf16 and with
//! states in 8 bits. Further rows time the codes of collectives.

use half::bf16;
use zero_optim::{
    Adagrad, AdamW, EIGHT_BIT_BLOCK, EightBit, LengthError, Lion, NAdam, Optimizer, RAdam, RmsProp, RmsPropVariant,
    ScheduleFree, Sgd, Step,
};
use zero_partition::{Grads, Stochastic, Values, update};

use super::arrays::{Arrays, adamw, against_floor, bytes_per_parameter, grads, params, state, step};
use super::codes::codes;
use super::figures::{Comparison, spread, summary, timed};

/// Times each optimizer on one thread, alternating with its floor. Returns the exit status.
///
/// # Errors
/// Never fails; all benchmarks have this signature.
pub(crate) fn optimizers(millions: usize, repeats: usize) -> anyhow::Result<u8> {
    zero_model::ops::set_threads(1);
    let parameters = millions * 1_000_000;
    println!(
        "each optimizer updates {millions} million parameters on one thread; {repeats} runs alternate with runs of the floor"
    );
    println!(
        "the floor is a loop that reads and writes the same bytes; the share is the optimizer's rate divided by the floor's rate"
    );
    for (name, optimizer) in all() {
        let times = against_floor(&optimizer, parameters, repeats);
        show(name, bytes_per_parameter(optimizer.states().len()), &times, 1.0);
    }
    for (name, [narrow, narrow_gradients, stochastic]) in [
        ("AdamW, states in bf16", [false, false, false]),
        ("AdamW, gradients in f32", [true, false, false]),
        ("AdamW, all in bf16", [true, true, false]),
        ("AdamW, bf16, stochastic", [true, true, true]),
    ] {
        let times = against_wide_floor(parameters, repeats, [narrow, narrow_gradients, stochastic]);
        let width = |is_narrow| if is_narrow { 2 } else { 4 };
        let bytes = width(narrow_gradients) + 2 * width(narrow) + 2 * 2 * 2;
        show(name, bytes, &times, bytes as f64 / bytes_per_parameter(2) as f64);
    }
    // For each state, the update reads and writes one byte per parameter. The largest value of each block adds 1.6 % to
    // this, which is not counted.
    let times = eight_bit(parameters, repeats);
    show("AdamW, states in 8 bits", 4 * 3 + 4, &times, 16.0 / bytes_per_parameter(2) as f64);
    println!(
        "codes of collectives (qwZ and qgZ), for {millions} million f32 elements; the floor is a copy of the same number of bytes"
    );
    codes(parameters, repeats);
    Ok(0)
}

/// Times AdamW with states in 8 bits, alternating with the floor of AdamW in f32.
fn eight_bit(n: usize, repeats: usize) -> Comparison {
    let (mut values, grads): (Vec<f32>, Vec<f32>) = (params(n).collect(), grads(n).collect());
    let kinds = [EightBit::Signed, EightBit::Unsigned];
    let mut states = kinds.map(|_| (vec![0; n], vec![0.0; n.div_ceil(EIGHT_BIT_BLOCK)]));
    alternated(n, repeats, |step| {
        let states =
            states.iter_mut().zip(kinds).map(|((indices, largest), of)| Values::EightBit(of, indices, largest));
        update(&adamw(), step, Values::F32(&mut values), Grads::F32(&grads), states.collect(), None)
    })
}

/// Prints one row. The subject moves `share` times as many bytes as the floor.
fn show(name: &str, bytes: usize, times: &Comparison, share: f64) {
    println!("  {name:<24} {bytes:>2} bytes  {}  {}", summary(&times.subject), spread(times.shares(share), 1, "%"));
}

/// Times AdamW with values in bf16, alternating with the floor of AdamW in f32.
fn against_wide_floor(n: usize, repeats: usize, [narrow, narrow_gradients, stochastic]: [bool; 3]) -> Comparison {
    let rounded = |values: &mut dyn Iterator<Item = f32>| values.map(bf16::from_f32).collect::<Vec<_>>();
    let (mut wide, mut params): (Vec<f32>, _) = (params(n).collect(), rounded(&mut params(n)));
    let (grads, narrow_grads): (Vec<f32>, _) = (grads(n).collect(), rounded(&mut grads(n)));
    let mut states = [0, 1].map(|index| rounded(&mut state(n, index)));
    alternated(n, repeats, |step| {
        let values = if narrow { Values::Bf16(&mut params) } else { Values::F32(&mut wide) };
        let states = states.iter_mut().map(|state| Values::Bf16(state)).collect();
        let rounding = stochastic.then(|| Stochastic::new(1, 0, step.step, 0, None));
        let grads = if narrow_gradients { Grads::Bf16(&narrow_grads) } else { Grads::F32(&grads) };
        update(&adamw(), step, values, grads, states, rounding)
    })
}

/// Times steps of an AdamW variant, alternating with the floor of AdamW in f32.
fn alternated(n: usize, repeats: usize, mut update: impl FnMut(&Step) -> Result<(), LengthError>) -> Comparison {
    let mut floor = Arrays::new(n, 2);
    let mut take = |number| update(&step(number)).expect("the arrays have the same length");
    take(100);
    floor.floor();
    (101..).take(repeats).map(|number| (timed(|| take(number)), timed(|| floor.floor()))).collect()
}

/// Returns each optimizer that updates element by element, with its name.
pub(super) fn all() -> Vec<(&'static str, Optimizer)> {
    let sgd = |momentum, nesterov| Optimizer::Sgd(Sgd { momentum, nesterov, weight_decay: 0.01, ..Sgd::default() });
    let rmsprop = |variant| Optimizer::RmsProp(RmsProp { variant, weight_decay: 0.01, ..RmsProp::default() });
    vec![
        ("AdamW", adamw()),
        ("Adam", Optimizer::AdamW(AdamW { weight_decay: 0.01, decoupled: false, ..AdamW::default() })),
        ("SGD", sgd(0.0, false)),
        ("SGD, momentum", sgd(0.9, false)),
        ("SGD, Nesterov", sgd(0.9, true)),
        ("Lion", Optimizer::Lion(Lion { weight_decay: 0.01, ..Lion::default() })),
        ("Adagrad", Optimizer::Adagrad(Adagrad { weight_decay: 0.01, ..Adagrad::default() })),
        ("RMSprop", rmsprop(RmsPropVariant::Plain)),
        ("RMSprop, momentum", rmsprop(RmsPropVariant::Momentum(0.9))),
        ("RMSprop, centered", rmsprop(RmsPropVariant::Centered)),
        ("NAdam", Optimizer::NAdam(NAdam { weight_decay: 0.01, ..NAdam::default() })),
        ("RAdam", Optimizer::RAdam(RAdam { weight_decay: 0.01, ..RAdam::default() })),
        (
            "AdamWScheduleFree",
            Optimizer::ScheduleFree(ScheduleFree { weight_decay: 0.01, share: 0.1, ..ScheduleFree::default() }),
        ),
    ]
}
