//! Reads files of every format into samples, and checks the error message for each kind of malformed file.

use std::{fs, path::PathBuf};

use super::records::Samples;
use super::tokens::tokenizer;
use super::*;

pub(super) struct Files(tempfile::TempDir);

impl Files {
    pub(super) fn new(files: &[(&str, &[u8])]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(folder.path().join(name), content).unwrap();
        }
        Files(folder)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(super) fn options(&self, sources: &[&str]) -> DataOptions {
        let sources = sources.iter().map(|source| self.path(source).display().to_string());
        DataOptions { sequence_length: 3, vocabulary: 256, ..DataOptions::new(sources, Format::Auto) }
    }

    fn open(&self, sources: &[&str]) -> Result<FileDataset, DataError> {
        open(&self.options(sources), &Tokenizer::Byte)
    }

    /// Returns the error's message without the folder, which differs between runs.
    fn message(&self, sources: &[&str], change: impl Fn(&mut DataOptions)) -> String {
        let mut options = self.options(sources);
        change(&mut options);
        let error = open(&options, &Tokenizer::Byte).expect_err("bad data must not open");
        error.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }
}

fn sample(dataset: &FileDataset, index: usize) -> Samples {
    let mut samples = Samples::default();
    dataset.append(index, &mut samples).unwrap();
    samples
}

/// Returns all tokens of a corpus that was opened with one token per sample.
pub(super) fn tokens(dataset: &FileDataset) -> Vec<u32> {
    let mut all = sample(dataset, 0).tokens;
    (0..dataset.len()).for_each(|i| all.extend(sample(dataset, i).targets));
    all
}

