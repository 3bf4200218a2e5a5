//! Finds the splits of a data set in a folder or a repository. As in Hugging Face's `datasets`, the names of the files
//! determine the splits, unless the dataset card lists them.

use std::fs;
use std::io;
use std::path::Path;

use glob::{MatchOptions, Pattern};
use serde_json::Value;
use zero_engine::DataError;

use super::folder::{DESCRIPTIONS, Folder, saved_split};

/// The split of files that are named individually, and of a folder whose file names contain no split.
const TRAIN: &str = "train";
/// The dataset card of a repository. Its YAML header may list the files of each split.
pub(super) const CARD: &str = "README.md";
/// The words in names of files and folders that indicate a split.
const KEYWORDS: [(&str, &[&str]); 3] = [
    (TRAIN, &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];
/// Names of files that never contain data.
const NO_DATA: [&str; 6] =
    [CARD, "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json"];
/// Extensions of supported data files. The extension of an archive may follow.
const EXTENSIONS: [&str; 8] = ["csv", "json", "jsonl", "ndjson", "parquet", "arrow", "feather", "txt"];

const MATCHING: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };

/// The splits of a folder, each with the indices of its files. Messages list the splits in this order.
type Splits = Vec<(String, Vec<usize>)>;

/// Returns the files or shards of `split` in a folder.
///
/// # Errors
/// Fails if the folder has no such split, or if it cannot be read.
pub(super) fn open(folder: &Path, split: &str) -> Result<Folder, DataError> {
    let described = |folder: &Path| DESCRIPTIONS[..2].iter().any(|name| folder.join(name).is_file());
    if described(folder) {
        has(folder, split, vec![saved_split(folder)?.unwrap_or_else(|| TRAIN.into())])?;
    }
    let part = folder.join(split);
    let whole = if !described(folder) && described(&part) { &part } else { folder };
    if described(whole) {
        // `described` has found a file that makes `Folder::open` recognize a data set.
        return Folder::open(whole)?.ok_or_else(|| DataError::Empty { sources: vec![whole.display().to_string()] });
    }
    if folder.join(DESCRIPTIONS[2]).is_file() {
        return match Folder::open(folder) {
            Err(DataError::Splits { path, splits }) => Err(DataError::NoSplit { path, split: split.into(), splits }),
            other => other?.ok_or_else(|| DataError::Empty { sources: vec![folder.display().to_string()] }),
        };
    }
    let mut names = vec![];
    walk(folder, "", &mut names).map_err(DataError::io(folder))?;
    names.sort_unstable();
    let card = folder.join(CARD);
    let card = if card.is_file() { Some(fs::read_to_string(&card).map_err(DataError::io(&card))?) } else { None };
    let files = select(folder, &names, card.as_deref(), split)?;
    Ok(Folder::Files(files.into_iter().map(|index| folder.join(&names[index])).collect()))
}

/// Fails if `split` is not `train`. Files that are named individually belong to this split.
pub(super) fn is_train(path: &Path, split: &str) -> Result<(), DataError> {
    has(path, split, vec![TRAIN.into()])
}

fn has(path: &Path, split: &str, splits: Vec<String>) -> Result<(), DataError> {
    match splits.iter().any(|other| other == split) {
        true => Ok(()),
        false => Err(DataError::NoSplit { path: path.into(), split: split.into(), splits }),
    }
}

/// Collects the names of all files in a folder and its subfolders, except hidden files and folders.
fn walk(folder: &Path, below: &str, names: &mut Vec<String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // A name that is not UTF-8 cannot indicate a split.
        let Ok(name) = entry.file_name().into_string() else { continue };
        if name.starts_with('.') {
            continue;
        }
        let name = format!("{below}{name}");
        match fs::metadata(entry.path())?.is_dir() {
            // Links to folders are skipped, because they may form a cycle.
            true if entry.file_type()?.is_symlink() => {}
            true => walk(&entry.path(), &format!("{name}/"), names)?,
            false => names.push(name),
        }
    }
    Ok(())
}

