//! Reads folders of `datasets` and of mosaicml-streaming that the tests write.

use serde_json::json;

use super::super::super::options::{Format, TokenDtype};
use super::archives::{gzip, zstd};
use super::tables::{arrow_stream, batch};
use super::*;

#[test]
fn a_saved_data_set_has_its_files_in_order() {
    let folder = Folder::new();
    folder.write("train/z.arrow", arrow_stream(&[batch(0, 3)], None));
    folder.write("train/a.arrow", arrow_stream(&[batch(3, 2)], None));
    folder.write(
        "train/state.json",
        r#"{"_data_files": [{"filename": "z.arrow"}, {"filename": "a.arrow"}], "_split": null}"#,
    );
    folder.write("dataset_dict.json", r#"{"splits": ["train", "test"]}"#);
    for format in [Format::Auto, Format::Arrow] {
        let found = documents(&folder.path().join("train"), format, "text").unwrap();
        assert_eq!(
            found.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>(),
            ["text 0", "text 1", "text 2", "text 3", "text 4"]
        );
        assert_eq!(found[3].0, At::Row(0));
    }
    let error = open(folder.path(), Format::Auto).unwrap_err().to_string();
    assert!(
        error.ends_with(&format!(
            "has the splits train, test; choose one of them, as in {}",
            folder.path().join("train").display()
        )),
        "{error}"
    );

    folder.write("train/state.json", r#"{"_data_files": [{"filename": "../../secret.arrow"}]}"#);
    let error = folder.without(&open(&folder.path().join("train"), Format::Auto).unwrap_err());
    assert_eq!(error, "train/state.json: `../../secret.arrow` is not a path in the folder");
    folder.write("other/a.txt", "x");
    assert!(matches!(open(&folder.path().join("other"), Format::Auto), Err(DataError::Directory { .. })));
}

/// Writes shards of mosaicml-streaming. Each column has a name, an encoding and an optional fixed size. The caller
/// sorts the columns by name.
pub(super) struct Mds<'a> {
    pub(super) columns: &'a [(&'a str, &'a str, Option<u32>)],
    pub(super) compression: Option<&'a str>,
}

impl Mds<'_> {
    /// Writes one shard per list of samples. A sample is a list with the bytes of each column.
    pub(super) fn write(&self, folder: &Folder, shards: &[Vec<Vec<Vec<u8>>>]) {
        let shard = |(i, samples): (usize, &Vec<Vec<Vec<u8>>>)| {
            let encode = |sample: &Vec<Vec<u8>>| {
                let sizes = sample.iter().zip(self.columns).filter(|(_, (.., size))| size.is_none());
                let head: Vec<u8> = sizes.flat_map(|(value, _)| (value.len() as u32).to_le_bytes()).collect();
                [head, sample.concat()].concat()
            };
            let samples: Vec<Vec<u8>> = samples.iter().map(encode).collect();
            let mut offset = 4 * (samples.len() as u32 + 2);
            let mut raw = [(samples.len() as u32).to_le_bytes(), offset.to_le_bytes()].concat();
            for sample in &samples {
                offset += sample.len() as u32;
                raw.extend(offset.to_le_bytes());
            }
            raw.extend(samples.concat());
            let name = format!("shard.{i:05}.mds");
            let zip = self.compression.map(|kind| {
                let packed = if kind == "gz" { gzip(&raw) } else { zstd(&raw) };
                folder.write(&format!("{name}.{kind}"), &packed);
                json!({"basename": format!("{name}.{kind}"), "bytes": packed.len(), "hashes": {}})
            });
            if zip.is_none() {
                folder.write(&name, &raw);
            }
            let names = |which: fn(&(&str, &str, Option<u32>)) -> serde_json::Value| {
                self.columns.iter().map(which).collect::<Vec<_>>()
            };
            json!({
                "version": 2, "format": "mds", "samples": samples.len(), "compression": self.compression, "hashes": ["sha1"],
                "column_names": names(|column| column.0.into()), "column_encodings": names(|column| column.1.into()),
                "column_sizes": names(|column| column.2.into()), "size_limit": 67108864, "zip_data": zip,
                "raw_data": {"basename": name, "bytes": raw.len(), "hashes": {"sha1": super::super::shard::hex("sha1", &raw)}},
            })
        };
        let shards: Vec<_> = shards.iter().enumerate().map(shard).collect();
        folder.write("index.json", json!({"version": 2, "shards": shards}).to_string());
    }
}

fn sample(number: i64, text: &str) -> Vec<Vec<u8>> {
    vec![number.to_le_bytes().to_vec(), text.as_bytes().to_vec()]
}

#[test]
fn shards_give_documents_and_records() {
    for compression in [None, Some("gz"), Some("zstd")] {
        let folder = Folder::new();
        let columns = &[("id", "int", Some(8)), ("text", "str", None)];
        let shards = [vec![sample(7, "one"), sample(-8, ""), sample(9, "three")], vec![], vec![sample(10, "four")]];
        Mds { columns, compression }.write(&folder, &shards);
        for format in [Format::Auto, Format::Mds] {
            let found = documents(folder.path(), format, "text").unwrap();
            assert_eq!(found, [(At::Row(0), "one".into()), (At::Row(2), "three".into()), (At::Row(0), "four".into())]);
        }
        let found = values(records(folder.path(), &[]).unwrap());
        assert_eq!(found[1..3], [json!({"id": -8, "text": ""}), json!({"id": 9, "text": "three"})]);
        let message = |column| folder.without(&documents(folder.path(), Format::Auto, column).unwrap_err());
        assert!(message("body").ends_with(": no column `body`; the columns are id, text"), "{}", message("body"));
        assert!(message("id").contains("has the encoding `int`, not `str`"), "{}", message("id"));
    }
}

