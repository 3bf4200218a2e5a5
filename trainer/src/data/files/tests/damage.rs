//! Truncated files and files with changed bytes cause an error or return rows. They never cause a panic.

use std::sync::Arc;

use arrow_array::{ArrayRef, NullArray, RecordBatch};
use arrow_ipc::CompressionType;
use parquet::basic::Compression;

use super::super::super::options::Format;
use super::folders::Mds;
use super::tables::{arrow_file, arrow_stream, batch, parquet};
use super::*;

/// A random number generator that returns the same numbers in each run (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

/// Reads a path in all supported ways.
fn read_all(path: &Path) {
    let _ = documents(path, Format::Auto, "text");
    let _ = records(path, &[]);
    let _ = records(path, &["messages"]);
}

fn tables() -> Vec<(&'static str, Vec<u8>)> {
    let batches = [batch(0, 20), batch(20, 10)];
    vec![
        ("plain.parquet", parquet(&batches, Compression::UNCOMPRESSED)),
        ("snappy.parquet", parquet(&batches, Compression::SNAPPY)),
        ("zstd.parquet", parquet(&batches, Compression::ZSTD(Default::default()))),
        ("a.arrow", arrow_file(&batches, None)),
        ("lz4.arrow", arrow_file(&batches, Some(CompressionType::LZ4_FRAME))),
        ("stream.arrow", arrow_stream(&batches, None)),
        ("zstd-stream.arrow", arrow_stream(&batches, Some(CompressionType::ZSTD))),
    ]
}

#[test]
fn a_truncated_table_is_an_error() {
    let folder = Folder::new();
    for (name, whole) in tables() {
        for cut in (8..whole.len()).step_by(61).chain(whole.len() - 12..whole.len()) {
            let path = folder.write(name, &whole[..cut]);
            let found = documents(&path, Format::Auto, "text");
            assert!(found.is_err(), "{name}: {cut} of {} bytes gave {} rows", whole.len(), found.unwrap().len());
        }
    }
}

/// A Parquet file that pyarrow wrote with `write_page_checksum=True`: the texts `first text` and `second text`.
const WITH_CHECKSUMS: &[u8] = b"PAR1\x15\x00\x15F\x15F\x15\xc5\xb9\xc3\xd9\x08\x1c\x15\x04\x15\x00\x15\x06\x15\x06\x1c\x00\x00\x00\
    \x02\x00\x00\x00\x04\x01\n\x00\x00\x00first text\x0b\x00\x00\x00second text\x15\x04\x19,5\x00\x18\x06schema\x15\x02\x00\
    \x15\x0c%\x02\x18\x04text%\x00L\x1c\x00\x00\x00\x16\x04\x19\x1c\x19\x1c&\x00\x1c\x15\x0c\x19%\x06\x00\x19\x18\x04text\x15\x00\
    \x16\x04\x16x\x16x&\x08I\x1c\x15\x00\x15\x00\x15\x02\x00<\x16*\x19\x06\x19&\x00\x04\x00\x00\x00\x16x\x16\x04&\x08\x16x\x00\
    \x28 parquet-cpp-arrow version 26.0.1\x19\x1c\x1c\x00\x00\x00\x88\x00\x00\x00PAR1";

#[test]
fn checksums_of_parquet_pages_are_compared() {
    let folder = Folder::new();
    let mut file = WITH_CHECKSUMS.to_vec();
    let texts = |file: &[u8]| documents(&folder.write("a.parquet", file), Format::Auto, "text");
    let found: Vec<String> = texts(&file).unwrap().into_iter().map(|(_, text)| text).collect();
    assert_eq!(found, ["first text", "second text"]);
    let at = file.windows(5).position(|bytes| bytes == b"first").unwrap();
    file[at] = b'F';
    let message = folder.without(&texts(&file).unwrap_err());
    assert!(message.starts_with("a.parquet, row 0: ") && message.contains("checksum mismatch"), "{message}");
}

#[test]
fn changed_bytes_of_tables_do_not_panic() {
    let folder = Folder::new();
    let mut random = Random(1);
    for (name, whole) in tables() {
        for _ in 0..120 {
            let mut changed = whole.clone();
            for _ in 0..=random.below(3) {
                // Half of the changes are in the last bytes. They contain the description of the columns, which is a
                // small part of the file and would otherwise rarely change.
                let from = if random.below(2) == 0 { 0 } else { whole.len().saturating_sub(1500) };
                let place = from + random.below(whole.len() - from);
                changed[place] = [0, 1, 0x7f, 0x80, 0xff, random.below(256) as u8][random.below(6)];
            }
            read_all(&folder.write(name, &changed));
        }
    }
}

/// Writes a huge length to each position of an Arrow file in turn. Without the reader's check, the decoder would
/// allocate this many bytes.
#[test]
fn a_length_that_cannot_be_in_an_arrow_file_is_an_error() {
    let folder = Folder::new();
    let batches = [batch(0, 100)];
    for compression in [CompressionType::LZ4_FRAME, CompressionType::ZSTD] {
        for whole in [arrow_file(&batches, Some(compression)), arrow_stream(&batches, Some(compression))] {
            let mut found = 0;
            for place in (8..whole.len() - 8).step_by(8) {
                let mut changed = whole.clone();
                changed[place..place + 8].copy_from_slice(&(1_u64 << 50).to_le_bytes());
                let path = folder.write("long.arrow", &changed);
                let error =
                    documents(&path, Format::Auto, "text").err().map_or(String::new(), |error| error.to_string());
                found += usize::from(error.contains("claims to hold 1125899906842624"));
            }
            assert!(found >= 10, "{found} buffers");
        }
    }
}

/// Columns of nulls take no bytes, so a short file can claim any number of rows.
#[test]
fn rows_without_bytes_in_an_arrow_file_are_an_error() {
    let folder = Folder::new();
    let column: ArrayRef = Arc::new(NullArray::new(1 << 40));
    let batch = [RecordBatch::try_from_iter([("text", column)]).unwrap()];
    for (name, whole) in [("a.arrow", arrow_file(&batch, None)), ("b.arrow", arrow_stream(&batch, None))] {
        let error = records(&folder.write(name, &whole), &[]).unwrap_err().to_string();
        assert!(error.contains("a batch of 0 bytes has 1099511627776 rows, so it is damaged"), "{error}");
    }
}

#[test]
fn changed_bytes_of_shards_do_not_panic() {
    let folder = Folder::new();
    let columns = &[("id", "int", Some(8)), ("list", "ndarray", None), ("text", "str", None)];
    let sample = |i: u8| vec![vec![i; 8], vec![8, 4, 2, i, i], vec![b'x'; i.into()]];
    let mds = Mds { columns, compression: None };
    mds.write(&folder, &[(0..9).map(sample).collect()]);
    let mut random = Random(2);
    for name in ["index.json", "shard.00000.mds"] {
        let mut whole = fs::read(folder.path().join(name)).unwrap();
        if name == "index.json" {
            // Removes the checksum, which would otherwise detect each change of the shard.
            let index = String::from_utf8(whole).unwrap();
            let start = index.find("\"hashes\":{").unwrap() + 10;
            let end = start + index[start..].find('}').unwrap();
            whole = [&index[..start], &index[end..]].concat().into_bytes();
        }
        for _ in 0..500 {
            let mut changed = whole.clone();
            for _ in 0..=random.below(3) {
                let place = random.below(whole.len());
                changed[place] = [0, 1, b'9', 0xff, random.below(256) as u8][random.below(5)];
            }
            folder.write(name, &changed);
            read_all(folder.path());
        }
        folder.write(name, &whole);
    }
}