fn u16s(tokens: &[u16]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

#[test]
fn sample_i_is_the_i_th_window_and_targets_are_one_ahead() {
    let files = Files::new(&[("a.txt", b"abcdefgh")]);
    let dataset = files.open(&["a.txt"]).unwrap();
    assert_eq!((dataset.len(), dataset.shape()), (2, SampleShape::Tokens(3)));
    let mut samples = Samples::default();
    dataset.append(1, &mut samples).unwrap();
    dataset.append(0, &mut samples).unwrap();
    assert_eq!(Tokenizer::Byte.decode(&samples.tokens).unwrap(), "defabc");
    assert_eq!(Tokenizer::Byte.decode(&samples.targets).unwrap(), "efgbcd");

    let before = samples.clone();
    assert!(matches!(dataset.append(2, &mut samples), Err(DataError::Index { index: 2, samples: 2 })));
    assert_eq!(samples, before);
}

#[test]
fn documents_are_joined_by_newlines_in_order() {
    let files = Files::new(&[
        ("b.txt", b"two"),
        ("a.txt", b"one\n"),
        ("empty.txt", b""),
        ("c.jsonl", b"{\"text\": \"three\"}\n\n{\"text\": \"\"}\r\n{\"other\": 1, \"text\": \"f\\u00f6ur\"}"),
    ]);
    let text = |sources: &[&str]| {
        let options = DataOptions { sequence_length: 1, ..files.options(sources) };
        Tokenizer::Byte.decode(&tokens(&open(&options, &Tokenizer::Byte).unwrap())).unwrap()
    };
    assert_eq!(text(&["*.txt"]), "one\n\ntwo");
    assert_eq!(text(&["b.txt", "c.jsonl", "a.txt"]), "two\nthree\nföur\none\n");
}

#[test]
fn a_tokenizer_json_is_used_for_documents() {
    let files = Files::new(&[("a.txt", b"the cat sat"), ("b.jsonl", b"{\"body\": \"on the mat\"}")]);
    let options = DataOptions {
        sequence_length: 1,
        text_key: "body".into(),
        vocabulary: 8,
        ..files.options(&["a.txt", "b.jsonl"])
    };
    let dataset = open(&options, &tokenizer::tests::words()).unwrap();
    // This tokenizer has no token for a newline, so the documents are joined directly.
    assert_eq!(tokens(&dataset), [1, 2, 3, 4, 1, 7]);
}

/// The document is tokenized in many pieces. With at most four threads, one group cannot hold them all.
#[test]
fn a_long_document_has_the_tokens_of_its_pieces() {
    let words = tokenizer::tests::words();
    let lines = 400_000;
    let files = Files::new(&[("a.txt", "the cat sat\n".repeat(lines).as_bytes())]);
    let options = DataOptions { sequence_length: 3 * lines - 1, vocabulary: 8, ..files.options(&["a.txt"]) };
    let dataset = open(&options, &words).unwrap();
    assert_eq!(dataset.len(), 1);
    assert!(sample(&dataset, 0).tokens.iter().zip([1, 2, 3].iter().cycle()).all(|(a, b)| a == b));
}

#[test]
fn token_files_are_joined_and_read_in_pieces() {
    let (first, second): (Vec<u16>, Vec<u16>) = ((0..5).collect(), (5..12).collect());
    let wide: Vec<u8> = (0..12u32).flat_map(|token| (token * 10_000).to_le_bytes()).collect();
    let files =
        Files::new(&[("a.bin", &u16s(&first)), ("b.bin", &u16s(&second)), ("empty.bin", b""), ("wide.bin", &wide)]);

    let dataset = files.open(&["a.bin", "empty.bin", "b.bin"]).unwrap();
    assert_eq!(dataset.len(), 3);
    assert_eq!(sample(&dataset, 1), Samples { tokens: vec![3, 4, 5], targets: vec![4, 5, 6], ..Samples::default() });
    assert_eq!(sample(&dataset, 2).targets, [7, 8, 9]);

    let options = DataOptions { token_dtype: TokenDtype::U32, vocabulary: 120_000, ..files.options(&["wide.bin"]) };
    assert_eq!(sample(&open(&options, &Tokenizer::Byte).unwrap(), 2).tokens, [60_000, 70_000, 80_000]);
}

#[test]
fn a_token_file_that_shrinks_is_an_error_with_its_position() {
    let files = Files::new(&[("a.bin", &u16s(&[1; 100]))]);
    let dataset = files.open(&["a.bin"]).unwrap();
    fs::OpenOptions::new().write(true).open(files.path("a.bin")).unwrap().set_len(100).unwrap();
    let mut samples = Samples::default();
    dataset.append(0, &mut samples).unwrap();
    let before = samples.clone();
    let message = dataset.append(30, &mut samples).unwrap_err().to_string();
    let expected = "a.bin, byte 180: the file was shortened after it was opened, and no longer contains these tokens";
    assert!(message.ends_with(expected), "{message}");
    assert_eq!(samples, before);
}

#[test]
fn rows_have_features_and_a_label() {
    let files = Files::new(&[("a.csv", b"width, height, class\n1.5, -2, 0\r\n\n3e-1,4,2\n"), ("b.csv", b"7,8,1")]);
    let options = DataOptions { vocabulary: 3, ..files.options(&["*.csv"]) };
    let dataset = open(&options, &Tokenizer::Byte).unwrap();
    assert_eq!((dataset.len(), dataset.shape()), (3, SampleShape::Features(2)));
    let mut samples = Samples::default();
    (0..3).for_each(|i| dataset.append(i, &mut samples).unwrap());
    assert_eq!(
        samples,
        Samples {
            tokens: vec![],
            features: vec![1.5, -2.0, 0.3, 4.0, 7.0, 8.0],
            targets: vec![0, 2, 1],
            ..Samples::default()
        }
    );
    assert!(matches!(dataset.append(3, &mut samples), Err(DataError::Index { .. })));
}

#[test]
fn named_columns_must_be_those_of_the_training_data() {
    let names: [&[u8]; 4] = [b"x,y,class\n1,2,0\n", b"y,x,class\n2,1,0\n", b"x,y,class\n", b"1,2,0\n"];
    let files =
        Files::new(&[("a.csv", names[0]), ("b.csv", names[1]), ("c.csv", &names[2..].concat()), ("d.csv", names[3])]);
    let opened = |name| open(&DataOptions { vocabulary: 2, ..files.options(&[name]) }, &Tokenizer::Byte).unwrap();
    let message = |name| opened(name).same_columns(&opened("a.csv")).map_err(|error| error.to_string());
    let expected = "b.csv, line 1: the columns are y, x, class, but x, y, class in ";
    assert!(message("b.csv").unwrap_err().contains(expected), "{:?}", message("b.csv"));
    assert_eq!((message("c.csv"), message("d.csv")), (Ok(()), Ok(())));
    let joined = join(vec![(opened("b.csv"), 0..1)]).unwrap();
    assert!(opened("a.csv").same_columns(&joined).is_err());
}

#[test]
fn tables_with_other_columns_are_errors() {
    let message = |second: &[u8]| {
        let files = Files::new(&[("a.csv", b"x,y,class\n1,2,0\n"), ("b.csv", second)]);
        files.message(&["a.csv", "b.csv"], |options| options.vocabulary = 2)
    };
    assert_eq!(message(b"y,x,class\n2,1,0\n"), "b.csv, line 1: the columns are y, x, class, but x, y, class in a.csv");
    // The same names, no names, and a comment before the rows are accepted.
    for same in ["\"x\",y , class", "", "# no names"] {
        let message = message(format!("{same}\n1,2,1\n1,2,9\n").as_bytes());
        assert_eq!(message, "b.csv, line 3: the label `9` is not an integer from 0 to 1");
    }
}

#[test]
fn errors_in_text_and_tokens_name_the_position() {
    let mut tokens = u16s(&[7; 300_000]);
    tokens[2 * 270_000 + 1] = 1;
    let files = Files::new(&[
        ("empty.txt", b""),
        ("short.txt", b"abc"),
        ("table.csv", b"1,2\n"),
        ("odd.bin", b"abc"),
        ("saved.bin", b"\x93NUMPY\x01\x00v\x00{'descr': '<u2'}"),
        ("packed.bin", b"\x1f\x8b\x08\0\0\0\0\0"),
        ("tokens.bin", &tokens),
        ("negative.bin", &[7, -100_i64].map(i64::to_le_bytes).concat()),
        ("wide.bin", &(0..100_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>()),
        ("bad.jsonl", b"{\"text\": \"x\"}\n\n{\"text\": }\n"),
        ("key.jsonl", b"{\"text\": 3}\n"),
        ("list.jsonl", b"[1]\n"),
        ("content.jsonl", b"{\"content\": \"x\", \"id\": 1}\n"),
        ("latin.jsonl", b"{\"text\": \"\xe9\"}\n"),
        ("bytes.txt", b"plain \xff"),
    ]);
    let message = |source: &str| files.message(&[source], |_| ());
    assert_eq!(message("none.txt"), "none.txt: No such file or directory (os error 2)");
    assert_eq!(message("*.none"), "no file matches *.none");
    assert_eq!(message("empty.txt"), "no tokens or rows in empty.txt");
    assert_eq!(
        message("short.txt"),
        "the corpus has 3 tokens, too few for one sequence of 3 tokens and the next token (short.txt)"
    );
    assert_eq!(
        files.message(&["short.txt", "table.csv"], |_| ()),
        "short.txt and table.csv have different formats and cannot form one data set"
    );
    let message_of_i64 = files.message(&["negative.bin"], |options| options.token_dtype = TokenDtype::I64);
    assert_eq!(message_of_i64, "negative.bin, byte 8: token -100 is outside the vocabulary of 256 tokens");
    assert_eq!(message("odd.bin"), "odd.bin: 3 bytes are not a multiple of the token size of 2 bytes");
    let wanted = "not raw tokens, which `tofile` of NumPy writes";
    assert_eq!(message("saved.bin"), format!("saved.bin: a NumPy array with a header, {wanted}"));
    assert_eq!(message("packed.bin"), format!("packed.bin: a gzip archive, {wanted}"));
    assert_eq!(message("tokens.bin"), "tokens.bin, byte 540000: token 263 is outside the vocabulary of 256 tokens");
    assert_eq!(
        message("wide.bin"),
        "wide.bin: every second token of 16 bits is 0, so the file probably has wider tokens"
    );
    assert_eq!(message("bad.jsonl"), "bad.jsonl, line 3: column 10: expected value");
    assert_eq!(message("key.jsonl"), "key.jsonl, line 1: the key `text` is missing or not a string");
    assert_eq!(
        message("list.jsonl"),
        "list.jsonl, record 1: a record must be a JSON object\n  help: write one object per record"
    );
    assert_eq!(message("content.jsonl"), "content.jsonl, line 1: no key `text`; the keys are content, id");
    assert!(message("latin.jsonl").starts_with("latin.jsonl, line 1: "), "{}", message("latin.jsonl"));
    assert_eq!(
        files.message(&["bytes.txt"], |options| options.vocabulary = 128),
        "bytes.txt, byte 6: token 255 is outside the vocabulary of 128 tokens"
    );
    assert!(files.message(&["short.txt"], |options| options.sequence_length = 0).contains("one sequence of 0 "));
}

#[test]
fn the_byte_tokenizer_accepts_binary_files_only_with_format_bytes() {
    let pdf = b"%PDF-1.7\0\x01\x02";
    let files = Files::new(&[("a.txt", b"plain"), ("b.txt", pdf)]);
    for format in [Format::Auto, Format::Text] {
        let message = files.message(&["a.txt", "b.txt"], |options| options.format = format);
        assert_eq!(message, "b.txt: a PDF, not text");
    }
    let options = DataOptions { format: Format::Bytes, sequence_length: 1, ..files.options(&["a.txt", "b.txt"]) };
    let corpus = open(&options, &Tokenizer::Byte).unwrap();
    let expected: Vec<u32> = b"plain\n".iter().chain(pdf).map(|&byte| byte.into()).collect();
    assert_eq!(tokens(&corpus), expected);
}

#[test]
fn tokenizers_need_utf8_and_tokens_within_the_vocabulary() {
    let files =
        Files::new(&[("latin.txt", b"the cat \xe9"), ("mat.txt", b"the mat"), ("mat.jsonl", b"\n{\"text\": \"mat\"}")]);
    let message = |source: &str, vocabulary| {
        let options = DataOptions { vocabulary, sequence_length: 1, ..files.options(&[source]) };
        let error = open(&options, &tokenizer::tests::words()).err().unwrap().to_string();
        error.replace(&format!("{}/", files.0.path().display()), "")
    };
    assert_eq!(message("latin.txt", 8), "latin.txt, byte 8: not valid UTF-8, which the tokenizer needs");
    assert_eq!(message("mat.txt", 7), "mat.txt, byte 4: token 7 is outside the vocabulary of 7 tokens");
    assert_eq!(message("mat.jsonl", 7), "mat.jsonl, line 2: token 7 is outside the vocabulary of 7 tokens");
}

#[test]
fn errors_in_rows_name_the_position() {
    let message = |content: &[u8]| {
        let files = Files::new(&[("t.csv", content)]);
        files.message(&["t.csv"], |options| options.vocabulary = 2)
    };
    assert_eq!(message(b"1,2,0\n1,0\n"), "t.csv, line 2: the row has 2 columns, but the first row has 3");
    // A byte order mark is no part of the first number.
    assert_eq!(message(b"\xef\xbb\xbf1,2,0\n1,0\n"), "t.csv, line 2: the row has 2 columns, but the first row has 3");
    assert_eq!(message(b"a,b,c\n1,NaN,0\n"), "t.csv, line 2, column 2: `NaN` is not a finite number");
    assert_eq!(message(b"1,1e39,0\n"), "t.csv, line 1, column 2: `1e39` is not a finite number");
    assert_eq!(message(b"1,,0\n"), "t.csv, line 1, column 2: `` is not a finite number");
    assert_eq!(message(b"1,2,0\nx,y,z\n"), "t.csv, line 2, column 1: `x` is not a finite number");
    assert_eq!(message(b"1,2,2\n"), "t.csv, line 1: the label `2` is not an integer from 0 to 1");
    assert_eq!(message(b"1,2,0.5\n"), "t.csv, line 1: the label `0.5` is not an integer from 0 to 1");
    assert_eq!(message(b"1,2,-1\n"), "t.csv, line 1: the label `-1` is not an integer from 0 to 1");
    assert_eq!(message(b"a,b\n\n"), "no tokens or rows in t.csv");
    assert!(message(b"a;b\n1;0\n").starts_with("t.csv, line 2: the row has one column, the label; "));
}

#[test]
fn formats_are_known_by_their_extension_unless_named() {
    let resolved = |name: &str| files::format_by_name(name.as_ref());
    assert_eq!(resolved("x/y.bin"), Format::Tokens);
    assert_eq!(resolved("y.ndjson"), Format::Jsonl);
    assert_eq!(resolved("y.json"), Format::Jsonl);
    assert_eq!(resolved("Y.JSONL.GZ"), Format::Jsonl);
    assert_eq!(resolved("y.csv"), Format::Csv);
    assert_eq!(resolved("y.rs"), Format::Text);
    assert_eq!(resolved("LICENSE"), Format::Text);
    assert_eq!(resolved("y.csv.gz"), Format::Csv);
    assert_eq!(resolved("y.jsonl.zst"), Format::Jsonl);
    assert_eq!(resolved("y.bin.gz"), Format::Text);
    assert_eq!(resolved("y.parquet"), Format::Parquet);
    for (source, format) in [
        ("a/*.bin", Some(Format::Tokens)),
        ("**/*.txt", Some(Format::Text)),
        ("LICENSE", Some(Format::Text)),
        ("a/*", None),
        ("a/x.*", None),
        ("x.t?t", None),
    ] {
        assert_eq!(format_of_source(source), format, "{source}");
    }
}

/// A slice of a split selects documents, and has the same tokens in memory and in the cache.
#[test]
fn a_slice_selects_documents() {
    let line = |i: usize| format!("{{\"text\": \"{}{i}\"}}\n", "x".repeat(i % 3));
    let lines = |range: std::ops::Range<usize>| range.map(line).collect::<String>();
    let files = Files::new(&[
        ("train-a.jsonl", lines(0..7).as_bytes()),
        ("train-b.jsonl", format!("{{\"text\": \"\"}}\n{}", lines(7..20)).as_bytes()),
        ("train-c.txt", b"xx20"),
        ("test.jsonl", lines(30..33).as_bytes()),
    ]);
    let text = |i: usize| format!("{}{i}", "x".repeat(i % 3));
    let cached = tempfile::tempdir().unwrap();
    let read = |split: &str, least_bytes: u64| {
        let part = zero_config::SplitPart::parse(split).unwrap().remove(0);
        let cache = CacheOptions { folder: Some(cached.path().into()), least_bytes, ..CacheOptions::default() };
        let options = DataOptions { sequence_length: 1, split: Some(part), cache, ..files.options(&[""]) };
        let data = open(&options, &Tokenizer::Byte)?;
        let mut documents = 0;
        data.records().each_document(&mut |_| documents += 1)?;
        Ok::<_, DataError>((Tokenizer::Byte.decode(&tokens(&data)).unwrap(), documents))
    };
    for least_bytes in [0, 1 << 20] {
        for (split, range) in [
            ("train", 0..21),
            ("train[:5]", 0..5),
            ("train[3:9]", 3..9),
            ("train[7:]", 7..21),
            ("train[-1:]", 20..21),
            ("train[:50%]", 0..10),
            ("train[35%:65%]", 7..14),
            ("test", 30..33),
            ("test[1:2]", 31..32),
        ] {
            let expected: Vec<String> = range.map(text).collect();
            let found = read(split, least_bytes).unwrap_or_else(|error| panic!("{split}: {error}"));
            assert_eq!(found, (expected.join("\n"), expected.len()), "{split} {least_bytes}");
        }
        let error = read("train[5:5]", least_bytes).unwrap_err().to_string();
        assert!(error.ends_with(": the slice selects none of 21 records"), "{error}");
    }
}

#[test]
fn a_slice_of_a_table_selects_rows_and_token_files_have_none() {
    let rows: String = (0..10).map(|i| format!("{i},{}\n", i % 2)).collect();
    let files = Files::new(&[("a.csv", rows.as_bytes()), ("a.bin", &u16s(&[1, 2, 3, 4, 5]))]);
    let part = |text: &str| Some(zero_config::SplitPart::parse(text).unwrap().remove(0));
    let options = DataOptions { split: part("train[-3:9]"), ..files.options(&["a.csv"]) };
    let rows = open(&options, &Tokenizer::Byte).unwrap();
    assert_eq!((rows.len(), sample(&rows, 1).features, sample(&rows, 1).targets), (2, vec![8.0], vec![0]));
    let whole = DataOptions { split: part("train"), ..files.options(&["a.bin"]) };
    assert_eq!(open(&whole, &Tokenizer::Byte).unwrap().len(), 1);
    let error = files.message(&["a.bin"], |options| options.split = part("train[:50%]"));
    assert_eq!(error, "a.bin: token files have no records, so `split` cannot select a slice of them");
    let error = files.message(&["a.bin"], |options| options.split = part("test"));
    assert_eq!(error, "a.bin has no split `test`; it has train");
}

#[test]
fn tables_for_a_regression_have_numbers_to_predict() {
    let files = Files::new(&[("rows.csv", b"x,y,z,w\n1,2,3.5,-4\n5,6,7,8\n"), ("ragged.csv", b"1,2,3\n4,5\n")]);
    let path = |name: &str| files.path(name).display().to_string();
    let data = csv_regression([path("rows.csv")], 2).unwrap();
    let batch = data.batch(&[1, 0]).unwrap();
    assert_eq!(batch.inputs.single().unwrap().to_vec2::<f32>().unwrap(), [[5.0, 6.0], [1.0, 2.0]]);
    assert_eq!(batch.targets.unwrap().to_vec2::<f32>().unwrap(), [[7.0, 8.0], [3.5, -4.0]]);
    let error = csv_regression([path("ragged.csv")], 1).unwrap_err().to_string();
    assert!(error.contains("line 2") && error.contains('3') && error.contains('2'), "{error}");
    let error = csv_regression([path("rows.csv")], 4).unwrap_err().to_string();
    assert!(error.contains("a table with 4 columns cannot have 4 target columns"), "{error}");
}
