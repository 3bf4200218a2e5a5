//! Compares the rows with those that pyarrow, `datasets` and mosaicml-streaming read. A test is skipped without Python
//! or the package that it needs.

use serde_json::{Value, json};

use super::super::super::options::{Format, TokenDtype};
use super::*;
use crate::python;

/// Defines `ROWS` with nested messages, nulls and repeated texts. Also defines `clean`, which removes null fields of
/// structs, as the readers do.
const ROWS: &str = r#"
import json, sys
FOLDER = sys.argv[1] if len(sys.argv) > 1 else PLACE
def row(i):
    messages = [{"role": "user", "content": f"question {i} é"}, {"role": "assistant", "content": None if i % 7 == 0 else "answer", "weight": i % 2}]
    return {
        "text": f"document {i}\n" * (i % 5), "kind": ["a", "b", None][i % 3], "number": i * 1.5, "count": i - 3,
        "flag": None if i % 4 == 0 else i % 2 == 0, "messages": None if i % 11 == 10 else messages[: 1 + i % 2],
        "tags": [None if j == 1 else [j, j + 1] for j in range(i % 4)], "nested": {"a": {"b": None if i % 2 else i}, "c": None},
    }
ROWS = [row(i) for i in range(N)]
def clean(value):
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items() if item is not None}
    return [clean(item) for item in value] if isinstance(value, list) else value
"#;

fn script(folder: &Folder, rows: usize, rest: &str) -> String {
    format!("PLACE = {:?}\nN = {rows}\n{ROWS}{rest}", folder.path().display().to_string())
}

