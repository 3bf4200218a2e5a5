//! Resolution of single sections: dtypes, logs, profiles, conversations, clipping and the noise scale.

use zero_config::*;

use super::with;

#[test]
fn the_enabled_section_determines_the_dtype() {
    for (text, dtype) in [
        ("", Dtype::F32),
        ("bf16: {enabled: true}", Dtype::Bf16),
        ("fp16: {enabled: true}\nbf16: {enabled: false}", Dtype::F16),
        // Hugging Face's integration writes the section like this.
        ("fp16: {enabled: auto, loss_scale: 0, initial_scale_power: 16, hysteresis: 2, min_loss_scale: 1}", Dtype::F32),
    ] {
        assert_eq!(with(text).working_dtype(), dtype, "{text}");
    }
    let fp16 = with("fp16: {enabled: true}").fp16;
    assert!(fp16.is_dynamic() && !with("fp16: {enabled: true, loss_scale: 0.5}").fp16.is_dynamic());
    assert_eq!(
        (fp16.initial_scale_power, fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale),
        (16, 1000, 2, 1)
    );
    // A static scale does not use the keys of dynamic loss scaling.
    assert!(with("fp16: {enabled: true, loss_scale: 8, initial_scale_power: 1, min_loss_scale: 9}").fp16.enabled);
}

#[test]
fn operations_to_log_must_be_known() {
    let config = with("comms_logger: {enabled: true, prof_all: false, prof_ops: [all_reduce, reduce_scatter_tensor]}");
    assert_eq!(config.comms_logger.prof_ops, ["all_reduce", "reduce_scatter"]);
    let text = "train_micro_batch_size_per_gpu: 1\ncomms_logger: {enabled: true, prof_ops: [all_reduse]}";
    let error = Config::parse("ds.yaml", text).unwrap_err().to_string();
    assert!(error.contains("there is no operation `all_reduse`") && error.contains("comms_logger.prof_ops"), "{error}");
}

#[test]
fn the_depth_of_a_profile_is_an_integer() {
    let depth = |depth: &str| {
        let text =
            format!("train_micro_batch_size_per_gpu: 1\nflops_profiler: {{enabled: true, module_depth: {depth}}}");
        Config::parse("ds.yaml", &text).map(|config| config.flops_profiler.module_depth).map_err(|e| e.to_string())
    };
    assert_eq!((depth("-1"), depth("0"), depth("3")), (Ok(None), Ok(Some(0)), Ok(Some(3))));
    for wrong in ["1.5", "-2", "-0.5", "deep"] {
        assert!(depth(wrong).is_err_and(|error| error.contains("flops_profiler.module_depth")), "{wrong}");
    }
}

#[test]
fn chat_data_has_its_own_section() {
    let parse = |data: &str| Config::parse("ds.yaml", format!("train_batch_size: 1\ndata: {{train: a, {data}}}"));
    let data = |data: &str| parse(data).expect("valid").data.expect("data");
    assert_eq!(data("format: jsonl").chat, None);
    let chat = data("format: chat, tokenizer: t.json").chat.expect("the defaults");
    assert_eq!(
        (chat.roles_to_train, chat.excess_length_strategy),
        (vec!["assistant".to_string()], ExcessLength::Raise)
    );
    let chat =
        data("format: chat, tokenizer: t.json, chat: {type: alpaca, roles: {assistant: [bot]}}").chat.expect("chat");
    assert_eq!(
        (chat.kind, chat.roles.assistant, chat.roles.tool.len()),
        (ChatType::Alpaca, vec!["bot".to_string()], 1)
    );
    for (text, expected) in [
        ("format: chat", "`data.format: chat` needs a tokenizer with special tokens"),
        ("format: jsonl, chat: {type: auto}", "`data.chat` has no effect on `data.format: jsonl`"),
        (
            "format: chat, tokenizer: t, chat: {sample_packing: true}",
            "`data.chat.sample_packing: true` is not implemented yet",
        ),
        ("format: chat, tokenizer: t, chat: {train_on_eos: no}", "`turn`, `all` or `last`"),
    ] {
        let errors = parse(text).expect_err(text).to_string();
        assert!(errors.contains(expected), "{errors}");
    }
}

