//! Formats the values that replaced `auto`. A run prints them when it starts.

use zero_config::Config;

/// Sections that DeepSpeed does not have. The run prints their values in other lines.
const OWN: [&str; 4] = ["model.", "data.", "training.", "launcher."];

/// Maximum line length.
const WIDTH: usize = 120;

/// Returns DeepSpeed's keys that were set to `auto`, each with its value, as lines of text. Returns `None` if there are
/// no such keys.
pub(crate) fn said(config: &Config) -> Option<String> {
    let autos = config.autos().into_iter().filter(|(path, _)| !OWN.iter().any(|own| path.starts_with(own)));
    let words = autos.map(|(path, value)| match value.as_str() {
        "auto" => format!("{path} chosen by the engine"),
        value => format!("{path} {value}"),
    });
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.len() + word.len() + 2 <= WIDTH => *line += &format!(", {word}"),
            Some(line) => {
                line.push(',');
                lines.push(format!("      {word}"));
            }
            None => lines.push(format!("auto: {word}")),
        }
    }
    (!lines.is_empty()).then(|| lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_auto_is_printed_with_its_value_and_nothing_else() {
        let text = "train_batch_size: auto\ntrain_micro_batch_size_per_gpu: auto\ngradient_clipping: 1.0\n\
                    optimizer: {type: AdamW, params: {lr: auto, betas: [0.9, 0.95]}}\n\
                    zero_optimization: {stage: 2, reduce_bucket_size: auto}\nmodel: {type: gpt2, vocab_size: auto}";
        let config = Config::with_world_size("ds.yaml", text, 2).unwrap();
        let expected = "auto: train_batch_size 16, train_micro_batch_size_per_gpu 8, optimizer.params.lr 5.0e-5,\n      \
                        zero_optimization.reduce_bucket_size chosen by the engine";
        assert_eq!(said(&config).as_deref(), Some(expected));
        let without = Config::parse("ds.yaml", "train_batch_size: 2\nmodel: {type: gpt2, vocab_size: auto}").unwrap();
        assert_eq!(said(&without), None);
    }
}
