//! Archives of bzip2, gzip and zstd, with one and with several members.

use std::io::Write;

use super::super::super::options::Format;
use super::super::Rows;
use super::*;

pub(super) fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

pub(super) fn bzip2(content: &[u8]) -> Vec<u8> {
    let mut encoder = bzip2::write::BzEncoder::new(vec![], bzip2::Compression::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

pub(super) fn zstd(content: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(vec![], 3).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

/// The content is one frame that is not compressed, with a window of 256 MiB, twice the decoder's default maximum.
#[test]
fn zstd_windows_may_be_large() {
    let content = b"{\"text\": \"a\"}\n";
    let block = ((content.len() as u32) << 3 | 1).to_le_bytes();
    let frame = [&[0x28, 0xb5, 0x2f, 0xfd, 0, (28 - 10) << 3][..], &block[..3], content].concat();
    let folder = Folder::new();
    let path = folder.write("a.jsonl.zst", frame);
    assert_eq!(documents(&path, Format::Auto, "text").unwrap(), [(At::Line(1), "a".to_string())]);
}

type Pack = fn(&[u8]) -> Vec<u8>;
const PACKS: [(&str, Pack); 3] = [("bz2", bzip2), ("gz", gzip), ("zst", zstd)];

/// Compresses each half of the content as a separate member.
fn members(pack: Pack, content: &[u8]) -> Vec<u8> {
    let (first, second) = content.split_at(content.len() / 2);
    [pack(first), pack(second)].concat()
}

#[test]
fn archives_have_the_content_of_the_plain_file() {
    let folder = Folder::new();
    let lines: String = (0..20_000).map(|i| format!("{{\"text\": \"document {i}\"}}\n")).collect();
    let array = "[{\"messages\": [1]},\n {\"messages\": [2]}]";
    for (end, pack) in PACKS {
        let path = folder.write(&format!("a.jsonl.{end}"), members(pack, lines.as_bytes()));
        let found = documents(&path, Format::Auto, "text").unwrap();
        assert_eq!(found.len(), 20_000);
        assert_eq!(found[19_999], (At::Line(20_000), "document 19999".to_string()));
        let path = folder.write(&format!("a.txt.{end}"), members(pack, lines.as_bytes()));
        assert_eq!(documents(&path, Format::Auto, "text").unwrap(), [(At::Byte(0), lines.clone())]);
        let path = folder.write(&format!("a.json.{end}"), members(pack, array.as_bytes()));
        assert_eq!(records(&path, &[]).unwrap().len(), 2);
        let texts = b"\xef\xbb\xbf[{\"text\": \"a\"},\n {\"text\": \"\"}, {\"text\": \"b\"}]";
        let path = folder.write(&format!("b.json.{end}"), members(pack, texts));
        let found = documents(&path, Format::Auto, "text").unwrap();
        assert_eq!(found, [(At::Record(1), "a".to_string()), (At::Record(3), "b".to_string())]);
        let path = folder.write(&format!("a.csv.{end}"), members(pack, b"1,2\n3,4\n"));
        let [source] = &open(&path, Format::Auto).unwrap()[..] else { panic!("one file") };
        assert_eq!(source.format, Format::Csv);
        let Rows::Lines(lines) = source.rows().unwrap() else { panic!("lines") };
        assert_eq!(lines.map(Result::unwrap).collect::<Vec<_>>(), [(1, b"1,2".to_vec()), (2, b"3,4".to_vec())]);
    }
}

#[test]
fn the_first_bytes_decide_and_not_the_name() {
    let folder = Folder::new();
    let line = "{\"text\": \"x\"}\n";
    let expected = [(At::Line(1), "x".to_string())];
    for (name, content) in [
        ("plain.jsonl.gz", line.as_bytes().to_vec()),
        ("packed.jsonl", gzip(line.as_bytes())),
        ("other.jsonl.gz", zstd(line.as_bytes())),
        ("another.jsonl.gz", bzip2(line.as_bytes())),
        ("skippable.jsonl.zst", [b"\x51\x2a\x4d\x18\x02\0\0\0ab", &zstd(line.as_bytes())[..]].concat()),
    ] {
        let path = folder.write(name, content);
        assert_eq!(documents(&path, Format::Auto, "text").unwrap(), expected, "{name}");
    }
    let tar = [vec![b'x'; 257], b"ustar".to_vec(), vec![0; 250]].concat();
    let path = folder.write("a.tar.gz", gzip(&tar));
    let error = documents(&path, Format::Auto, "text").unwrap_err();
    assert_eq!(folder.without(&error), "a.tar.gz: a tar archive, not text");
}

/// A truncated archive is always an error, never a shorter text.
#[test]
fn a_truncated_archive_is_an_error_with_its_position() {
    let folder = Folder::new();
    let line = |i: usize| format!("{{\"text\": \"line {i} {}\"}}\n", i * 7_919 % 1_000);
    let lines: String = (0..200).map(line).collect();
    for (end, pack) in PACKS {
        let packed = members(pack, lines.as_bytes());
        let first = pack(&lines.as_bytes()[..lines.len() / 2]).len();
        // An archive that is too short to be recognized is rejected as invalid JSON.
        let recognized = if end == "bz2" { 10 } else { 4 };
        for cut in (4..packed.len()).filter(|&cut| cut != first) {
            let path = folder.write(&format!("a.jsonl.{end}"), &packed[..cut]);
            let error = documents(&path, Format::Auto, "text").expect_err("the archive is cut");
            let is_damaged = matches!(error, DataError::Damaged { at: Some(At::Line(_)), .. });
            assert!(is_damaged || cut < recognized, "{cut}: {error}");
        }
        let path = folder.write(&format!("a.txt.{end}"), &packed[..packed.len() - 1]);
        let error = folder.without(&documents(&path, Format::Auto, "text").unwrap_err());
        let kind = ["bzip2", "gzip", "zstd"].into_iter().find(|kind| kind[..2] == end[..2]).unwrap();
        let at = format!("a.txt.{end}, byte {}: the {kind} archive is truncated or damaged: ", lines.len());
        assert!(error.starts_with(&at) || end == "zst" && error.starts_with("a.txt.zst, byte "), "{error}");
    }
}

#[test]
fn a_changed_byte_of_an_archive_with_a_checksum_is_an_error() {
    let folder = Folder::new();
    let text: String = (0..200).map(|i| format!("line {i} {}\n", i * 7_919 % 1_000)).collect();
    for (end, pack) in PACKS {
        let packed = pack(text.as_bytes());
        for place in 10..packed.len() {
            let mut changed = packed.clone();
            changed[place] ^= 0x10;
            let path = folder.write(&format!("a.txt.{end}"), &changed);
            match documents(&path, Format::Auto, "text") {
                Err(DataError::Damaged { .. }) => {}
                // Some bits of a header do not affect the content.
                Ok(found) => assert_eq!(found[0].1, text, "{end} {place}"),
                Err(error) => panic!("{end} {place}: {error}"),
            }
        }
    }
}