#[test]
fn settings_that_exclude_bf16_states_are_errors() {
    let parse = |text: &str| Config::parse("ds.yaml", format!("train_batch_size: 1\n{text}"));
    let bf16 = |keys: &str| format!("bf16: {{enabled: true, {keys}}}");
    let all = bf16("bf16_master_weights_and_grads: true, bf16_optimizer_states: true, stochastic_rounding: true");
    assert!(parse(&all).unwrap().bf16.stochastic_rounding);
    let f32_states = |text: &str| parse(text).unwrap().optimizer.has_f32_states();
    let states = "optimizer: {type: Adam, params: {fp32_optimizer_states: false}}";
    assert!(!f32_states(states) && f32_states("optimizer: {type: Lion}"));
    for (text, expected) in [
        ("bf16: {bf16_master_weights_and_grads: true}".to_string(), "needs `bf16: {enabled: true}`"),
        (bf16("bf16_optimizer_states: true"), "need parameters without an f32 copy"),
        (bf16("stochastic_rounding: true"), "rounding to nearest loses nothing"),
        (
            format!("{}\ntraining: {{ema: {{}}}}", bf16("bf16_master_weights_and_grads: true")),
            "`training.ema` needs the f32 copy",
        ),
        (
            format!("{}\noptimizer: {{type: Lamb}}", bf16("bf16_master_weights_and_grads: true")),
            "LAMB needs the f32 copy",
        ),
        (
            format!("{}\noptimizer: {{type: Muon}}", bf16("bf16_master_weights_and_grads: true")),
            "Muon needs the f32 copy",
        ),
        (format!("fp16: {{enabled: true}}\n{states}"), "whose range is too small"),
    ] {
        let errors = parse(&text).expect_err(&text);
        assert_eq!(errors.count(), 1, "{errors}");
        assert!(errors.to_string().contains(expected), "{errors}");
    }
}

#[test]
fn the_noise_scale_needs_several_equal_micro_batches() {
    let errors = |text: &str| Config::parse("ds.yaml", text).expect_err(text).to_string();
    let noise = "training: {gradient_noise_scale: {}}";
    assert!(errors(&format!("train_batch_size: 2\n{noise}")).contains("a step has only one"));
    let text = format!("train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 2\n{noise}");
    assert_eq!(Config::parse("ds.yaml", text.as_str()).unwrap().training.gradient_noise_scale.unwrap().smoothing, 0.99);
    let chat = "data: {train: a, format: chat, tokenizer: t, sequence_length: 16, max_tokens: 32}";
    assert!(errors(&format!("{text}\n{chat}")).contains("equal numbers of samples"));
}

#[test]
fn clipping_by_value_replaces_clipping_by_norm() {
    let parse = |text: &str| Config::parse("ds.yaml", format!("train_batch_size: 1\n{text}"));
    for (text, expected) in [
        ("", (1.0, None)),
        ("gradient_clipping: auto", (1.0, None)),
        ("gradient_clipping_value: 0.5", (0.0, Some(0.5))),
        ("gradient_clipping: auto\ngradient_clipping_value: 0.5", (0.0, Some(0.5))),
        ("gradient_clipping: 0\ngradient_clipping_value: 0.5", (0.0, Some(0.5))),
    ] {
        let config = parse(text).unwrap_or_else(|e| panic!("{text}\n{e}"));
        assert_eq!((config.gradient_clipping, config.gradient_clipping_value), expected, "{text}");
    }
    let error = parse("gradient_clipping: 1.0\ngradient_clipping_value: 0.5").unwrap_err().to_string();
    assert!(error.contains("both clip the gradient") && error.contains("ds.yaml:2"), "{error}");
    let error = parse("gradient_clipping_value: 0").unwrap_err().to_string();
    assert!(error.contains("gradient_clipping_value"), "{error}");
}

/// With DeepSpeed's keys, gradients are divided before the reduction. This engine always does that, since it divides
/// the loss before the backward.
#[test]
fn prescaled_gradients_are_a_warning() {
    for text in ["prescale_gradients: true", "gradient_predivide_factor: 4", "gradient_predivide_factor: 4.0"] {
        let config = Config::parse("ds.yaml", format!("train_batch_size: 1\n{text}")).unwrap_or_else(|e| panic!("{e}"));
        let warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
        assert!(matches!(&warnings[..], [one] if one.contains("before the backward")), "{text}: {warnings:?}");
    }
    let off = "train_batch_size: 1\nprescale_gradients: false\ngradient_predivide_factor: 1.0";
    assert!(Config::parse("ds.yaml", off).unwrap_or_else(|e| panic!("{e}")).warnings.is_empty());
    assert!(Config::parse("ds.yaml", "train_batch_size: 1\ngradient_predivide_factor: 0").is_err());
}
