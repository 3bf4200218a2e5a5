//! Compares the fast encoder with the crate `tokenizers` and with transformers, for random and for real text.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;
use crate::data::tokens::pieces::{Cuts, word_start};
use crate::python;

/// Returns a byte-level tokenizer with a few merges and added tokens.
fn tokenizer(pre_tokenizer: &Value, normalizer: &Value, dropout: &Value) -> Value {
    let symbols = SYMBOLS.iter().map(|symbol| symbol.to_string());
    let merges = [
        "h e",
        "l l",
        "he ll",
        "Ġ w",
        "o r",
        "Ġw or",
        "ll o",
        "Ċ Ċ",
        "Ġ Ġ",
        "ĠĠ ĠĠ",
        "' s",
        "' l",
        "'l l",
        "1 2",
        "12 3",
        "Ã ©",
        "i n",
        "e r",
        "t h",
        "th e",
        "Ġ the",
        "r e",
        "o n",
        "Å ¿",
    ];
    let all = symbols.chain(merges.map(|pair| pair.replace(' ', "")));
    let vocabulary: serde_json::Map<String, Value> = all.enumerate().map(|(id, symbol)| (symbol, id.into())).collect();
    let added = json!([
        {"id": 1000, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
        {"id": 1001, "content": "zz", "single_word": true, "lstrip": true, "rstrip": false, "normalized": true, "special": false},
        {"id": 1002, "content": "<mask>", "single_word": false, "lstrip": true, "rstrip": true, "normalized": false, "special": true},
    ]);
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": normalizer, "added_tokens": added,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "dropout": dropout},
    })
}

fn level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

fn split(pattern: &str) -> Value {
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    json!({"type": "Sequence", "pretokenizers": [split, level(false)]})
}

/// Returns a tokenizer of each recognized kind.
fn recognized() -> Vec<(Value, Tokenizer, Words)> {
    let none = Value::Null;
    let nfc = json!({"type": "NFC"});
    [(level(true), &none), (split(LLAMA_3), &none), (split(QWEN_2), &nfc)]
        .into_iter()
        .map(|(pre_tokenizer, normalizer)| {
            let json = tokenizer(&pre_tokenizer, normalizer, &none);
            let tokenizer: Tokenizer = json.to_string().parse().unwrap();
            let words = Words::of(&tokenizer).expect("the tokenizer is recognized");
            (json, tokenizer, words)
        })
        .collect()
}

fn expected(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// Generates texts with all parts of the patterns, and with arbitrary characters.
fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => prop::sample::select(vec![
            " ", "  ", "\n", "\r\n", "\r", "\t", "\u{a0}", "\u{2028}", "\u{3000}", "'", "'s", "'S", "<mask>", "'ſ", "'ll", "'LL", "'lL",
            "'re", "'Ve", "'d", "'M", "'T", "1", "12", "１", "²", "Ⅷ", "三", "é", "e\u{301}", "ß", "ǆ", "ª", "ʰ", "\u{345}",
            "hello", " world", "!", "...", "<|", "|>", "🦀", "👩‍👩‍👧", "\u{200b}", "\u{feff}", "ก็", "हिन्दी", "z", "\0",
        ]).prop_map(String::from),
        2 => "[ -~]{1,8}",
        2 => any::<char>().prop_map(String::from),
        1 => "\\PC{1,6}",
        1 => "\\s{1,4}",
    ];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

#[test]
fn tokens_of_random_text_are_those_of_the_crate() {
    let all = recognized();
    let config = ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(text in texts())| {
        for (json, tokenizer, words) in &all {
            if let Some(tokens) = words.encode(tokenizer, &text) {
                prop_assert_eq!(tokens, expected(tokenizer, &text), "{:?} {}", text, json["pre_tokenizer"]);
            } else {
                let is_normalizing = !json["normalizer"].is_null();
                prop_assert!(text.contains("zz") || text.contains("<|end|>") || text.contains("<mask>") || is_normalizing, "{:?}", text);
            }
        }
    });
}

#[test]
fn texts_can_be_cut_at_word_starts() {
    let all = recognized().into_iter().map(|(mut json, tokenizer, _)| {
        assert_eq!(Cuts::of(&tokenizer), Cuts::Nowhere);
        // The added token "zz" also matches the line break before it.
        json["added_tokens"].as_array_mut().unwrap().retain(|token| token["content"] != "zz");
        let tokenizer: Tokenizer = json.to_string().parse().unwrap();
        assert_eq!(Cuts::of(&tokenizer), Cuts::Words);
        (json, tokenizer)
    });
    let all: Vec<_> = all.collect();
    let config = ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() };
    let count = std::cell::Cell::new(0);
    proptest!(config, |(text in texts())| {
        let mut at = 0;
        while let Some(start) = word_start(text.as_bytes(), at..text.len()) {
            for (json, tokenizer) in &all {
                let (mut tokens, after) = (expected(tokenizer, &text[..start]), expected(tokenizer, &text[start..]));
                tokens.extend(after);
                prop_assert_eq!(tokens, expected(tokenizer, &text), "{:?} at {} {}", text, start, json["pre_tokenizer"]);
            }
            at = start + 1;
            count.set(count.get() + 1);
        }
    });
    assert!(count.get() > 100, "{count:?}");
}

