//! Measures what GPU steps cost the host: blocking copies, loaded kernels, and memory that the pool allocates. The mock
//! driver counts them per process, so each test runs in its own process.

use zero_train::zoo::{Activation, Gpt2Config, LlamaConfig, MlpConfig, gpt2, llama, mlp};
use zero_train::{Batch, Engine, Layers};

use super::world::{BF16, config, gpt2_config, train, world};
use super::{has_gpu, mock, resident, settings};

use candle_core::{DType, Device, Tensor};

const CHILD: &str = "ZERO_TRAIN_TEST_STEP";

/// Returns whether this is the process for `test` alone. Otherwise starts that process and checks that it succeeds.
fn is_own(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        assert!(mock::ready());
        return true;
    }
    if mock::only_the_mock() && has_gpu() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let output =
            command.args(["--exact", &format!("step::{test}"), "--nocapture"]).env(CHILD, "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        print!("{}", String::from_utf8_lossy(&output.stdout));
    }
    false
}

/// Trains a single rank. Returns the values of `counted` before the first step and after each of the first steps.
fn after_steps<T: Send>(
    layers: impl Fn() -> Layers + Sync,
    text: &str,
    steps: u64,
    counted: impl Fn(&Engine) -> T + Sync,
) -> Vec<T> {
    let mut all = world(1, |comm| {
        let mut engine = Engine::with_communicator(config(1, text), layers(), comm).unwrap();
        let mut counts = vec![counted(&engine)];
        for _ in 0..steps {
            train(&mut engine, 1);
            counts.push(counted(&engine));
        }
        counts
    });
    all.remove(0)
}

#[test]
fn all_kernels_are_loaded_before_the_first_step() {
    if !is_own("all_kernels_are_loaded_before_the_first_step") {
        return;
    }
    let again = "activation_checkpointing: {}";
    for more in ["", BF16, again] {
        for text in [resident("cuda", 3, 2, more), settings("cuda", 1, 1, more)] {
            for layers in [super::world::gpt2 as fn() -> Layers, || windowed(2, 5)] {
                let modules = after_steps(layers, &text, 2, |_| mock::read(c"mock_modules"));
                assert!(modules[0] > 0 && modules.iter().all(|count| *count == modules[0]), "{modules:?} {text}");
            }
        }
    }
}

/// Returns a Llama with an attention window of `window` positions.
fn windowed(layers: usize, window: usize) -> Layers {
    llama(&LlamaConfig {
        vocab_size: 61,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: layers,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        max_position_embeddings: 16,
        sliding_window: Some(window),
        ..LlamaConfig::default()
    })
}

#[test]
fn document_starts_are_copied_to_the_gpu_once() {
    if !is_own("document_starts_are_copied_to_the_gpu_once") {
        return;
    }
    let copies = |layers: fn() -> Layers| {
        let counts = after_steps(layers, &resident("cuda", 1, 1, ""), 3, |_| mock::read(c"mock_copies_up"));
        [1, 2, 3].map(|step| counts[step] - counts[step - 1])
    };
    // A window that covers all positions is the same as no window.
    let without = copies(|| windowed(2, 16));
    let (two, four) = (copies(|| windowed(2, 5)), copies(|| windowed(4, 5)));
    println!("copies to the GPU in three steps: {without:?}; with a window, 2 layers {two:?}, 4 layers {four:?}");
    assert_eq!(two, [without[0] + 1, without[1], without[2]]);
    assert_eq!(four, two);
}

