//! The section `data`, and the sources of a mixture.

use zero_config::*;

use crate::texts::{source, valid};

fn with(text: &str) -> Config {
    valid(&format!("train_micro_batch_size_per_gpu: 1\n{text}"))
}

#[test]
fn data_takes_paths_and_defaults_to_the_models_longest_sequence() {
    let config = with("model: {type: gpt2, n_positions: 64}\ndata: {train: a.jsonl, eval: [b, c], format: jsonl}");
    let data = config.data.expect("data");
    assert_eq!((data.train.as_deref(), data.sequence_length), (Some(&["a.jsonl".to_string()][..]), Some(64)));
    assert_eq!(data.eval.as_deref(), Some(&["b".to_string(), "c".to_string()][..]));
    assert_eq!(data.format, DataFormat::Jsonl);
    assert_eq!(with("data: {train: a}").data.expect("data").sequence_length, None);
}

#[test]
fn several_data_sets_have_shares_of_an_epoch() {
    let text = |data: &str| format!("train_batch_size: 1\ndata: {{{data}}}");
    let parse = |data: &str| Config::parse("ds.yaml", text(data));
    let config =
        parse("datasets: [{path: a, weight: 2}, {path: [b, c], weight: 1, name: more, format: jsonl}]").unwrap();
    let yaml = config.to_yaml();
    assert_eq!(Config::parse("again", yaml.as_str()).expect(&yaml).data, config.data);
    let sets = config.data.expect("data").datasets.expect("datasets");
    assert_eq!((sets[0].path.as_slice(), sets[0].name_at(0)), (&["a".to_string()][..], "0".to_string()));
    assert_eq!((sets[1].path.len(), sets[1].share(), sets[1].format), (2, Share::Weight(1.0), Some(DataFormat::Jsonl)));
    let sets = parse("datasets: [{path: a}, {path: b, choose: 7}, {path: c, repeat: 0.5}]").unwrap().data.unwrap();
    let shares: Vec<Share> = sets.datasets.unwrap().iter().map(MixedDataset::share).collect();
    assert_eq!(shares, [Share::Repeat(1.0), Share::Choose(7), Share::Repeat(0.5)]);
    let chat = "tokenizer: t, chat: {type: alpaca}, datasets: [{path: a, format: chat}, {path: b}]";
    assert_eq!(parse(chat).unwrap().data.unwrap().chat.expect("chat").kind, ChatType::Alpaca);

    let source = source(text("datasets: [{path: a}, {path: b, repeat: 2}]"));
    let typed = load(source, &["data.datasets.1.repeat=3".into(), "data.datasets.0.path=c".into()]).unwrap();
    let sets = typed.resolve(None).unwrap().data.unwrap().datasets.unwrap();
    assert_eq!((sets[0].path[0].as_str(), sets[1].share()), ("c", Share::Repeat(3.0)));

    for (data, expected) in [
        ("format: text", "`data.train` is missing"),
        ("train: a, datasets: [{path: b}]", "both set the training data"),
        ("datasets: []", "`data.datasets`: expected a list of sections, found a list"),
        ("datasets: {path: a}", "`data.datasets`: expected a list of sections, found a section"),
        ("datasets: [a]", "`data.datasets.0`: expected a section"),
        ("datasets: [{}]", "`data.datasets.0.path` is missing"),
        ("datasets: [{path: a, weigth: 1}]", "unknown key `data.datasets.0.weigth`"),
        ("datasets: [{path: a, weight: -1}]", "`data.datasets.0.weight`: expected a number, at least 0"),
        ("datasets: [{path: a, weight: 1}, {path: b}]", "`weight` is set for data set `0` but not for `1`"),
        (
            "datasets: [{path: a, weight: 1, repeat: 2}]",
            "`weight` and `repeat` both set the data set's share of an epoch",
        ),
        ("datasets: [{path: a, proportion: 0.5}, {path: b, proportion: 0.4}]", "the proportions add up to 0.9"),
        ("datasets: [{path: a, weight: 0}]", "all weights are 0"),
        ("datasets: [{path: a, name: x}, {path: b, name: x}]", "two data sets have the name `x`"),
        ("datasets: [{path: a, name: x/y}]", "`x/y` is not a valid data set name"),
        (
            "eval_fraction: 0.1, datasets: [{path: a, eval: b}]",
            "`data.datasets.0.eval` and `data.eval_fraction` both set",
        ),
        ("datasets: [{path: a, format: chat}]", "needs a tokenizer with special tokens"),
    ] {
        let errors = parse(data).expect_err(data);
        assert_eq!(errors.count(), 1, "{errors}");
        assert!(errors.to_string().contains(expected), "{errors}");
    }
}