/// This module and the crate split each character of the Unicode planes in use in the same way, alone and between other
/// characters.
#[test]
fn every_character_is_split_as_by_the_crate() {
    let all: Vec<char> = ('\0'..='\u{323ff}').chain('\u{e0000}'..='\u{e01ff}').collect();
    for (json, tokenizer, words) in recognized() {
        let mut encoded = 0;
        for block in all.chunks(512) {
            let text: String = block.iter().flat_map(|&c| [c, 'a', ' ', c, '1']).collect();
            if let Some(tokens) = words.encode(&tokenizer, &text) {
                assert_eq!(tokens, expected(&tokenizer, &text), "{:?} {}", block[0], json["pre_tokenizer"]);
                encoded += 1;
            }
        }
        // With a normalizer, the fast encoder accepts only chunks that are certainly in normal form. There are only a
        // few.
        assert!(encoded > 50, "{encoded}");
    }
}

/// Returns source files and documents of this repository.
fn real_texts() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folders = ["docs", "trainer/src/data", "trainer/src/data/chat", "trainer/src/data/chat/tests", "."];
    let mut paths: Vec<_> = folders
        .iter()
        .flat_map(|folder| fs::read_dir(root.join(folder)).unwrap())
        .map(|file| file.unwrap().path())
        .collect();
    paths.sort();
    let is_text = |path: &PathBuf| path.extension().is_some_and(|end| end == "md" || end == "rs");
    paths.into_iter().filter(is_text).map(|path| fs::read_to_string(path).unwrap()).collect()
}

#[test]
fn tokens_of_real_text_are_those_of_the_crate() {
    let texts = real_texts();
    assert!(texts.len() > 40);
    for (_, tokenizer, words) in recognized() {
        let mut encoded = 0;
        for text in &texts {
            let text = text.replace("zz", "z");
            if let Some(tokens) = words.encode(&tokenizer, &text) {
                assert_eq!(tokens, expected(&tokenizer, &text));
                encoded += 1;
            }
        }
        assert!(encoded > 20, "{encoded}");
    }
}

#[test]
fn words_outside_the_cache_have_the_same_tokens() {
    let (_, tokenizer, words) = recognized().remove(0);
    let long = "hello".repeat(LONGEST);
    let many: String = (0..KEPT + 1000).map(|i| format!(" w{}", i % (KEPT + 500)).replace(['0', '5'], "he")).collect();
    for text in [&long, &many, &long] {
        assert_eq!(words.encode(&tokenizer, text).unwrap(), expected(&tokenizer, text));
    }
}

#[test]
fn unrecognized_tokenizers_use_the_crate() {
    let none = Value::Null;
    let other = split(&LLAMA_3.replace("{1,3}", "{1,2}"));
    let mut prefixed = level(true);
    prefixed["add_prefix_space"] = true.into();
    for json in [
        tokenizer(&other, &none, &none),
        tokenizer(&prefixed, &none, &none),
        tokenizer(&none, &none, &none),
        tokenizer(&level(true), &json!({"type": "NFKC"}), &none),
        tokenizer(&level(true), &none, &json!(0.1)),
    ] {
        assert!(Words::of(&json.to_string().parse().unwrap()).is_none(), "{json}");
    }
    // This post-processor duplicates the tokens.
    let mut doubled = tokenizer(&level(true), &none, &none);
    let of_text = json!({"Sequence": {"id": "A", "type_id": 0}});
    doubled["post_processor"] = json!({"type": "TemplateProcessing", "single": [of_text, of_text], "pair": [of_text, {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}});
    assert!(Words::of(&doubled.to_string().parse().unwrap()).is_none());
}

#[test]
fn tokens_are_those_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: String| folder.path().join(name);
    let texts: Vec<String> = real_texts().into_iter().map(|text| text.replace("zz", "z")).collect();
    fs::write(path("texts.json".into()), json!(texts).to_string()).unwrap();
    let all = recognized();
    for (i, (json, ..)) in all.iter().enumerate() {
        fs::write(path(format!("{i}.json")), json.to_string()).unwrap();
    }
    let script = format!(
        "import json\nfrom transformers import PreTrainedTokenizerFast\nfolder = {:?}\n\
         texts = json.load(open(folder + '/texts.json', encoding='utf-8'))\n\
         for i in range({}):\n    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f'{{folder}}/{{i}}.json')\n    \
         print(json.dumps(tokenizer(texts, add_special_tokens=False)['input_ids']))\n",
        folder.path().display().to_string(),
        all.len()
    );
    let Some(output) = python::python(&["transformers"], &script) else { return };
    let theirs: Vec<Vec<Vec<u32>>> = output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(theirs.len(), all.len());
    for ((_, tokenizer, words), theirs) in all.iter().zip(theirs) {
        for (text, theirs) in texts.iter().zip(theirs) {
            if let Some(tokens) = words.encode(tokenizer, text) {
                assert_eq!(tokens, theirs);
            }
        }
    }
}
