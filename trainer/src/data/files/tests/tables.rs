//! Reads Parquet and Arrow files that the tests write.

use std::sync::Arc;

use arrow_array::builder::{ListBuilder, StringBuilder, StructBuilder};
use arrow_array::types::Int8Type;
use arrow_array::{
    ArrayRef, BinaryArray, DictionaryArray, Float64Array, Int64Array, LargeStringArray, RecordBatch, StringArray,
    StringViewArray,
};
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow_schema::{DataType, Field};
use parquet::arrow::ArrowWriter;
use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde_json::json;

use super::super::super::Dataset;
use super::super::super::options::Format;
use super::super::Rows;
use super::*;

/// Returns a batch of `rows` rows, numbered from `first`: texts of several types, numbers, and messages.
pub(super) fn batch(first: usize, rows: usize) -> RecordBatch {
    let texts = || (first..first + rows).map(|i| format!("text {i}"));
    let kinds: DictionaryArray<Int8Type> = (first..first + rows).map(|i| ["even", "odd"][i % 2]).collect();
    let field = |name: &str, kind| Field::new(name, kind, true);
    let fields = vec![field("role", DataType::Utf8), field("content", DataType::Utf8)];
    let mut messages = ListBuilder::new(StructBuilder::from_fields(fields, 0));
    for i in first..first + rows {
        for (role, content) in [("user", Some(format!("question {i}"))), ("assistant", (i % 3 > 0).then(|| "a".into()))]
        {
            messages.values().field_builder::<StringBuilder>(0).unwrap().append_value(role);
            messages.values().field_builder::<StringBuilder>(1).unwrap().append_option(content);
            messages.values().append(true);
        }
        messages.append(true);
    }
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("text", Arc::new(StringArray::from_iter_values(texts()))),
        ("large", Arc::new(LargeStringArray::from_iter_values(texts()))),
        ("view", Arc::new(StringViewArray::from_iter_values(texts()))),
        ("kind", Arc::new(kinds)),
        ("holes", Arc::new((first..first + rows).map(|i| (i != 5).then_some("x")).collect::<StringArray>())),
        ("bytes", Arc::new(BinaryArray::from_iter_values(texts()))),
        ("messages", Arc::new(messages.finish())),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true))).unwrap()
}

/// Writes row groups of 1,500 rows.
pub(super) fn parquet(batches: &[RecordBatch], compression: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(compression).set_max_row_group_row_count(Some(1500));
    let mut writer = ArrowWriter::try_new(vec![], batches[0].schema(), Some(properties.build())).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.into_inner().unwrap()
}

pub(super) fn arrow_file(batches: &[RecordBatch], compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let mut writer = FileWriter::try_new_with_options(vec![], &batches[0].schema(), options).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.into_inner().unwrap()
}

pub(super) fn arrow_stream(batches: &[RecordBatch], compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let mut writer = StreamWriter::try_new_with_options(vec![], &batches[0].schema(), options).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.into_inner().unwrap()
}

fn files(folder: &Folder, batches: &[RecordBatch]) -> Vec<PathBuf> {
    let compressions = [
        ("none", Compression::UNCOMPRESSED),
        ("snappy", Compression::SNAPPY),
        ("gzip", Compression::GZIP(GzipLevel::default())),
        ("brotli", Compression::BROTLI(BrotliLevel::default())),
        ("lz4", Compression::LZ4_RAW),
        ("zstd", Compression::ZSTD(ZstdLevel::default())),
    ];
    let file = |(name, compression)| folder.write(&format!("{name}.parquet"), parquet(batches, compression));
    let mut files: Vec<PathBuf> = compressions.into_iter().map(file).collect();
    for (name, compression) in
        [("none", None), ("lz4", Some(CompressionType::LZ4_FRAME)), ("zstd", Some(CompressionType::ZSTD))]
    {
        files.push(folder.write(&format!("{name}.arrow"), arrow_file(batches, compression)));
        // The content decides the format, not the name of the file.
        files.push(folder.write(&format!("{name}-stream.txt"), arrow_stream(batches, compression)));
    }
    files
}

#[test]
fn a_column_of_texts_gives_documents() {
    let folder = Folder::new();
    for path in files(&folder, &[batch(0, 2000), batch(2000, 1700)]) {
        for column in ["text", "large", "view"] {
            let found = documents(&path, Format::Auto, column).unwrap();
            let expected: Vec<_> = (0..3700).map(|i| (At::Row(i), format!("text {i}"))).collect();
            assert_eq!(found, expected, "{} {column}", path.display());
        }
        assert_eq!(documents(&path, Format::Auto, "kind").unwrap()[2001], (At::Row(2001), "odd".into()));
        let message = |column| folder.without(&documents(&path, Format::Auto, column).unwrap_err());
        let name = path.file_name().unwrap().to_str().unwrap();
        let columns = "text, large, view, kind, holes, bytes, messages";
        assert_eq!(message("body"), format!("{name}: no column `body`; the columns are {columns}"));
        assert_eq!(message("holes"), format!("{name}, row 5, column `holes`: is null"));
        assert!(message("bytes").ends_with("column `bytes`: has the type Binary, not text"), "{}", message("bytes"));
    }
}

