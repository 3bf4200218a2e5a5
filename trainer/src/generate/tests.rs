//! Tests generation without files, and compares it with transformers and peft. The comparisons are skipped without
//! Python.

use serde_json::Value;
use zero_model::init;
use zero_model::zoo::{LlamaConfig, llama};

use super::*;

/// Returns a random Llama model over bytes.
fn generator() -> Generator {
    let config = LlamaConfig {
        vocab_size: 256,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 64,
        initializer_range: 0.4,
        ..LlamaConfig::default()
    };
    let model = llama(&config).build(DType::F32).unwrap();
    for p in model.parameters() {
        let mut values = vec![0.0; p.elements()];
        init::fill(&p.init(), p.shape(), p.name(), 3, 0, &mut values);
        p.fill_from_floats(values).unwrap();
    }
    Generator {
        model,
        vocabulary: Some(256),
        longest: Some(64),
        before_other_angles: None,
        tokenizer: Some(Tokenizer::Byte),
        eos: vec![],
        chat: ChatOptions::default(),
        folders: vec![],
        warnings: vec![],
    }
}

fn sampled(seed: u64) -> Generate {
    let sampling = Sampling { temperature: 1.0, top_p: Some(0.95), ..Sampling::default() };
    Generate { max_new_tokens: 20, sampling, seed, ..Generate::default() }
}

#[test]
fn a_text_depends_on_its_prompt_and_the_seed_alone() {
    let generator = generator();
    let prompts: Vec<Vec<u32>> =
        ["one", "a longer prompt", "x", "yy", "one"].iter().map(|text| generator.encode(text).unwrap()).collect();
    let alone: Vec<Generated> = prompts
        .iter()
        .map(|prompt| generator.generate(std::slice::from_ref(prompt), &sampled(5), |_, _| {}).unwrap().remove(0))
        .collect();
    for batch in [1, 2, 3, 8] {
        let mut shown = vec![String::new(); prompts.len()];
        let options = Generate { batch, ..sampled(5) };
        let all = generator.generate(&prompts, &options, |index, text| shown[index] += text).unwrap();
        assert!(all == alone, "{batch} at a time");
        let texts: Vec<&str> = all.iter().map(|generated| generated.text.as_str()).collect();
        assert_eq!(shown, texts);
    }
    assert_eq!(alone[0], alone[4]);
    let other = generator.generate(&prompts, &sampled(6), |_, _| {}).unwrap();
    assert!(other.iter().zip(&alone).all(|(other, alone)| other.tokens != alone.tokens));
}

#[test]
fn texts_end_at_tokens_strings_and_the_last_position() {
    let mut generator = generator();
    let prompt = generator.encode("abc").unwrap();
    let run = |generator: &Generator, options: &Generate| {
        generator.generate(std::slice::from_ref(&prompt), options, |_, _| {}).unwrap().remove(0)
    };
    let free = run(&generator, &Generate { max_new_tokens: 30, ..sampled(1) });
    assert_eq!((free.tokens.len(), free.finish, free.prompt_tokens), (30, Finish::Length, 3));
    // The last of the 65 tokens is never an input, so 64 positions suffice.
    let full = run(&generator, &Generate { max_new_tokens: 1000, ..sampled(1) });
    assert_eq!((full.tokens.len(), full.finish), (62, Finish::Length));
    assert_eq!(full.tokens[..30], free.tokens);

    generator.eos = vec![free.tokens[10]];
    let first = free.tokens.iter().position(|&token| token == free.tokens[10]).unwrap();
    let ended = run(&generator, &Generate { max_new_tokens: 30, ..sampled(1) });
    assert_eq!((ended.tokens.as_slice(), ended.finish), (&free.tokens[..=first], Finish::Stop));
    assert_eq!(ended.text, Tokenizer::Byte.decode(&free.tokens[..first]).unwrap());
    let ignored = run(&generator, &Generate { max_new_tokens: 30, ignore_eos: true, ..sampled(1) });
    assert_eq!(ignored, free);

    let stop: String = free.text.chars().skip(4).take(2).collect();
    generator.eos = vec![];
    let stopped = run(&generator, &Generate { max_new_tokens: 30, stop: vec![stop.clone()], ..sampled(1) });
    assert_eq!(stopped.text, free.text.split(&stop).next().unwrap());
    assert_eq!(stopped.finish, Finish::Stop);
}