/// Returns the indices of the files of `split`, in order. `names` are the sorted names of all files in the folder at
/// `path`, and `card` is the text of its dataset card.
///
/// # Errors
/// Fails if the split does not exist, or if the list of files in the card is invalid.
pub(super) fn select(path: &Path, names: &[String], card: Option<&str>, split: &str) -> Result<Vec<usize>, DataError> {
    let damaged = |message: String| DataError::Damaged { path: path.join(CARD), at: None, message };
    let listed = card.map_or(Ok(None), configuration).map_err(damaged)?;
    let splits = match listed {
        Some(configuration) => of_configuration(names, &configuration).map_err(damaged)?,
        None => by_names(names, ""),
    };
    let names_of = || splits.iter().map(|(name, _)| name.clone()).collect();
    let files = splits.iter().find(|(name, _)| name == split).map(|(_, files)| files.as_slice()).unwrap_or_default();
    let is_data = |&&index: &&usize| base(&names[index]).split('.').skip(1).any(|part| EXTENSIONS.contains(&part));
    let mut found: Vec<usize> = vec![];
    for &index in files.iter().filter(is_data) {
        if !found.contains(&index) {
            found.push(index);
        }
    }
    match (found.is_empty(), files.is_empty()) {
        (false, _) => Ok(found),
        (true, true) => Err(DataError::NoSplit { path: path.into(), split: split.into(), splits: names_of() }),
        (true, false) => {
            let message = format!("no file in the split `{split}` has the extension of a supported data format");
            Err(DataError::Slice { sources: vec![path.display().to_string()], message })
        }
    }
}

/// Returns the configuration in the header of a dataset card, or `None` if the header has none.
fn configuration(card: &str) -> Result<Option<Value>, String> {
    let lines: Vec<&str> = card.lines().collect();
    let end = lines.iter().skip(1).position(|line| line.trim_end() == "---");
    let (Some(&"---"), Some(end)) = (lines.first(), end) else { return Ok(None) };
    let head = lines[1..=end].join("\n");
    if !head.lines().any(|line| line.starts_with("configs:")) {
        return Ok(None);
    }
    let head = zero_config::yaml(&head)
        .ok_or("the YAML header of the dataset card is invalid; specify files instead of a split")?;
    let list = head["configs"].as_array().cloned().unwrap_or_default();
    let name = |configuration: &Value| configuration["config_name"].as_str().unwrap_or_default().to_string();
    let is_default = |configuration: &&Value| configuration["default"] == true || name(configuration) == "default";
    match (&list[..], list.iter().find(is_default)) {
        ([], _) => Ok(None),
        ([one], _) | (_, Some(one)) => Ok(Some(one.clone())),
        (several, None) => {
            let names: Vec<String> = several.iter().map(name).collect();
            Err(format!(
                "the dataset card lists the configurations {}; specify the files of one configuration instead of a split",
                names.join(", ")
            ))
        }
    }
}

/// Returns the splits that a configuration lists. Without a list, returns the splits of the configuration's folder.
fn of_configuration(names: &[String], configuration: &Value) -> Result<Splits, String> {
    let folder =
        configuration["data_dir"].as_str().map_or(String::new(), |folder| format!("{}/", folder.trim_matches('/')));
    let texts = |value: &Value| match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(items) => items.iter().map(|item| item.as_str().map(String::from)).collect(),
        _ => None,
    };
    let listed = match &configuration["data_files"] {
        Value::Null => return Ok(by_names(names, &folder)),
        Value::Array(items) if items.iter().any(Value::is_object) => {
            let item = |item: &Value| Some((item["split"].as_str()?.to_string(), texts(&item["path"])?));
            items.iter().map(item).collect::<Option<Vec<_>>>()
        }
        files => texts(files).map(|files| vec![(TRAIN.into(), files)]),
    };
    let listed = listed.ok_or("`data_files` in the dataset card must be file names, or splits with a `path`")?;
    let matching = |text: &String| {
        let pattern = format!("{folder}{}", text.trim_start_matches("./"));
        let pattern = Pattern::new(&pattern).map_err(|error| format!("`{pattern}`: {}", error.msg))?;
        let is_match = |&index: &usize| is_visible(&names[index]) && pattern.matches_with(&names[index], MATCHING);
        Ok((0..names.len()).filter(is_match).collect::<Vec<_>>())
    };
    let files = |(name, patterns): &(String, Vec<String>)| {
        let files = patterns.iter().map(matching).collect::<Result<Vec<_>, String>>()?;
        Ok((name.clone(), files.concat()))
    };
    listed.iter().map(files).collect()
}