fn expected(output: &str) -> Vec<Value> {
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

fn texts(path: &Path) -> Vec<Value> {
    documents(path, Format::Auto, "text").unwrap().into_iter().map(|(_, text)| json!(text)).collect()
}

#[test]
fn rows_equal_those_of_pyarrow() {
    let folder = Folder::new();
    let rest = r#"
import pyarrow as pa, pyarrow.parquet as pq
from pyarrow import feather
table = pa.Table.from_pylist(ROWS)
table = table.set_column(1, "kind", table["kind"].dictionary_encode())
for codec in ["none", "snappy", "gzip", "brotli", "lz4", "zstd"]:
    pq.write_table(table, f"{FOLDER}/{codec}.parquet", compression=codec, row_group_size=300)
pq.write_table(table, f"{FOLDER}/v2.parquet", data_page_version="2.0", version="2.6", use_dictionary=False, data_page_size=500)
pq.write_table(table, f"{FOLDER}/delta.parquet", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY", "count": "DELTA_BINARY_PACKED"}, write_page_checksum=True)
for large in [pa.large_string(), pa.string_view()]:
    other = table.set_column(0, "text", table["text"].cast(large))
    with pa.ipc.new_file(f"{FOLDER}/{large}.arrow", other.schema) as writer:
        writer.write_table(other, max_chunksize=200)
for codec in ["lz4", "zstd"]:
    with pa.ipc.new_stream(f"{FOLDER}/{codec}.stream", table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table, max_chunksize=200)
feather.write_feather(table, f"{FOLDER}/feather.arrow")
print(json.dumps(clean(pq.read_table(f"{FOLDER}/none.parquet").to_pylist())))
"#;
    let Some(output) = python::python(&["pyarrow"], &script(&folder, 1000, rest)) else { return };
    let expected = expected(&output);
    let mut files: Vec<PathBuf> = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 13);
    for path in files {
        assert_eq!(values(records(&path, &[]).unwrap()), expected, "{}", path.display());
        let all: Vec<Value> = expected.iter().map(|row| row["text"].clone()).filter(|text| text != "").collect();
        assert_eq!(texts(&path), all, "{}", path.display());
    }
}

#[test]
fn rows_equal_those_of_hugging_face_datasets() {
    let folder = Folder::new();
    let rest = r#"
from datasets import Dataset, DatasetDict
data = Dataset.from_list(ROWS)
data.save_to_disk(f"{FOLDER}/plain", num_shards=3)
data.select(list(range(100, 50, -1))).save_to_disk(f"{FOLDER}/chosen")
DatasetDict({"train": data, "test": data.select([2])}).save_to_disk(f"{FOLDER}/splits")
print(json.dumps([clean(list(Dataset.load_from_disk(f"{FOLDER}/{name}"))) for name in ["plain", "chosen", "splits/test"]]))
"#;
    let Some(output) = python::python(&["datasets"], &script(&folder, 200, rest)) else { return };
    for (name, expected) in ["plain", "chosen", "splits/test"].into_iter().zip(expected(&output)) {
        let found = values(records(&folder.path().join(name), &[]).unwrap());
        assert_eq!(json!(found), expected, "{name}");
    }
    let error = open(&folder.path().join("splits"), Format::Auto).unwrap_err().to_string();
    assert!(error.contains("has the splits train, test"), "{error}");
}

#[test]
fn samples_equal_those_of_mosaicml_streaming() {
    let folder = Folder::new();
    let rest = r#"
import numpy as np
from streaming import LocalDataset, MDSWriter
columns = {"text": "str", "i": "int", "small": "int8", "big": "uint64", "x": "float32", "y": "float64", "row": "json",
           "fixed": "ndarray:int16:2,2", "typed": "ndarray:int32", "free": "ndarray", "digits": "str_int"}
def sample(i):
    return {"text": f"document {i} é" * (i % 3), "i": -i, "small": i % 100 - 50, "big": 2**63 + i, "x": i / 3, "y": i / 3, "row": ROWS[i],
            "fixed": np.full((2, 2), i, np.int16), "typed": np.arange(i % 300 + 1, dtype=np.int32), "free": np.arange(1, i % 4 + 2, dtype=np.uint8),
            "digits": 10**18 + i}
PACKED = {name: {"compression": name} for name in ["br", "br:5", "bz2", "gz", "snappy", "zstd", "zstd:3"]}
for name, options in {"raw": {}, **PACKED}.items():
    hashes = sorted(["sha1", "sha256", "xxh32", "xxh64", "xxh3_64", "xxh128", "md5"])
    with MDSWriter(out=f"{FOLDER}/{name}", columns=columns, hashes=hashes, size_limit=1 << 15, **options) as writer:
        for i in range(N):
            writer.write(sample(i))
for dtype in ["uint16", "uint32", "int64"]:
    with MDSWriter(out=f"{FOLDER}/{dtype}", columns={"tokens": "bytes"}, size_limit=1 << 12) as writer:
        for i in range(N):
            writer.write({"tokens": np.arange(i, i + 16, dtype=dtype).tobytes()})
with MDSWriter(out=f"{FOLDER}/array", columns={"tokens": "ndarray:int32:16"}, size_limit=1 << 12) as writer:
    for i in range(N):
        writer.write({"tokens": np.arange(i, i + 16, dtype=np.int32)})
def plain(value):
    return value.flatten().tolist() if isinstance(value, np.ndarray) else value.item() if isinstance(value, np.generic) else value
rows = [clean({key: plain(value) for key, value in row.items()}) for row in LocalDataset(f"{FOLDER}/raw")]
tokens = [np.frombuffer(row["tokens"], np.uint16).tolist() for row in LocalDataset(f"{FOLDER}/uint16")]
print(json.dumps([rows, sum(tokens, [])]))
"#;
    let Some(output) = python::python(&["streaming"], &script(&folder, 400, rest)) else { return };
    let [rows, tokens] = <[Value; 2]>::try_from(expected(&output)).unwrap();
    // Removes the nulls that values of JSON columns contain, as the function `clean` of the script does.
    fn clean(value: Value) -> Value {
        match value {
            Value::Object(fields) => fields
                .into_iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(key, value)| (key, clean(value)))
                .collect(),
            Value::Array(items) => items.into_iter().map(clean).collect(),
            value => value,
        }
    }
    for name in ["raw", "br", "br:5", "bz2", "gz", "snappy", "zstd", "zstd:3"] {
        assert!(open(&folder.path().join(name), Format::Auto).unwrap().len() > 3);
        let found: Vec<Value> =
            values(records(&folder.path().join(name), &[]).unwrap()).into_iter().map(clean).collect();
        assert_eq!(json!(found), rows, "{name}");
        let all: Vec<Value> = found.iter().map(|row| row["text"].clone()).filter(|text| text != "").collect();
        assert_eq!(texts(&folder.path().join(name)), all);
    }
    for (name, dtype) in [
        ("uint16", TokenDtype::U16),
        ("uint32", TokenDtype::U32),
        ("int64", TokenDtype::I64),
        ("array", TokenDtype::U16),
    ] {
        let mut found: Vec<u32> = vec![];
        for source in open(&folder.path().join(name), Format::Auto).unwrap() {
            let push = |row: &[u32]| {
                found.extend(row);
                Ok(())
            };
            source.tokens(dtype, 1000, push).unwrap();
        }
        assert_eq!(json!(found), tokens, "{name}");
    }
}