#[test]
fn a_repetition_penalty_changes_the_text() {
    let generator = generator();
    let prompt = generator.encode("abcabc").unwrap();
    let run = |repetition_penalty| {
        let sampling = Sampling { repetition_penalty, ..Sampling::default() };
        let options = Generate { max_new_tokens: 40, sampling, ..Generate::default() };
        generator.generate(std::slice::from_ref(&prompt), &options, |_, _| {}).unwrap().remove(0).tokens
    };
    let distinct = |mut tokens: Vec<u32>| {
        tokens.sort_unstable();
        tokens.dedup();
        tokens.len()
    };
    assert!(distinct(run(5.0)) > distinct(run(1.0)));
}

#[test]
fn prompts_that_do_not_fit_are_errors() {
    let mut generator = generator();
    let refused = |generator: &Generator, prompt: Vec<u32>, options: &Generate| {
        generator.generate(&[vec![1], prompt], options, |_, _| {}).unwrap_err().to_string()
    };
    let plain = Generate::default();
    assert!(refused(&generator, vec![], &plain).contains("the prompt has no tokens\n  in: prompt 2"));
    let long = refused(&generator, vec![1; 65], &plain);
    assert!(long.contains("the prompt has 65 tokens, more than the model's 64 positions"), "{long}");
    assert!(refused(&generator, vec![256], &plain).contains("the token 256"));
    assert!(
        refused(&generator, vec![1], &Generate { max_new_tokens: 0, ..plain.clone() }).contains("--max-new-tokens")
    );
    let stop = Generate { stop: vec![String::new()], ..plain.clone() };
    assert!(refused(&generator, vec![1], &stop).contains("--stop"));
    let chat = generator.encode_chat(&[("user", "hi")]).unwrap_err().to_string();
    assert!(chat.contains("byte tokenizer"), "{chat}");
    generator.tokenizer = None;
    assert!(generator.encode("x").unwrap_err().to_string().contains("no tokenizer"));
    assert_eq!(generator.generate(&[vec![1]], &plain, |_, _| {}).unwrap()[0].text, "");
}

/// Saves small random models, and prints the tokens that transformers generates for each model and prompt. Large
/// weights keep the largest logits far apart.
const MODELS: &str = r#"
import json, torch
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
                          Gemma3TextConfig, Gemma3ForCausalLM, Phi3Config, Phi3ForCausalLM)
torch.manual_seed(1)
sizes = dict(vocab_size=211, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=300, initializer_range=0.25, bos_token_id=None,
             eos_token_id=None, pad_token_id=None, tie_word_embeddings=False)
models = [
    GPT2LMHeadModel(GPT2Config(vocab_size=211, n_positions=300, n_embd=48, n_layer=3, n_head=4, initializer_range=0.4,
                               bos_token_id=None, eos_token_id=None)),
    LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0,
        low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64))),
    MistralForCausalLM(MistralConfig(**sizes, sliding_window=37)),
    Qwen2ForCausalLM(Qwen2Config(**sizes)),
    Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=12)),
    Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=12, sliding_window=37, sliding_window_pattern=3,
                                       query_pre_attn_scalar=10)),
    Phi3ForCausalLM(Phi3Config(**sizes, sliding_window=120, partial_rotary_factor=0.75)),
    # All texts end beyond the original length, where transformers computes the cache again.
    Phi3ForCausalLM(Phi3Config(**sizes, original_max_position_embeddings=60, rope_scaling=dict(type='longrope',
        short_factor=[1.0, 1.5, 2.5, 3.5], long_factor=[2.0, 2.5, 4.5, 5.5]))),
]
prompts = [[3], [5, 17, 100, 8, 44], [(7 * i * i + 3) % 211 for i in range(60)]]
for index, model in enumerate(models):
    model.eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 and not name.endswith("norm.weight") and "ln_" not in name:
                p.normal_(0, 0.2)
    model.save_pretrained(f"{FOLDER}/{index}")
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        got = model.generate(ids, do_sample=False, max_new_tokens=200, pad_token_id=0, return_dict_in_generate=True,
                             output_logits=True)
        best = torch.stack(got.logits)[:, 0].topk(2).values
        out.append([got.sequences[0, len(prompt):].tolist(), (best[:, 0] - best[:, 1]).min().item()])
    print(json.dumps([model.config.model_type, prompts, out]))
