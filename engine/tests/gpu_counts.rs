//! Driver calls of a training step: launches, copies, bytes and host waits. A mock driver counts them for models with
//! GPT-2's layers. The counts do not depend on the width of a model, so the models are narrow.

#[path = "../../cuda/emulator/mock/mod.rs"]
mod mock;
mod world;

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use world::{BF16, FP16, batch, config, gpt2_config, world};
use zero_engine::{Engine, Error, zoo};

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

/// Returns whether the driver is the mock and kernels can record what they read and write.
fn is_ready() -> bool {
    static READY: OnceLock<bool> = OnceLock::new();
    *READY.get_or_init(|| mock::only_the_mock() && mock::watch_kernels())
}

/// Keeps other tests from running at the same time, because the counters are global to the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Trains three steps. Returns the values of `now` at the first load and at the end of the third step. `watches` makes
/// kernels record their memory accesses. `None` if this build has no kernels.
fn third_step<T: Send>(
    model: &zoo::Gpt2Config,
    [samples, micro_batches]: [usize; 2],
    more: &str,
    watches: bool,
    now: impl Fn() -> T + Sync,
) -> Option<[T; 2]> {
    let _alone = alone();
    mock::set(c"mock_watches", watches.into());
    let text = format!(
        "train_micro_batch_size_per_gpu: {samples}\ngradient_accumulation_steps: {micro_batches}\n\
         training: {{device: cuda}}\nzero_optimization: {{stage: 1}}\n{more}"
    );
    let counted = world(1, |comm| {
        let mut engine = Engine::with_communicator(config(1, &text), zoo::gpt2(model), comm)?;
        let mut loaded = None;
        for step in 0..3 {
            loaded = None;
            engine.train_with(|micro_batch| {
                loaded.get_or_insert_with(&now);
                Ok(batch(2 * step + micro_batch as u64, samples))
            })?;
        }
        Ok::<_, Error>([loaded.expect("a step loads a batch"), now()])
    });
    match counted.into_iter().next()? {
        Ok(counts) => Some(counts),
        Err(error) if mock::has_no_kernels(&error) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Features without kernels are refused before a GPU is opened.
#[test]
fn models_without_kernels_are_refused_by_their_key() {
    let model = "{type: llama, vocab_size: 61, hidden_size: 32, num_attention_heads: 4, intermediate_size: 48, num_hidden_layers: 1";
    for (key, value) in
        [("partial_rotary_factor", "0.5"), ("norm_unit_offset", "true"), ("hidden_act", "gelu_pytorch_tanh")]
    {
        let text = format!("train_batch_size: 1\ntraining: {{device: cuda}}\nmodel: {model}, {key}: {value}}}");
        let error = world(1, |comm| {
            let config = config(1, &text);
            let layers = zero_engine::configured_layers(&config, None).expect("a model");
            Engine::with_communicator(config, layers, comm).err().expect("it has no kernel").to_string()
        })
        .remove(0);
        assert!(error.contains(&format!("in: model.{key}")) && error.contains("the GPU has no kernel"), "{error}");
    }
}

#[test]
fn quantized_weights_are_refused_by_their_key() {
    let text =
        "train_batch_size: 1\ntraining: {device: cuda}\nadapter: {r: 4}\nquantization_config: {load_in_4bit: true}";
    let error = world(1, |comm| {
        let layers = zoo::gpt2(&gpt2_config());
        Engine::with_communicator(config(1, text), layers, comm).err().expect("it has no kernel").to_string()
    })
    .remove(0);
    assert!(error.contains("quantized weights are not implemented on GPUs"), "{error}");
    assert!(error.contains("in: quantization_config") && error.contains("training.device: cpu"), "{error}");
}

/// The host enqueues all work of a step on the GPU's stream, from the load to the loss, without a wait. It reads other
/// results together with the loss.
#[test]
fn a_step_waits_only_at_its_end() {
    if !is_ready() {
        return;
    }
    for (what, layers, micro_batches, more) in
        [("124M", 12, 1, BF16), ("1.5B", 48, 1, BF16), ("f32, two micro-batches", 12, 2, ""), ("fp16", 12, 1, FP16)]
    {
        let model = zoo::Gpt2Config { n_layer: layers, ..gpt2_config() };
        let Some([before, after]) = third_step(&model, [2, micro_batches], more, false, Counts::now) else { return };
        let counts = after.since(before);
        let line: Vec<String> =
            COUNTERS.iter().map(|name| format!("{} {}", &name.to_str().unwrap()[5..], counts.of(name))).collect();
        println!("{what}: {}", line.join(", "));
        let losses = micro_batches as i64;
        // The host waits once for the whole step and once for the copy of each loss. It waits for nothing else, and
        // nothing else is copied to the host.
        let waits = [c"mock_waits", c"mock_waits_stream", c"mock_waits_copy"].map(|name| counts.of(name));
        assert_eq!(waits, [1 + losses, 1, losses], "{what}");
        assert_eq!(
            [c"mock_copies_down", c"mock_bytes_down"].map(|name| counts.of(name)),
            [losses, 4 * losses],
            "{what}"
        );
        // Only tokens and positions are copied to the GPU, for any number of layers.
        assert!(counts.of(c"mock_copies_up") <= 5 * losses && counts.of(c"mock_bytes_up") <= 384 * losses, "{what}");
        // Norm and update take 7 launches for the 148 parameters of 12 layers, and 18 for the 580 parameters of 48
        // layers.
        let most = losses * (21 * layers as i64 + 26) + 20;
        assert!(counts.of(c"mock_launches") <= most, "{what}: more than {most} launches");
    }
}

/// Trains three steps of a GPT-2 with 12 layers on several ranks. Returns, for the third step of each rank, the
/// collectives and messages, and how many of them the host waited for.
fn host_waits(ranks: usize, layout: &str, checks: bool) -> Option<Vec<[u64; 2]>> {
    let text = format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: 4\ntraining: {{device: cuda}}\n\
         launcher: {{gpu_transport: nccl, check_collectives: {checks}}}\n{BF16}\n{layout}"
    );
    let model = zoo::Gpt2Config { n_layer: 12, ..gpt2_config() };
    let _alone = alone();
    let counted = world(ranks, |comm| {
        let config = config(ranks, &text);
        let samples = 4 * if layout.contains("pipeline") { 1 } else { ranks };
        let mut engine = Engine::with_communicator(config, zoo::gpt2(&model), comm)?;
        let mut before = engine.stats();
        for step in 0..3 {
            before = engine.stats();
            engine.train_batch(&batch(step, samples))?;
        }
        let counters: Vec<_> = (engine.stats() - before).iter().map(|(_, counter)| counter).collect();
        Ok::<_, Error>([
            counters.iter().map(|counter| counter.calls).sum(),
            counters.iter().map(|counter| counter.calls - counter.ahead).sum(),
        ])
    });
    match counted.into_iter().collect::<Result<_, _>>() {
        Ok(counts) => Some(counts),
        Err(error) if mock::has_no_kernels(&error) => None,
        Err(error) => panic!("{error}"),
    }
}

/// The host enqueues collectives and messages, and waits for few of them. With `check_collectives`, it waits for all.
#[test]
fn the_host_waits_for_few_collectives() {
    if !is_ready() || !mock::has_gpus(2) {
        return;
    }
    // The host waits for the gradient norm and the losses. With pipeline stages, it also waits for the shapes of the
    // first micro-batch's tensors, and for the gradient and the values of the tied embedding, which travel through the
    // host.
    for (layout, waits) in [
        ("zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0}", [2, 2]),
        ("zero_optimization: {stage: 1}", [2, 2]),
        ("zero_optimization: {stage: 1}\npipeline: {stages: 2}", [10, 11]),
    ] {
        let (Some(checked), Some(ahead)) = (host_waits(2, layout, true), host_waits(2, layout, false)) else { return };
        println!("{layout}: calls, and waits of the host, by rank: {checked:?} with checks, {ahead:?} without");
        for (([calls, all], [same, few]), waits) in checked.into_iter().zip(ahead).zip(waits) {
            assert_eq!([all, same], [calls; 2], "{layout}");
            assert_eq!(few, waits, "{layout}");
        }
    }
}

/// For each kernel of this project, and for matrix products, fills and copies: number of calls, bytes read, bytes
/// written, bytes accessed.
type Traffic = BTreeMap<String, [i64; 4]>;

fn traffic() -> Traffic {
    let mut all = mock::kernels();
    let products = mock::read(c"mock_products") + mock::read(c"mock_lt_products");
    let [read, written] = [c"mock_product_bytes_read", c"mock_product_bytes_written"].map(mock::read);
    all.insert("products".into(), [products, read, written, read + written]);
    let [fills, filled] = [c"mock_fills", c"mock_bytes_filled"].map(mock::read);
    all.insert("fills".into(), [fills, 0, filled, filled]);
    let [copies, copied] = [c"mock_copies_within", c"mock_bytes_within"].map(mock::read);
    all.insert("copies".into(), [copies, copied, copied, 2 * copied]);
    all
}

/// Kernels that a GPT-2 block launches, by name prefix, and the memory that they read and write in a step. The unit is
/// one activation tensor: one 16-bit number per token and column. Fractions come from f32 values: two numbers per row
/// of the single attention head (64 columns), and partial sums over 64 rows.
const MOVED: [(&str, &[&str], f64); 5] = [
    ("norms, with the first sum of the residual connection", &["layer_norm", "norm_sums"], 16.0),
    ("the second sum", &["add_bf16"], 3.0),
    ("attention", &["attention"], 16.0 + 5.0 / 32.0),
    ("gradients of biases", &["row_sums", "partial_sums"], 9.0 + 9.0 / 16.0),
    ("products", &["products"], 56.0),
];

/// Measures the traffic of one layer's activations through GPU memory: the traffic that one more layer adds with 8
/// samples, minus the traffic that it adds with 4. The traffic of parameters cancels in this difference.
#[test]
fn traffic_of_a_layer_matches_the_expected_bytes() {
    if !is_ready() {
        return;
    }
    // The head has the usual width, and there are enough tokens to fill the thread blocks of the kernels.
    let width = 64;
    let model = zoo::Gpt2Config { n_embd: width, n_head: 1, n_inner: None, ..gpt2_config() };
    let step = |layers, samples| -> Option<Traffic> {
        let model = zoo::Gpt2Config { n_layer: layers, ..model.clone() };
        let [before, after] = third_step(&model, [samples, 1], BF16, true, traffic)?;
        let since = |(name, counts): (String, [i64; 4])| {
            let before = before.get(&name).copied().unwrap_or_default();
            (name, std::array::from_fn(|i| counts[i] - before[i]))
        };
        Some(after.into_iter().map(since).collect())
    };
    let (Some(small), Some(deep), Some(wide), Some(both)) = (step(2, 4), step(3, 4), step(2, 8), step(3, 8)) else {
        return;
    };
    let activation = (4 * 16 * width * 2) as f64;
    let mut found = [0.0; MOVED.len()];
    for name in both.keys() {
        let of = |traffic: &Traffic, i: usize| traffic.get(name).map_or(0, |counts| counts[i]);
        let launches = of(&deep, 0) - of(&small, 0);
        if launches == 0 {
            continue;
        }
        let [read, written, accessed] = [1, 2, 3].map(|i| {
            let of_a_layer = [of(&deep, i) - of(&small, i), of(&both, i) - of(&wide, i)];
            (of_a_layer[1] - of_a_layer[0]) as f64 / activation
        });
        println!("{launches} {name}: {read:.3} A read, {written:.3} A written, {accessed:.3} A accessed");
        let group = MOVED.iter().position(|(_, names, _)| names.iter().any(|of| name.starts_with(of)));
        found[group.unwrap_or_else(|| panic!("a layer launches {name}"))] += read + written;
    }
    println!("{:.3} A in all", found.iter().sum::<f64>());
    for ((what, _, expected), found) in MOVED.into_iter().zip(found) {
        assert!(found == expected, "{what}: {found} activations, and not {expected}");
    }
}
