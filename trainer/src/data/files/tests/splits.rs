//! Finds the splits of folders by file names. Compares them with the splits that `datasets` finds, if it is installed.

use std::fmt::Write as _;

use serde_json::Value;
use zero_config::SplitPart;

use super::super::splits::select;
use super::*;
use crate::python;

/// Returns the names that belong to a split.
fn chosen<'n>(names: &[&'n str], card: Option<&str>, split: &str) -> Result<Vec<&'n str>, String> {
    let mut names = names.to_vec();
    names.sort_unstable();
    let owned: Vec<String> = names.iter().map(ToString::to_string).collect();
    let found = select(Path::new("set"), &owned, card, split).map_err(|error| error.to_string())?;
    Ok(found.into_iter().map(|index| names[index]).collect())
}

#[test]
fn file_and_folder_names_define_splits() {
    let shards = [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/my_split-00000-of-00001-abc.parquet",
        "train.jsonl",
        "README.md",
    ];
    let folders =
        ["a/dev-2/x.jsonl", "a/train/b/y.jsonl", "a/z_training/w.csv", "val/x.jsonl", "train.jsonl", "test.jsonl"];
    let files = [
        "my-train.jsonl",
        "train.jsonl",
        "dev_1.txt.gz",
        "x.validation.json",
        "eval.csv",
        "training.png",
        "trains.csv",
    ];
    let plain = ["b.jsonl", "a.jsonl", ".hidden.jsonl", "__cache/c.jsonl", "README.md", "contest.txt"];
    for (names, split, expected) in [
        (&shards[..], "train", &shards[..2]),
        (&shards, "my_split", &shards[2..3]),
        (&folders, "train", &["a/train/b/y.jsonl", "a/z_training/w.csv"]),
        (&folders, "validation", &["a/dev-2/x.jsonl", "val/x.jsonl"]),
        (&files, "train", &["train.jsonl", "my-train.jsonl"]),
        (&files, "validation", &["x.validation.json", "dev_1.txt.gz"]),
        (&files, "test", &["eval.csv"]),
        (&plain, "train", &["a.jsonl", "b.jsonl", "contest.txt"]),
    ] {
        assert_eq!(chosen(names, None, split).unwrap(), expected, "{names:?} {split}");
    }
    for (names, split, expected) in [
        (&shards[..], "test", "set has no split `test`; it has train, my_split"),
        (&folders, "test", "set has no split `test`; it has train, validation"),
        (&plain, "test", "set has no split `test`; it has train"),
        (&["train.png"], "train", "set: no file in the split `train` has the extension of a supported data format"),
    ] {
        assert_eq!(chosen(names, None, split).unwrap_err(), expected);
    }
}

#[test]
fn a_data_set_card_defines_splits() {
    let names = ["en/a.jsonl", "en/b.jsonl", "de/c.jsonl", "train.jsonl", "README.md"];
    let card = |configs: &str| format!("---\nlicense: mit\nconfigs:\n{configs}---\n# A data set\n\n---\nconfigs: no\n");
    let listed = card(
        "- config_name: all\n  data_files:\n  - split: train\n    path: [en/*, de/c.jsonl]\n  - split: odd\n    path: train.jsonl\n",
    );
    assert_eq!(chosen(&names, Some(&listed), "train").unwrap(), ["en/a.jsonl", "en/b.jsonl", "de/c.jsonl"]);
    assert_eq!(chosen(&names, Some(&listed), "odd").unwrap(), ["train.jsonl"]);
    assert_eq!(chosen(&names, Some(&listed), "test").unwrap_err(), "set has no split `test`; it has train, odd");
    let default = card("- config_name: de\n  data_files: de/*\n- config_name: en\n  data_dir: en\n  default: true\n");
    assert_eq!(chosen(&names, Some(&default), "train").unwrap(), ["en/a.jsonl", "en/b.jsonl"]);
    for (configs, expected) in [
        (
            "- config_name: de\n- config_name: en\n",
            "the dataset card lists the configurations de, en; specify the files of one",
        ),
        ("- config_name: de\n  data_files: 3\n", "`data_files` in the dataset card must be file names, or splits"),
        (
            "- config_name: de\n  data_files: [{split: train}]\n",
            "`data_files` in the dataset card must be file names, or splits",
        ),
        ("- config_name: de\n  data_files: a**b\n", "`a**b`: "),
        ("- config_name: [\n", "the YAML header of the dataset card is invalid"),
    ] {
        let error = chosen(&names, Some(&card(configs)), "train").unwrap_err();
        assert!(error.starts_with("set/README.md: ") && error.contains(expected), "{configs}\n{error}");
    }
    for without in ["", "# A data set\n", "---\nlicense: mit\n---\n", "---\nconfigs: []\n---\n", "---\nconfigs:\n"] {
        assert_eq!(chosen(&names, Some(without), "train").unwrap(), ["train.jsonl"], "{without:?}");
    }
}