"#;

/// The expected tokens, and the smallest difference between the largest and the second largest logit of any step.
type Expected = (Vec<u32>, f64);

/// Returns the lists that a script printed. Skips lines that libraries log to standard output, such as `[2026-11-26
/// 12:00:00] [INFO] …`.
fn results(out: &str) -> impl Iterator<Item = &str> {
    out.lines().filter(|line| serde_json::from_str::<Vec<Value>>(line).is_ok())
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("FOLDER = {:?}\n{MODELS}", folder.path().display().to_string());
    let Some(out) = crate::python::python(&["torch", "transformers"], &script) else { return };
    let lines: Vec<&str> = results(&out).collect();
    assert_eq!(lines.len(), 8, "{out}");
    for (index, line) in lines.into_iter().enumerate() {
        let (kind, prompts, expected): (String, Vec<Vec<u32>>, Vec<Expected>) = serde_json::from_str(line).unwrap();
        let generator = Generator::open(folder.path().join(index.to_string()), None).unwrap();
        let options = Generate { max_new_tokens: 200, ..Generate::default() };
        let got = generator.generate(&prompts, &options, |_, _| {}).unwrap();
        for (at, (got, (tokens, gap))) in got.iter().zip(&expected).enumerate() {
            let mut distinct = tokens.clone();
            distinct.sort_unstable();
            distinct.dedup();
            println!("{kind}, prompt {at}: {} distinct tokens, least distance of logits {gap:.1e}", distinct.len());
            assert!(distinct.len() > 5, "{kind}: transformers repeats {distinct:?}");
            assert_eq!(got.tokens, *tokens, "{kind}, prompt {at}, distance {gap:e}");
        }
    }
}

const ADAPTER: &str = r#"
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
from peft import LoraConfig, get_peft_model
torch.manual_seed(2)
base = LlamaForCausalLM(LlamaConfig(vocab_size=211, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=300, initializer_range=0.25,
    bos_token_id=None, eos_token_id=None, pad_token_id=None))
base.eval()
base.save_pretrained(f"{FOLDER}/base")
prompt = [5, 17, 100, 8, 44]
generate = lambda model: model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=60,
                                        pad_token_id=0)[0, len(prompt):].tolist()
plain = generate(base)
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"],
                                        init_lora_weights=False, use_rslora=True, task_type="CAUSAL_LM")).eval()
model.save_pretrained(f"{FOLDER}/adapter")
print(json.dumps([prompt, plain, generate(model)]))
"#;

#[test]
fn greedy_tokens_with_an_adapter_are_those_of_peft() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("FOLDER = {:?}\n{ADAPTER}", folder.path().display().to_string());
    let Some(out) = crate::python::python(&["torch", "transformers", "peft"], &script) else { return };
    let line = results(&out).next().unwrap();
    let [prompt, plain, adapted]: [Vec<u32>; 3] = serde_json::from_str(line).unwrap();
    assert_ne!(plain, adapted);
    let (base, adapter) = (folder.path().join("base"), folder.path().join("adapter"));
    let options = Generate { max_new_tokens: 60, ..Generate::default() };
    let run = |adapter: Option<&Path>| {
        let generator = Generator::open(&base, adapter).unwrap();
        generator.generate(std::slice::from_ref(&prompt), &options, |_, _| {}).unwrap().remove(0).tokens
    };
    assert_eq!(run(None), plain);
    assert_eq!(run(Some(&adapter)), adapted);
    let error = Generator::open(&adapter, None).err().unwrap().to_string();
    assert!(error.contains("is an adapter without its base model") && error.contains("--adapter"), "{error}");
}

