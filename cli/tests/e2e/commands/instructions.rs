//! `ZERO_TRAIN_ISA` and `launcher.instruction_set`: training with narrower vectors is bit-identical, and
//! instruction sets that the processor lacks are rejected.

use zero_isa::Isa;

use crate::case;

use case::{Case, fail, succeed};

const MODELS: [(&str, &str); 2] = [
    ("gpt2", "model={type: gpt2, vocab_size: 256, n_positions: 32, n_embd: 72, n_layer: 2, n_head: 3}"),
    (
        "llama",
        "model={type: llama, vocab_size: 256, max_position_embeddings: 32, hidden_size: 64, intermediate_size: 100, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}",
    ),
];

/// Returns losses and gradient norms of a run with two ranks on this instruction set, selected with `ZERO_TRAIN_ISA`.
fn steps(model: &str, isa: Isa, precision: &str) -> Vec<[String; 2]> {
    let case = Case::new();
    let args = ["--config", "ds.yaml", "-n", "2", "--quiet", "--max-steps", "6", "--set", model, "--set", precision];
    succeed(case.command(&args).env("ZERO_TRAIN_ISA", isa.name()));
    assert_eq!(case.report("run")["instruction_set"], isa.name());
    case.metrics("run").iter().map(|step| ["loss", "grad_norm"].map(|key| step[key].to_string())).collect()
}

#[test]
fn training_is_bit_identical_on_every_instruction_set() {
    for (name, model) in MODELS {
        for precision in ["bf16={enabled: false}", "bf16={enabled: true}"] {
            // AMX rounds bf16 products differently: ops/src/product/amx.rs.
            let exact = |isa: &Isa| !precision.contains("true") || !isa.has_amx();
            let expected = steps(model, Isa::BASELINE, precision);
            assert!(expected.len() == 6 && expected[0] != expected[5], "{name}: {expected:?}");
            for isa in Isa::available().into_iter().skip(1).filter(exact) {
                assert_eq!(steps(model, isa, precision), expected, "{name}, {precision}, {isa}");
            }
        }
    }
}

#[test]
fn the_environment_overrides_the_configured_instruction_set() {
    let case = Case::new();
    let args = ["--config", "ds.yaml", "--quiet", "--max-steps", "1", "--set", "launcher.instruction_set=baseline"];
    let used = || case.report("run")["instruction_set"].as_str().unwrap().to_string();
    succeed(case.command(&args).env_remove("ZERO_TRAIN_ISA"));
    assert_eq!(used(), "baseline");
    let widest = Isa::available().pop().unwrap();
    succeed(case.command(&args).env("ZERO_TRAIN_ISA", widest.name()));
    assert_eq!(used(), widest.name());
}

#[test]
fn an_unavailable_instruction_set_is_rejected_before_anything_starts() {
    let case = Case::new();
    let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
    let said = fail(2, case.command(&["doctor"]).env("ZERO_TRAIN_ISA", foreign));
    let expected =
        format!("this processor does not support {foreign}\n  in: ZERO_TRAIN_ISA\n  help: choose one of baseline");
    assert!(said.contains(&expected), "{said}");
    let set = format!("launcher.instruction_set={foreign}");
    let said = fail(2, case.command(&["--config", "ds.yaml", "--set", &set]).env_remove("ZERO_TRAIN_ISA"));
    assert!(said.contains("in: launcher.instruction_set"), "{said}");
    assert!(!case.path("run").exists());
}