fn of(folder: &Folder, name: &str, split: &str) -> Result<Vec<String>, String> {
    let path = folder.path().join(name).display().to_string();
    let access = CacheOptions::default();
    let found = sources((&[path], Some(split)), Format::Auto, &Access::new(&access, &Unwatched));
    let name = |source: Source| source.path.strip_prefix(folder.path()).unwrap().display().to_string();
    found.map(|sources| sources.into_iter().map(name).collect()).map_err(|error| folder.without(&error))
}

#[test]
fn a_split_is_read_from_folders_of_any_kind() {
    use super::tables::{arrow_stream, batch};
    let folder = Folder::new();
    folder.write("names/train/a.jsonl", "{}");
    folder.write("names/test/b.jsonl", "{}");
    folder.write("saved/dataset_dict.json", r#"{"splits": ["train", "odd"]}"#);
    folder.write("saved/odd/state.json", r#"{"_data_files": [{"filename": "x.arrow"}], "_split": "odd"}"#);
    folder.write("saved/odd/x.arrow", arrow_stream(&[batch(0, 3)], None));
    folder.write("shards/val/index.json", r#"{"version": 2, "shards": []}"#);
    folder.write("one.jsonl", "{}");
    for (name, split, expected) in [
        ("names", "train", &["names/train/a.jsonl"][..]),
        ("names", "test", &["names/test/b.jsonl"]),
        ("saved", "odd", &["saved/odd/x.arrow"]),
        ("saved/odd", "odd", &["saved/odd/x.arrow"]),
        ("one.jsonl", "train", &["one.jsonl"]),
        ("*.jsonl", "train", &["one.jsonl"]),
    ] {
        assert_eq!(of(&folder, name, split).unwrap(), expected, "{name} {split}");
    }
    // The index lists no shards, so the error is not about the split.
    let error = of(&folder, "shards", "val").unwrap_err();
    assert!(!error.contains("split"), "{error}");
    for (name, split, expected) in [
        ("names", "validation", "names has no split `validation`; it has train, test"),
        ("saved", "test", "saved has no split `test`; it has train, odd"),
        ("saved/odd", "train", "saved/odd has no split `train`; it has odd"),
        ("one.jsonl", "test", "one.jsonl has no split `test`; it has train"),
        ("shards/val", "val", "shards/val has no split `val`; it has train"),
    ] {
        assert_eq!(of(&folder, name, split).unwrap_err(), expected);
    }
}

/// Returns a generator of random numbers that are the same in every run.
fn random() -> impl FnMut(usize) -> usize {
    let mut state = 1u64;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    }
}

#[test]
fn split_files_match_those_of_hugging_face_datasets() {
    let mut random = random();
    let folder = Folder::new();
    let words =
        ["train", "training", "dev", "val", "validation", "test", "eval", "a", "data", "x", "trainer", "contest"];
    let between = ["", "-", "_", ".", " ", "1", "b"];
    let ends = [".jsonl", ".csv", ".txt", ".json.gz", ".py", "-00000-of-00002.jsonl", ".parquet", ""];
    let mut trees = vec![];
    for tree in 0..150 {
        let mut names = vec![];
        for _ in 0..1 + random(6) {
            let mut name = String::new();
            for _ in 0..random(3) {
                let _ =
                    write!(name, "{}{}{}/", words[random(12)], between[random(7)], ["", "", "2", "train"][random(4)]);
            }
            let _ = write!(
                name,
                "{}{}{}{}",
                ["", "", "my"][random(3)],
                between[random(7)],
                words[random(12)],
                between[random(7)]
            );
            names.push(name + ends[random(8)]);
        }
        names.retain(|name| !name.split('/').any(|part| part.starts_with('.')));
        // Removes the names of files that are also folders of other files.
        let clashes =
            |name: &String| names.iter().any(|other| other.starts_with(&format!("{name}/")) || name.is_empty());
        let mut names: Vec<String> = names.iter().filter(|name| !clashes(name)).cloned().collect();
        names.sort_unstable();
        names.dedup();
        if names.is_empty() {
            continue;
        }
        names.iter().for_each(|name| drop(folder.write(&format!("{tree}/{name}"), "x")));
        trees.push((tree, names));
    }
    let numbers: Vec<usize> = trees.iter().map(|(tree, _)| *tree).collect();
    let script = format!(
        r#"
import json, os
from datasets.data_files import DataFilesDict, get_data_patterns
KNOWN = [".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather", ".txt"]
all = []
for tree in {numbers:?}:
    base = f"{}/{{tree}}"
    try:
        patterns, found = get_data_patterns(base), {{}}
    except ValueError:  # the name of a shard is no name of a split
        all.append(None)
        continue
    for split, of in patterns.items():
        try:
            files = DataFilesDict.from_patterns({{split: of}}, base_path=base, allowed_extensions=KNOWN)
        except FileNotFoundError:
            continue
        if len(files[split]) > 0:
            found[str(split)] = [os.path.relpath(file, base) for file in dict.fromkeys(files[split])]
    all.append(found)
print(json.dumps(all))
"#,
        folder.path().display()
    );
    let Some(output) = python::python(&["datasets"], &script) else { return };
    let expected: Vec<Value> = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    let mut compared = 0;
    for ((tree, names), expected) in trees.iter().zip(&expected) {
        let Some(expected) = expected.as_object() else { continue };
        for (split, files) in expected {
            let files: Vec<&str> = files.as_array().unwrap().iter().map(|file| file.as_str().unwrap()).collect();
            let found = select(Path::new("set"), names, None, split).unwrap_or_else(|e| panic!("{tree} {names:?} {e}"));
            let found: Vec<&str> = found.into_iter().map(|index| names[index].as_str()).collect();
            assert_eq!(found, files, "{tree} {split} {names:?}");
            compared += 1;
        }
        for split in ["train", "validation", "test"].iter().filter(|split| !expected.contains_key(**split)) {
            let found = select(Path::new("set"), names, None, split);
            assert!(found.is_err(), "{tree} {split} {names:?}");
        }
    }
    assert!(compared > 120, "{compared}");
}

#[test]
fn slices_match_those_of_hugging_face_datasets() {
    let mut random = random();
    let mut specs = vec![];
    for _ in 0..3000 {
        let bound = |random: &mut dyn FnMut(usize) -> usize| match random(6) {
            0 => String::new(),
            1 => format!("{}%", random(101)),
            2 => format!("-{}%", random(104)),
            3 => format!("-{}", random(400)),
            4 => format!("{}", random(400)),
            _ => ["1_0", "5_", "+3", "x", " 1", "1.5", "00", "--1"][random(8)].to_string(),
        };
        let (from, to) = (bound(&mut random), bound(&mut random));
        let end = ["", "", "", "(closest)", "(pct1_dropremainder)", "(up)"][random(6)];
        let spec = match random(5) {
            0 => format!("train{end}"),
            1 => format!("train[{from}:{to}]{end}+ test[{to}:{from}]"),
            _ => format!("train[{from}:{to}]{end}"),
        };
        specs.push((spec, [99, 100, 101, 250, 7, 1000][random(6)], 1 + random(300)));
    }
    let script = format!(
        r#"
import json
from datasets import ReadInstruction
found = []
for spec, train, test in json.loads({:?}):
    try:
        parts = ReadInstruction.from_spec(spec).to_absolute({{"train": train, "test": test}})
        found.append([[part.from_, part.to] for part in parts])
    except ValueError:
        found.append(None)
print(json.dumps(found))
"#,
        serde_json::to_string(&specs).unwrap()
    );
    let Some(output) = python::python(&["datasets"], &script) else { return };
    let expected: Vec<Option<Vec<[u64; 2]>>> = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    assert!(expected.iter().filter(|found| found.is_some()).count() > 500);
    for ((spec, train, test), expected) in specs.iter().zip(expected) {
        let count = |part: &SplitPart| if part.name == "train" { *train } else { *test as u64 };
        let range = |part: &SplitPart| part.range(count(part)).map(|range| [range.start, range.end]);
        let found = SplitPart::parse(spec).map(|parts| parts.iter().map(range).collect::<Vec<_>>());
        match (found, expected) {
            (Err(_), None) => {}
            (Ok(found), None) => assert!(found.iter().any(Result::is_err), "{spec} of {train} and {test}: {found:?}"),
            (Err(error), Some(expected)) => panic!("{spec}: {error}, but datasets has {expected:?}"),
            (Ok(found), Some(expected)) => {
                for (found, [from, to]) in found.into_iter().zip(expected) {
                    // In contrast to `datasets`, an empty slice is an error.
                    assert_eq!(found.ok(), (from < to).then_some([from, to]), "{spec} of {train} and {test}");
                }
            }
        }
    }
}