const PROCESSORS: &str = r#"
import json, torch
from transformers import (LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
                          TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
for case in CASES:
    logits = torch.tensor([case["logits"]])
    all = LogitsProcessorList()
    if case["repetition_penalty"] != 1: all.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    all.append(TemperatureLogitsWarper(case["temperature"]))
    if case["top_k"]: all.append(TopKLogitsWarper(case["top_k"]))
    if case["top_p"]: all.append(TopPLogitsWarper(case["top_p"]))
    if case["min_p"]: all.append(MinPLogitsWarper(case["min_p"]))
    print(json.dumps(torch.softmax(all(torch.tensor([case["seen"]]), logits).double(), -1)[0].tolist()))
"#;

#[test]
fn probabilities_are_those_of_transformers() {
    let mut cases = vec![];
    for (index, (temperature, top_k, top_p, min_p, repetition_penalty)) in [
        (1.0, None, None, None, 1.0),
        (0.7, Some(5), None, None, 1.0),
        (1.3, None, Some(0.9), None, 1.0),
        (1.3, None, Some(1e-6), None, 1.0),
        (0.9, None, None, Some(0.1), 1.0),
        (0.8, Some(40), Some(0.8), Some(0.05), 1.3),
        (1.0, Some(3), None, None, 0.8),
        (2.0, Some(1000), Some(0.999), None, 1.0),
    ]
    .into_iter()
    .enumerate()
    {
        let mut logits = vec![0.0; 301];
        Stream::new(9, "logits", index as u64).fill_normal(0, &mut logits);
        // Rounding makes some logits equal.
        logits.iter_mut().for_each(|logit| *logit = (*logit * 12.0).round() / 4.0);
        let sampling = Sampling { temperature, top_k, top_p, min_p, repetition_penalty };
        cases.push((logits, sampling));
    }
    let seen = [3, 7, 7, 200];
    let case = |(logits, s): &(Vec<f32>, Sampling)| {
        json!({"logits": logits, "seen": seen, "temperature": s.temperature, "top_k": s.top_k.unwrap_or(0),
               "top_p": s.top_p.unwrap_or(0.0), "min_p": s.min_p.unwrap_or(0.0),
               "repetition_penalty": s.repetition_penalty})
    };
    let text = Value::Array(cases.iter().map(case).collect()).to_string();
    let Some(out) = crate::python::python(&["torch", "transformers"], &format!("CASES = {text}\n{PROCESSORS}")) else {
        return;
    };
    let lines: Vec<&str> = results(&out).collect();
    assert_eq!(lines.len(), cases.len());
    for ((logits, sampling), line) in cases.iter().zip(lines) {
        let expected: Vec<f64> = serde_json::from_str(line).unwrap();
        let got = sampling.probabilities(logits, &seen);
        for (token, (got, expected)) in got.iter().zip(&expected).enumerate() {
            // transformers divides logits by the temperature in f32, so its exponents of up to 20 differ by about 1e-6.
            let is_close = (got - expected).abs() <= 5e-6 * expected;
            // If two tokens at the top-p limit are equally likely, either may be kept.
            let is_tied = sampling.top_p.is_some() && logits.iter().filter(|x| **x == logits[token]).count() > 1;
            assert!(
                is_close || is_tied && (*got == 0.0 || *expected == 0.0),
                "{sampling:?}: {token}: {got} {expected}"
            );
        }
    }
}
