//! Recognizes files that are not text, so that the byte tokenizer does not train on the bytes of an archive.

/// The first bytes of common archives, documents and images, with the name of each format.
const MAGIC: [(&[u8], &str); 31] = [
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\0", "an xz archive"),
    (b"\x04\x22\x4d\x18", "an lz4 archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"PK\x03\x04", "a zip archive (such as .docx, .npz or PyTorch's .pt)"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\xff\xff\xff\xff", "an Arrow stream"),
    (b"Obj\x01", "an Avro file"),
    (b"ORC", "an ORC file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"%PDF-", "a PDF"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"RIFF", "a WebP image, or WAV or AVI"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"ID3", "MP3 audio"),
    (b"OggS", "Ogg audio or video"),
    (b"fLaC", "FLAC audio"),
    (b"\x1a\x45\xdf\xa3", "a Matroska or WebM video"),
    (b"\x7fELF", "a program"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
];

/// A file with a zero byte among its first `LOOKED_AT` bytes counts as binary. git and grep use the same rule. UTF-8
/// text has no zero bytes.
const LOOKED_AT: usize = 8192;

/// Returns the kind of a binary file, or `None` for text. `content` is the beginning of the file; its last character
/// may be incomplete.
pub(super) fn kind(content: &[u8]) -> Option<&'static str> {
    // A text may begin with the characters of a short ASCII signature. Such a signature counts only if the content also
    // has a zero byte or invalid UTF-8.
    let is_text = |magic: &[u8]| magic.len() < 5 && magic.iter().all(u8::is_ascii_graphic);
    let found = MAGIC.iter().find(|(magic, _)| content.starts_with(magic));
    let has_zero = content.iter().take(LOOKED_AT).any(|&byte| byte == 0);
    let is_no_utf8 = std::str::from_utf8(content).is_err_and(|error| error.error_len().is_some());
    match found {
        Some((magic, kind)) if !is_text(magic) || has_zero || is_no_utf8 => Some(kind),
        _ if content.get(257..262) == Some(b"ustar") => Some("a tar archive"),
        _ if content.get(4..8) == Some(b"ftyp") && has_zero => Some("an MP4 video or HEIC image"),
        _ => has_zero.then_some("a binary file that contains NUL bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_first_bytes() {
        for (magic, expected) in MAGIC {
            let content = [magic, b"\x00\x80rest"].concat();
            assert_eq!(kind(&content), Some(expected), "{magic:?}");
        }
        let mut tar = vec![b'x'; 512];
        tar[257..262].copy_from_slice(b"ustar");
        assert_eq!(kind(&tar), Some("a tar archive"));
        assert_eq!(kind(b"\0\0\0\x20ftypisom"), Some("an MP4 video or HEIC image"));
        assert_eq!(kind(b"some\0more"), Some("a binary file that contains NUL bytes"));
    }

    #[test]
    fn text_is_recognized_whatever_its_first_bytes() {
        let texts =
            ["", "a", "ORC and RIFF", "ID3 is a tag", "PAR1", "GIF89a", "BZh", "OggS", "héé", "\u{feff}bom", "PK"];
        for text in texts {
            assert_eq!(kind(text.as_bytes()), None, "{text}");
        }
        // Content that is not UTF-8 and has no known signature may be text in an older encoding.
        assert_eq!(kind(b"caf\xe9 au lait"), None);
        let late = [vec![b'a'; LOOKED_AT], vec![0]].concat();
        assert_eq!(kind(&late), None);
    }
}
