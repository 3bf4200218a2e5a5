//! Compares the GPU memory that a run needs with the plan, and tests a GPU with too little memory.

use super::world::{batch, config, gpt2, world};
use super::{has_gpu, mock, settings};
use zero_planner::{Limit, MemoryKind};
use zero_train::{Config, Engine};

/// Runs in its own process, with an emulated GPU that has a hundred kilobytes of memory.
#[test]
fn too_little_gpu_memory_is_a_clear_error() {
    const CHILD: &str = "ZERO_TRAIN_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        if !mock::only_the_mock() || !has_gpu() {
            return;
        }
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "memory::too_little_gpu_memory_is_a_clear_error"])
            .env(CHILD, "1")
            .env("MOCK_DEVICE_BYTES", "100000");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    assert!(mock::ready());
    let mut all = world(1, |comm| {
        let engine = Engine::with_communicator(config(1, &settings("cuda", 1, 1, "")), gpt2(), comm);
        engine.and_then(|mut engine| engine.train_batch(&batch(0, 2))).map(|_| ())
    });
    let error = all.remove(0).expect_err("it cannot fit");
    assert_eq!(error.exit_status(), 2);
    assert!(error.to_string().starts_with("out of GPU memory: "), "{error}");
}

/// Compares the driver's peak memory with the plan. Each case runs in its own process, because the driver counts per
/// process.
#[test]
fn peak_gpu_memory_matches_the_plan() {
    const CHILD: &str = "ZERO_TRAIN_TEST_MEMORY";
    const CODED: &str = "{stage: 3, stage3_param_persistence_threshold: 0, zero_quantized_weights: true, \
                         zero_quantized_gradients: true}";
    // The number of ranks, the section `zero_optimization`, and further keys.
    const CASES: [(usize, &str, &str); 10] = [
        (1, "{stage: 0}", ""),
        (1, "{stage: 1, offload_optimizer: {device: cpu}}", ""),
        (1, "{stage: 3, stage3_param_persistence_threshold: 0}", ""),
        (
            1,
            "{stage: 3, stage3_param_persistence_threshold: 0, offload_optimizer: {device: cpu}, \
             offload_param: {device: cpu}}",
            "",
        ),
        (2, "{stage: 1}", "tensor_parallel: {autotp_size: 2}\nlauncher: {gpu_transport: nccl}"),
        (2, "{stage: 1}", "tensor_parallel: {autotp_size: 2}\nlauncher: {gpu_transport: host}"),
        (2, "{stage: 3}", "sequence_parallel_size: 2\nlauncher: {gpu_transport: nccl}"),
        (2, "{stage: 0}", "sequence_parallel_size: 2\nlauncher: {gpu_transport: host}"),
        (2, CODED, "launcher: {gpu_transport: nccl}"),
        (2, CODED, "launcher: {gpu_transport: host}"),
    ];
    let Ok(case) = std::env::var(CHILD) else {
        if !mock::only_the_mock() || !has_gpu() {
            return;
        }
        for (index, case) in CASES.iter().enumerate() {
            if case.0 > 1 && !mock::has_gpus(case.0) {
                continue;
            }
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "memory::peak_gpu_memory_matches_the_plan"]).env(CHILD, index.to_string());
            let output = command.output().unwrap();
            assert!(output.status.success(), "{case:?}: {}", String::from_utf8_lossy(&output.stdout));
        }
        return;
    };
    let (ranks, zero, more) = CASES[case.parse::<usize>().unwrap()];
    assert!(mock::ready());
    // Every matrix product uses the largest workspace that is allowed. The workspace is large compared with such a
    // small model, so it is subtracted.
    let workspace = zero_cuda::MOST_WORKSPACE as f64;
    mock::set(c"mock_workspace", workspace as i32);
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data.txt");
    std::fs::write(&data, "what is planned is what is held, and no more. ".repeat(200)).unwrap();
    let text = format!(
        "train_micro_batch_size_per_gpu: 4\ntraining: {{device: cuda}}\nzero_optimization: {zero}\n\
         model: {{type: gpt2, vocab_size: 256, n_positions: 64, n_embd: 64, n_layer: 3, n_head: 4}}\n\
         data: {{train: {}, tokenizer: byte, sequence_length: 64}}\noptimizer: {{type: AdamW}}\n{more}",
        data.display()
    );
    let config = Config::with_world_size("test.yaml", text, ranks).unwrap_or_else(|error| panic!("{error}"));
    let layers = zero_train::configured_layers(&config, Some(256)).unwrap();
    let plan = zero_planner::Plan::new(config.clone(), layers).unwrap();
    let planned = plan.value()["stages"][0]["planned_peak_gpu_bytes"].as_u64().unwrap();
    assert_eq!(planned, plan.peak_in(MemoryKind::Gpu));
    // A GPU limit applies to the planned peak of the GPU, and a host limit to the planned peak of the host.
    let limit = |memory, bytes| Limit { memory, bytes, source: "the test" };
    let enough = [limit(MemoryKind::Gpu, planned), limit(MemoryKind::Host, plan.peak_bytes())];
    assert_eq!(plan.exceeded(&enough), None);
    assert_eq!(
        plan.exceeded(&[limit(MemoryKind::Gpu, planned - 1), enough[1]]).map(|it| it.memory),
        Some(MemoryKind::Gpu)
    );
    assert_eq!(Limit::all_of_rank(&config, ranks)[0].memory, MemoryKind::Gpu);
    let planned = planned as f64;
    let measured = world(ranks, |comm| {
        let mut steps = zero_train::train::Steps::open(&config, &comm).unwrap();
        for _ in 0..3 {
            steps.step().unwrap();
        }
        steps.engine().peak_gpu_bytes().unwrap() as f64
    });
    for measured in measured {
        let share = (measured - workspace) / (planned - workspace);
        assert!((0.7..1.1).contains(&share), "{zero}, {more}: {measured} of {planned} planned");
    }
}