#[test]
fn rows_are_the_records_of_json_lines() {
    let folder = Folder::new();
    for path in files(&folder, &[batch(0, 2000), batch(2000, 100)]) {
        let found = records(&path, &["messages", "kind", "other"]).unwrap();
        assert_eq!(found.len(), 2100);
        let expected = json!({"kind": "even", "messages": [
            {"role": "user", "content": "question 2004"}, {"role": "assistant"}
        ]});
        assert_eq!(found[2004], (At::Row(2004), expected));
        // If none of the columns exists, all columns are decoded.
        let error = folder.without(&records(&path, &["other"]).unwrap_err());
        assert!(error.contains("row 0, column `bytes`: the type Binary has no counterpart in JSON"), "{error}");
    }
}

#[test]
fn the_format_that_is_stated_must_be_that_of_the_file() {
    let folder = Folder::new();
    let path = folder.write("a.parquet", parquet(&[batch(0, 3)], Compression::SNAPPY));
    let [text, other] = ["b.txt", "b.parquet"].map(|name| folder.write(name, "PAR1 is how a Parquet file begins."));
    let message = |path: &Path, format| folder.without(&open(path, format).unwrap_err());
    assert_eq!(message(&path, Format::Arrow), "a.parquet: a Parquet file, not an Arrow file");
    assert_eq!(message(&path, Format::Text), "a.parquet: a Parquet file, not text");
    assert_eq!(message(&path, Format::Jsonl), "a.parquet: a Parquet file, not JSON lines");
    assert_eq!(message(&text, Format::Parquet), "b.txt: a file in another format, not a Parquet file");
    assert_eq!(message(&other, Format::Auto), "b.parquet: a file in another format, not a Parquet file");
    assert_eq!(open(&text, Format::Auto).unwrap()[0].format, Format::Text);
    assert_eq!(open(&path, Format::Bytes).unwrap()[0].documents("text", Cuts::Anywhere).unwrap().count(), 1);
}

#[test]
fn numbers_are_rows_with_the_label_last() {
    let folder = Folder::new();
    for (third, shown) in [(None, "null"), (Some(f64::NAN), "NaN"), (Some(f64::NEG_INFINITY), "-inf")] {
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("x", Arc::new(Float64Array::from(vec![Some(0.5), Some(-2.0), third]))),
            ("class", Arc::new(Int64Array::from(vec![1, 0, 1]))),
        ];
        let table = RecordBatch::try_from_iter(columns).unwrap();
        let path = folder.write("a.parquet", parquet(&[table], Compression::SNAPPY));
        let source = Source::new(&path, Format::Csv).unwrap();
        let Rows::Cells(names, cells) = source.rows().unwrap() else { panic!("cells") };
        assert_eq!(names, ["x", "class"]);
        assert_eq!(
            cells.map(|cells| cells.unwrap().1).collect::<Vec<_>>(),
            [["0.5", "1"], ["-2.0", "0"], [shown, "1"]]
        );
        let error = super::super::super::csv([path.display().to_string()], 2).err().unwrap();
        assert_eq!(folder.without(&error), format!("a.parquet, row 2, column 1: `{shown}` is not a finite number"));
    }
}

#[test]
fn the_token_cache_keeps_the_columns_of_a_file_apart() {
    use super::super::super::{CacheOptions, DataOptions, Tokenizer, open, records::Samples};
    let folder = Folder::new();
    let path = folder.write("a.parquet", parquet(&[batch(0, 3)], Compression::SNAPPY));
    for (column, expected) in
        [("kind", "even\nodd\neven"), ("text", "text 0\ntext 1\ntext 2"), ("kind", "even\nodd\neven")]
    {
        let cache =
            CacheOptions { folder: Some(folder.path().join("cache")), least_bytes: 0, ..CacheOptions::default() };
        let options = DataOptions::new([path.display().to_string()], Format::Auto);
        let options = DataOptions { text_key: column.into(), vocabulary: 256, cache, ..options };
        let dataset = open(&options, &Tokenizer::Byte).unwrap();
        let mut samples = Samples::default();
        (0..dataset.len()).for_each(|i| dataset.append(i, &mut samples).unwrap());
        let text: Vec<u8> = samples.tokens[..1].iter().chain(&samples.targets).map(|&token| token as u8).collect();
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }
    assert_eq!(
        fs::read_dir(folder.path().join("cache/tokens"))
            .unwrap()
            .filter(|entry| !entry.as_ref().unwrap().path().ends_with(".lock"))
            .count(),
        2
    );
}
