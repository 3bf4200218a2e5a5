//! What a training step asks of the driver: launches, copies, bytes, and how often the host waits, counted by the mock of the driver for models
//! with as many layers as GPT-2's. Width makes no difference to the counts, so these are narrow.
#![cfg(feature = "cuda")]

#[path = "../../cuda/tests/mock/mod.rs"]
mod mock;
mod world;

use std::ffi::CStr;

use world::{BF16, FP16, batch, config, gpt2_config, world};
use zero_train::{Engine, Error, zoo};

const COUNTERS: [&CStr; 15] = [
    c"mock_launches",
    c"mock_products",
    c"mock_lt_products",
    c"mock_fills",
    c"mock_copies_within",
    c"mock_copies_up",
    c"mock_bytes_up",
    c"mock_copies_down",
    c"mock_bytes_down",
    c"mock_pool_allocations",
    c"mock_waits",
    c"mock_waits_stream",
    c"mock_waits_event",
    c"mock_waits_copy",
    c"mock_waits_free",
];

/// The counters, in the order of [`COUNTERS`].
#[derive(Clone, Copy)]
struct Counts([i64; COUNTERS.len()]);

impl Counts {
    fn now() -> Self {
        Self(COUNTERS.map(mock::read))
    }

    fn since(self, before: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] - before.0[i]))
    }

    fn of(&self, name: &CStr) -> i64 {
        self.0[COUNTERS.iter().position(|counter| *counter == name).expect("a counter")]
    }
}

/// What the third step of a model asks for, from when its first micro-batch is loaded to its end. `None` where there are no kernels.
fn third_step(layers: usize, micro_batches: usize, more: &str) -> Option<Counts> {
    let text = format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\ntraining: {{device: cuda}}\n\
         zero_optimization: {{stage: 1}}\n{more}"
    );
    let counted = world(1, |comm| {
        let model = zoo::gpt2(&zoo::Gpt2Config { n_layer: layers, ..gpt2_config() });
        let mut engine = Engine::with_communicator(config(1, &text), model, comm)?;
        let mut loaded = None;
        for step in 0..3 {
            loaded = None;
            engine.train_with(|micro_batch| {
                loaded.get_or_insert_with(Counts::now);
                Ok(batch(2 * step + micro_batch as u64, 2))
            })?;
        }
        Ok::<_, Error>(Counts::now().since(loaded.expect("a step loads a batch")))
    });
    match counted.into_iter().next()? {
        Ok(counts) => Some(counts),
        Err(error) if mock::has_no_kernels(&error) => None,
        Err(error) => panic!("{error}"),
    }
}

/// All that comes between the load and the loss is put on the GPU's stream without a wait; what the host learns comes with the loss.
#[test]
fn a_step_waits_at_its_end_alone() {
    if !mock::only_the_mock() {
        return;
    }
    for (what, layers, micro_batches, more) in
        [("124M", 12, 1, BF16), ("1.5B", 48, 1, BF16), ("f32, two micro-batches", 12, 2, ""), ("fp16", 12, 1, FP16)]
    {
        let Some(counts) = third_step(layers, micro_batches, more) else { return };
        let line: Vec<String> =
            COUNTERS.iter().map(|name| format!("{} {}", &name.to_str().unwrap()[5..], counts.of(name))).collect();
        println!("{what}: {}", line.join(", "));
        let losses = micro_batches as i64;
        // The wait for all of the step, and then a copy of each loss: nothing else comes down, and nothing is waited for before.
        let waits = [c"mock_waits", c"mock_waits_stream", c"mock_waits_copy"].map(|name| counts.of(name));
        assert_eq!(waits, [1 + losses, 1, losses], "{what}");
        assert_eq!(
            [c"mock_copies_down", c"mock_bytes_down"].map(|name| counts.of(name)),
            [losses, 4 * losses],
            "{what}"
        );
        // What goes up is tokens and positions, however many layers there are.
        assert!(counts.of(c"mock_copies_up") <= 5 * losses && counts.of(c"mock_bytes_up") <= 384 * losses, "{what}");
        // The norm and the update are 7 launches for the 148 parameters of 12 layers, 18 for the 580 of 48.
        let most = losses * (21 * layers as i64 + 26) + 20;
        assert!(counts.of(c"mock_launches") <= most, "{what}: more than {most} launches");
    }
}
