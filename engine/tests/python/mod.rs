//! Runs Python scripts for tests, with the interpreter in `ZERO_TRAIN_PYTHON`, or `python3`. Tests are skipped if
//! packages are missing.
#![allow(dead_code, unreachable_pub)] // each test file uses a part

use std::process::Command;

/// Returns a script's standard output. If the interpreter or a package is missing, prints this and returns `None`.
pub fn python(packages: &[&str], script: &str) -> Option<String> {
    let program = std::env::var_os("ZERO_TRAIN_PYTHON").unwrap_or_else(|| "python3".into());
    let run = |script: &str| Command::new(&program).args(["-W", "ignore", "-c", script]).output();
    match run(&format!("import {}", packages.join(", "))) {
        Err(error) => {
            println!("skipped: {} does not start: {error}", program.to_string_lossy());
            return None;
        }
        Ok(output) if !output.status.success() => {
            println!(
                "skipped: {} has not all of {packages:?}; ZERO_TRAIN_PYTHON names another",
                program.to_string_lossy()
            );
            return None;
        }
        Ok(_) => {}
    }
    let output = run(script).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// Returns the rest of each line that starts with `result `. Libraries print other lines.
pub fn results(output: &str) -> impl Iterator<Item = &str> {
    output.lines().filter_map(|line| line.strip_prefix("result "))
}

/// The batches of `world::batch`, computed in Python.
pub const TOKENS: &str = "
import torch
def tokens(step, samples):
    token = lambda i: (i * 7 + step * 13 + i * i % 11) % 61
    ids = torch.tensor([token(i) for i in range(samples * 16 + 1)])
    return ids[:-1].view(samples, 16), ids[1:].view(samples, 16)
";

/// Returns Python code: [`TOKENS`], and the function `llama`, which saves a small Llama in a folder and returns it.
pub fn small_llama() -> String {
    format!(
        "{TOKENS}
import transformers
torch.set_num_threads(1)
torch.manual_seed(3)
def llama(folder):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, initializer_range=0.1, hidden_size=32,
        intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16)).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).float().train()
"
    )
}