/// Determines the splits of a folder from names: from the names of shards in `data/`, or else from words in the names
/// of folders, or else from words in the names of files. Without such names, all files belong to the split `train`.
fn by_names(names: &[String], folder: &str) -> Splits {
    let inside: Vec<(usize, &str)> = names
        .iter()
        .enumerate()
        .filter_map(|(index, name)| Some((index, name.strip_prefix(folder)?)))
        .filter(|(_, name)| is_visible(name))
        .collect();
    let mut shards: Splits = vec![];
    for (index, split) in inside.iter().filter_map(|(index, name)| Some((*index, split_of_shard(name)?))) {
        match shards.iter_mut().find(|(name, _)| name == split) {
            Some((_, files)) => files.push(index),
            None => shards.push((split.into(), vec![index])),
        }
    }
    if !shards.is_empty() {
        let place = |name: &str| KEYWORDS.iter().position(|(split, _)| *split == name).unwrap_or(KEYWORDS.len());
        shards.sort_by(|(a, _), (b, _)| place(a).cmp(&place(b)).then_with(|| a.cmp(b)));
        return shards;
    }
    // Files are ordered by keyword, and files with the same keyword by the keyword's place in the name.
    let by = |places: &[KeywordPosition], of: &dyn Fn(&str, &str, KeywordPosition) -> bool| -> Splits {
        let files = |keywords: &[&str]| {
            let places = keywords.iter().flat_map(|keyword| places.iter().map(|place| (*keyword, *place)));
            let found = |(keyword, place): (&str, KeywordPosition)| {
                inside.iter().filter(|(_, name)| of(name, keyword, place)).map(|(index, _)| *index).collect::<Vec<_>>()
            };
            places.flat_map(found).collect::<Vec<_>>()
        };
        let splits = KEYWORDS.iter().map(|(split, keywords)| ((*split).to_string(), files(keywords)));
        splits.filter(|(_, files)| !files.is_empty()).collect()
    };
    let in_folder = by(&[(true, true), (true, false), (false, true), (false, false)], &|name, keyword, place| {
        name.rsplit_once('/').is_some_and(|(folders, _)| folders.split('/').any(|part| states(part, keyword, place)))
    });
    if !in_folder.is_empty() {
        return in_folder;
    }
    let in_file = by(&[(true, false), (false, false)], &|name, keyword, place| states(base(name), keyword, place));
    match in_file.is_empty() {
        false => in_file,
        true => vec![(TRAIN.into(), inside.into_iter().map(|(index, _)| index).collect())],
    }
}

/// Whether a keyword is at the beginning of a name, and whether it is at the end. At a side where it is not, a
/// separator or a digit must be next to the keyword.
type KeywordPosition = (bool, bool);

/// Returns whether a file is considered: it is not hidden, is not in a special folder, and may contain data.
fn is_visible(name: &str) -> bool {
    let is_special = |part: &str| part.starts_with("__");
    let folders = name.rsplit_once('/').map_or("", |(folders, _)| folders);
    !NO_DATA.contains(&base(name))
        && !name.split('/').any(|part| part.starts_with('.'))
        && !folders.split('/').any(is_special)
}

/// Returns the split of a shard such as `data/train-00000-of-00001.parquet`.
fn split_of_shard(name: &str) -> Option<&str> {
    let file = name.strip_prefix("data/").filter(|file| !file.contains('/'))?;
    let digits = |text: &str| text.len() >= 5 && text.bytes().take(5).all(|byte| byte.is_ascii_digit());
    file.match_indices("-of-")
        .filter_map(|(at, _)| {
            let (before, after) = (&file[..at], &file[at + 4..]);
            let (split, number) = before.rsplit_once('-')?;
            let is_shard = number.len() == 5 && digits(number) && digits(after) && after[5..].contains('.');
            (is_shard && !split.is_empty()).then_some(split)
        })
        .last()
}

/// Returns whether a name has a keyword at this place. The characters beside the keyword must be separators or digits.
fn states(name: &str, keyword: &str, (is_first, is_last): KeywordPosition) -> bool {
    let is_between = |c: char| matches!(c, '-' | '.' | '_' | ' ' | '0'..='9');
    let fits = |beside: Option<char>, is_end: bool| beside.map_or(is_end, |c| !is_end && is_between(c));
    name.match_indices(keyword).any(|(at, _)| {
        let (before, after) = (name[..at].chars().next_back(), name[at + keyword.len()..].chars().next());
        fits(before, is_first) && fits(after, is_last)
    })
}

fn base(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}
