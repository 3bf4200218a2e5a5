//! Generates a Markdown page from the schema.

use std::fmt::Write as _;

use crate::config::Config;
use crate::schema::{self, Key, Kind, Section, Status, Switch, Variants, join};
use crate::value::expected;

const INTRODUCTION: &str = "\
<!-- Generated from the schema in configs/src/schema. Do not edit. -->
# Configuration

A configuration consists of one or more YAML or JSON files. Each further `--config` overrides individual keys of the files before
it. Keys have the same names and meanings as in DeepSpeed. `model`, `adapter`, `quantization_config`, `preference`, `data`,
`training`, `launcher` and a few others configure what DeepSpeed users write in Python. A key that is not in these tables is an
error. A key set to `null` is treated as if it were omitted.

For numbers, switches and choices that DeepSpeed defines, `auto` means the default. The tables say where `auto` has another
meaning, such as the value that Hugging Face's Trainer uses. `zero-train check` prints the resolved values.

| status | means |
|---|---|
| | implemented as described |
| later | not implemented yet: an error, unless the value is the default or disables the key |
| ignored | accepted without effect, for the reason given, with a warning if the value is not the default |
| deprecated | accepted, with a warning that names the current key |
| rejected | not supported: an error with the reason, unless the value disables the key |
| removed | removed from DeepSpeed: an error that says what to do instead |

## A model larger than memory

This configuration keeps parameters and optimizer state in files on a local disk, recomputes activations from the layer inputs,
and limits each rank to 6 GiB:

```yaml
train_micro_batch_size_per_gpu: 1
zero_optimization:
  stage: 3
  offload_param: {device: nvme, nvme_path: /mnt/nvme/parameters}
  offload_optimizer: {device: nvme, nvme_path: /mnt/nvme/optimizer}
activation_checkpointing: {interval: 1}
training: {memory_limit: 6GiB}
```

## What a search tries

The `autotuning` section configures the search of `zero-train autotune`; all of its keys have defaults. In `space`, each
configuration key with a list of values or a range is one dimension of the search. If a key expects a list or a section, each value
to try is a list or a section. All values are validated before anything runs:

```yaml
train_micro_batch_size_per_gpu: 1
optimizer: {type: AdamW, params: {lr: 6.0e-4}}
autotuning:
  metric: throughput
  space:
    zero_optimization.stage: [1, 2, 3]
    train_micro_batch_size_per_gpu: {from: 1, to: 16, times: 2}
    zero_optimization.offload_optimizer: [null, {device: nvme, nvme_path: /mnt/nvme}]
    zero_optimization.overlap_comm: true
  sweep:
    method: tpe
    space:
      optimizer.params.lr: {low: 1.0e-5, high: 1.0e-2, log: true}
      optimizer.params.betas: [[0.9, 0.95], [0.9, 0.999]]
```

## Top level
";

/// Returns every key with its type, default, status and description as Markdown.
pub fn reference() -> String {
    let mut out = INTRODUCTION.to_string();
    table(Config::SECTION.keys, &mut out);
    sections("", Config::SECTION.keys, &mut out);
    out
}

fn sections(path: &str, keys: &'static [Key], out: &mut String) {
    for key in keys {
        let path = join(path, key.name);
        match key.kind {
            Kind::Section(section) => {
                heading(&path, key, out);
                switch(section, out);
                table(section.keys, out);
                sections(&path, section.keys, out);
            }
            Kind::Sections(section) => {
                heading(&path, key, out);
                table(section.keys, out);
            }
            Kind::Variants(variants) => variant_tables(&path, key, variants, out),
            _ => {}
        }
    }
}

fn variant_tables(path: &str, key: &Key, variants: &'static Variants, out: &mut String) {
    heading(path, key, out);
    out.push_str("\n| `type` | status | meaning |\n|---|---|---|\n");
    for variant in variants.list {
        let _ = writeln!(out, "| `{}` | {} | {} |", variant.name, status(variant.status), variant.meaning);
    }
    if !variants.shared.is_empty() {
        table(variants.shared, out);
    }
    let inside = variants.params.map_or(path.to_string(), |params| join(path, params));
    for variant in variants.list.iter().filter(|variant| !variant.keys.is_empty()) {
        let _ = writeln!(out, "\n### `{inside}` of type `{}`", variant.name);
        table(variant.keys, out);
        sections(&inside, variant.keys, out);
    }
}

fn heading(path: &str, key: &Key, out: &mut String) {
    let level = if path.contains('.') { "###" } else { "##" };
    let _ = writeln!(out, "\n{level} `{path}`\n\n{}.", escape(key.meaning));
    let status = status(key.status);
    if !status.is_empty() {
        let _ = writeln!(out, "\nStatus: {status}.");
    }
}

fn switch(section: &Section, out: &mut String) {
    let _ = match section.switch {
        Switch::Keys => Ok(()),
        Switch::Key(name, off) => {
            writeln!(out, "\nThe section is disabled while `{name}` is `{}`.", off.join("` or `"))
        }
        Switch::Presence => writeln!(out, "\nThe section is disabled unless it is present."),
    };
}

fn table(keys: &'static [Key], out: &mut String) {
    out.push_str("\n| key | value | default | status | meaning |\n|---|---|---|---|---|\n");
    for key in keys {
        let meaning = match key.status {
            Status::Alias => format!("the same as `{}`", key.meaning),
            _ => escape(key.meaning),
        };
        let (value, default) = (value(key), default(key));
        let _ = writeln!(out, "| `{}` | {value} | {default} | {} | {meaning} |", key.name, status(key.status));
    }
}

fn value(key: &Key) -> String {
    let text = match key.kind {
        Kind::Any => return String::new(),
        Kind::Section(_) | Kind::Variants(_) => return "section".to_string(),
        kind => expected(&kind),
    };
    escape(&if key.auto == schema::Auto::Engine { format!("{text}, or `auto`") } else { text })
}

fn default(key: &Key) -> String {
    match (key.status, key.default) {
        (Status::Removed | Status::Alias | Status::Old { .. }, _) | (_, "null") => String::new(),
        (_, schema::REQUIRED) => "required".to_string(),
        (_, "") => "`\"\"`".to_string(),
        (_, text) => match text.strip_prefix("= ") {
            Some(words) => escape(words),
            None => format!("`{text}`"),
        },
    }
}

fn status(status: Status) -> &'static str {
    match status {
        Status::Now | Status::Alias => "",
        Status::Later { .. } => "later",
        Status::Rejected { .. } => "rejected",
        Status::Removed => "removed",
        Status::Old { .. } => "deprecated",
        Status::Ignored => "ignored",
    }
}

pub(crate) fn escape(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}