/// A batch of 20,000 numbers has 80 KB. For this size, a plain copy in the driver would wait for the stream.
#[test]
fn copies_of_large_batches_do_not_block() {
    if !is_own("copies_of_large_batches_do_not_block") {
        return;
    }
    let step = |input_size: usize| {
        let mut all = world(1, |comm| {
            let sizes = MlpConfig {
                input_size,
                hidden_sizes: vec![4],
                num_labels: 3,
                hidden_act: Activation::Relu,
                base: None,
            };
            let mut engine =
                Engine::with_communicator(config(1, &resident("cuda", 1, 1, "")), mlp(&sizes), comm).unwrap();
            let inputs = Tensor::ones((2, input_size), DType::F32, &Device::Cpu).unwrap();
            let batch = Batch::new(inputs, Tensor::new(&[0u32, 2], &Device::Cpu).unwrap());
            let counts = || [c"mock_waits", c"mock_waits_copy", c"mock_pageable_up"].map(mock::read);
            let before = counts();
            engine.train_batch(&batch).unwrap();
            let after = counts();
            [0, 1, 2].map(|i| after[i] - before[i])
        });
        all.remove(0)
    };
    let (small, large) = (step(8), step(10_000));
    println!(
        "waits, those for copies, and pageable copies to the GPU of a step: {small:?}, {large:?} with a large batch"
    );
    assert_eq!(large, [small[0], small[1], small[2] - 1]);
    // A tensor that is sent in several pieces arrives unchanged.
    let tensor = Tensor::arange(0u32, 12_000_000, &Device::Cpu).unwrap().narrow(0, 5, 11_999_990).unwrap();
    let there = zero_model::device::onto(&zero_model::device::open(0).unwrap(), &tensor).unwrap();
    let back = there.to_device(&Device::Cpu).unwrap().to_vec1::<u32>().unwrap();
    assert!(back.len() == 11_999_990 && back.iter().zip(5..).all(|(&x, i)| x == i));
}

/// Uploads for a layer run on their own stream and reuse memory that earlier layers freed. The pool's unused memory
/// therefore does not grow with the number of steps or layers.
#[test]
fn the_memory_pool_stops_growing() {
    const RUN: &str = "ZERO_TRAIN_TEST_RUN";
    const LONG: usize = 50;
    let param = "offload_param: {device: cpu}, stage3_param_persistence_threshold: 0";
    let zero = ["stage: 1".to_string(), format!("stage: 3, {param}")];
    if let Ok(run) = std::env::var(RUN) {
        let [zero_stage, n_layer, steps] = [0, 1, 2].map(|i| run.split(' ').nth(i).unwrap().parse::<usize>().unwrap());
        let zero = format!("zero_optimization: {{{}, offload_optimizer: {{device: cpu}}}}", zero[zero_stage]);
        // Recomputed layers keep little memory, so uploads use most of the memory of a forward pass.
        let more = format!("{BF16}\nactivation_checkpointing: {{}}");
        let text = format!("train_micro_batch_size_per_gpu: 1\ntraining: {{device: cuda}}\n{zero}\n{more}");
        assert!(mock::ready());
        let layers = || gpt2(&Gpt2Config { n_layer, n_embd: 64, ..gpt2_config() });
        let bytes = after_steps(layers, &text, steps as u64, |engine| {
            [engine.peak_gpu_bytes().unwrap(), engine.reserved_gpu_bytes().unwrap()]
        });
        println!("{:?}", [bytes[2], bytes[steps]].concat());
        return;
    }
    if !mock::only_the_mock() || !has_gpu() {
        return;
    }
    let beyond = |zero_stage: usize, layers: usize, steps: usize| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "step::the_memory_pool_stops_growing", "--nocapture"]);
        let said = command.env(RUN, format!("{zero_stage} {layers} {steps}")).output().unwrap().stdout;
        let said = String::from_utf8(said).unwrap();
        let numbers = said.lines().find_map(|line| line.strip_prefix('[')?.strip_suffix(']')).expect(&said);
        let numbers: Vec<i64> = numbers.split(", ").map(|number| number.parse().unwrap()).collect();
        let [used, reserved, used_at_last, reserved_at_last] = numbers[..] else { panic!("{said}") };
        let run = format!("{{{}}} with {layers} layers", zero[zero_stage]);
        println!(
            "{run}: {used} bytes in use and {reserved} reserved at most in 2 steps, {used_at_last} and {reserved_at_last} in {steps}"
        );
        if steps == LONG {
            assert_eq!((used, reserved), (used_at_last, reserved_at_last), "{run} grows with steps");
        }
        reserved - used
    };
    for zero_stage in [0, 1] {
        let (few, many) = (beyond(zero_stage, 3, LONG), beyond(zero_stage, 9, 4));
        // The parameters of a layer in bf16 are 50 KB.
        assert!(many < few + 50_000, "{few} beyond what is in use with 3 layers, {many} with 9");
    }
}
