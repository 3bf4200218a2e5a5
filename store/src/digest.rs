//! Checksums that stores state for an object, and their comparison with a downloaded file.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use base64::Engine as _;
use http::HeaderMap;
use md5::{Digest as _, Md5};
use sha1::Sha1;
use sha2::Sha256;

/// A checksum of the whole content of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Checksum {
    Md5([u8; 16]),
    Crc32c(u32),
    Sha256([u8; 32]),
    /// Git's identity of a file, which the Hub uses for files outside LFS: SHA-1 of `blob LENGTH\0` and the content.
    GitBlob([u8; 20]),
}

impl Checksum {
    /// Reads the checksum in the headers of an answer. Amazon's `ETag` is the MD5 of the content if the object was
    /// uploaded in one part and is encrypted neither with a KMS key nor with a key of the customer.
    pub(crate) fn of_headers(headers: &HeaderMap) -> Option<Self> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let md5 = |text: &str| base64(text).and_then(|bytes| bytes.try_into().ok()).map(Self::Md5);
        for value in headers.get_all("x-goog-hash") {
            for part in value.to_str().unwrap_or("").split(',').map(str::trim) {
                if let Some(crc) = part.strip_prefix("crc32c=").and_then(base64).and_then(|bytes| bytes.try_into().ok())
                {
                    return Some(Self::Crc32c(u32::from_be_bytes(crc)));
                }
            }
        }
        if let Some(found) = text("x-ms-blob-content-md5").and_then(md5) {
            return Some(found);
        }
        let is_of_amazon = headers.contains_key("x-amz-request-id") || headers.contains_key("x-amz-id-2");
        let is_encrypted = text("x-amz-server-side-encryption").is_some_and(|kind| kind.starts_with("aws:"))
            || headers.contains_key("x-amz-server-side-encryption-customer-algorithm");
        match text("etag").map(|tag| tag.trim_matches('"')) {
            Some(tag) if is_of_amazon && !is_encrypted => unhex(tag).map(Self::Md5),
            _ => None,
        }
    }

    /// Computes a checksum of the same kind as `self` from the content of a file.
    pub(crate) fn of_file(&self, path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        match self {
            Self::Md5(_) => hashed::<Md5>(&mut file, Md5::new()).map(|hash| Self::Md5(hash.into())),
            Self::Sha256(_) => hashed::<Sha256>(&mut file, Sha256::new()).map(|hash| Self::Sha256(hash.into())),
            Self::GitBlob(_) => {
                let start = format!("blob {}\0", file.metadata()?.len());
                hashed::<Sha1>(&mut file, Sha1::new_with_prefix(start)).map(|hash| Self::GitBlob(hash.into()))
            }
            Self::Crc32c(_) => {
                let mut crc = 0;
                each_block(&mut file, |block| crc = crc32c::crc32c_append(crc, block))?;
                Ok(Self::Crc32c(crc))
            }
        }
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = |f: &mut fmt::Formatter<'_>, bytes: &[u8]| bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"));
        match self {
            Self::Md5(bytes) => f.write_str("MD5 ").and_then(|()| hex(f, bytes)),
            Self::Crc32c(crc) => write!(f, "CRC-32C {crc:08x}"),
            Self::Sha256(bytes) => f.write_str("SHA-256 ").and_then(|()| hex(f, bytes)),
            Self::GitBlob(bytes) => f.write_str("git blob ").and_then(|()| hex(f, bytes)),
        }
    }
}

/// Parses exactly `N` bytes in hexadecimal.
pub(crate) fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(bytes)
}

fn base64(text: &str) -> Option<Vec<u8>> {
    base64::prelude::BASE64_STANDARD.decode(text).ok()
}

fn hashed<D: md5::Digest>(file: &mut File, mut hash: D) -> io::Result<md5::digest::Output<D>> {
    each_block(file, |block| hash.update(block))?;
    Ok(hash.finalize())
}

fn each_block(file: &mut File, mut use_block: impl FnMut(&[u8])) -> io::Result<()> {
    let mut block = Vec::new();
    while file.by_ref().take(1 << 20).read_to_end(&mut block)? > 0 {
        use_block(&block);
        block.clear();
    }
    Ok(())
}