#[test]
fn shards_give_tokens() {
    let array = |tokens: &[u8]| [&[8, 4, tokens.len() as u8][..], tokens].concat();
    let bytes = |tokens: &[u16]| tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>();
    let cases: [(&str, Vec<Vec<u8>>); 3] = [
        ("bytes", vec![bytes(&[1, 2]), bytes(&[3]), bytes(&[4, 5])]),
        ("ndarray", vec![array(&[1, 2]), array(&[3]), array(&[4, 5])]),
        ("ndarray:uint16", vec![[&[4, 2][..], &bytes(&[1, 2])].concat(), [&[4, 3][..], &bytes(&[3, 4, 5])].concat()]),
    ];
    for (encoding, rows) in cases {
        let folder = Folder::new();
        let rows = rows.into_iter().map(|row| vec![row]).collect();
        Mds { columns: &[("tokens", encoding, None)], compression: None }.write(&folder, &[rows]);
        let mut options = super::super::super::DataOptions::new([folder.path().display().to_string()], Format::Auto);
        options.vocabulary = 6;
        let dataset = super::super::super::open(&options, &super::super::super::Tokenizer::Byte).unwrap();
        let mut samples = super::super::super::records::Samples::default();
        (0..4).for_each(|i| dataset.append(i, &mut samples).unwrap());
        assert_eq!((samples.tokens, samples.targets), (vec![1, 2, 3, 4], vec![2, 3, 4, 5]), "{encoding}");
        options.vocabulary = 5;
        let error = super::super::super::open(&options, &super::super::super::Tokenizer::Byte).err().unwrap();
        assert!(error.to_string().contains(": token 5 is outside the vocabulary of 5 tokens"), "{error}");
    }
    let folder = Folder::new();
    Mds { columns: &[("tokens", "bytes", None)], compression: None }.write(&folder, &[vec![vec![vec![1, 2, 3]]]]);
    let source = &open(folder.path(), Format::Auto).unwrap()[0];
    assert!(source.has_tokens("text") && !source.has_documents("text") && source.has_documents("tokens"));
    let error = source.tokens(TokenDtype::U16, 100, |_| Ok(())).unwrap_err();
    assert_eq!(folder.without(&error), "shard.00000.mds, row 0, column `tokens`: ends within a number");
    // LLM Foundry stores tokens as 64-bit integers in a column with the encoding `bytes`.
    let rows = (1..40i64).map(|token| vec![[token, token + 1].map(i64::to_le_bytes).concat()]).collect();
    let folder = Folder::new();
    Mds { columns: &[("tokens", "bytes", None)], compression: None }.write(&folder, &[rows]);
    let source = &open(folder.path(), Format::Auto).unwrap()[0];
    source.tokens(TokenDtype::I64, 100, |_| Ok(())).unwrap();
    for (dtype, bits) in [(TokenDtype::U16, 16), (TokenDtype::U32, 32)] {
        let error = folder.without(&source.tokens(dtype, 100, |_| Ok(())).unwrap_err());
        assert!(error.starts_with(&format!("shard.00000.mds: every second token of {bits} bits is 0")), "{error}");
    }
}

#[test]
fn a_shard_that_differs_from_its_index_is_an_error() {
    let folder = Folder::new();
    let columns = &[("id", "int", Some(8)), ("text", "str", None)];
    Mds { columns, compression: None }.write(&folder, &[vec![sample(7, "one")]]);
    let (index, shard) = (folder.path().join("index.json"), folder.path().join("shard.00000.mds"));
    let (entry, raw) = (fs::read_to_string(&index).unwrap(), fs::read(&shard).unwrap());
    let message = || folder.without(&documents(folder.path(), Format::Auto, "text").unwrap_err());

    fs::write(&shard, [&raw[..raw.len() - 1], b"X"].concat()).unwrap();
    assert_eq!(message(), "shard.00000.mds: the sha1 checksum differs from the checksum in index.json");
    fs::write(&shard, &raw[..raw.len() - 1]).unwrap();
    assert_eq!(message(), format!("shard.00000.mds: {} bytes, but index.json states {}", raw.len() - 1, raw.len()));
    fs::write(&shard, &raw).unwrap();
    for (from, to, expected) in [
        ("\"samples\":1", "\"samples\":2", "shard.00000.mds: 1 samples, but index.json states 2"),
        ("shard.00000.mds", "/etc/passwd", "index.json: `/etc/passwd` is not a path in the folder"),
        ("\"mds\"", "\"json\"", "index.json: shards in the format `json` are unsupported; only `mds` is supported"),
        ("[8,null]", "[9,null]", "shard.00000.mds, row 0: the sample extends beyond the end of the shard"),
        ("[8,null]", "[7,null]", "shard.00000.mds, row 0: the sample has 15 bytes, but its columns have 14"),
        ("[8,null]", "[8]", "index.json: a shard lists different numbers of column names, encodings and sizes"),
    ] {
        assert!(entry.contains(from), "{entry}");
        fs::write(&index, entry.replace(from, to)).unwrap();
        assert_eq!(message(), expected);
    }
    fs::write(&index, &entry).unwrap();
    fs::remove_file(&shard).unwrap();
    assert_eq!(message(), "shard.00000.mds: No such file or directory (os error 2)");
}
