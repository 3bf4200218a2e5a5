//! What is read of files that somebody else may have written, for `fuzz/`.

use crate::manifest::Manifest;
use crate::tensors;

/// A manifest, as it is and with the checksum that it should have; what is read must be written and read the same.
pub fn manifest(bytes: &[u8]) {
    for text in [bytes.to_vec(), Manifest::sealed(bytes)] {
        if let Ok(manifest) = Manifest::parse(&text) {
            let again = manifest.text().map_err(|e| e.to_string()).and_then(|text| Manifest::parse(text.as_bytes()));
            assert_eq!(again, Ok(manifest));
        }
    }
}

/// The header of a safetensors file: what is read of it lies one behind the other.
pub fn safetensors(bytes: &[u8]) {
    let Ok(metadata) = tensors::parse(bytes) else { return };
    let mut end = 0;
    for name in metadata.offset_keys() {
        let (start, after) = metadata.info(&name).unwrap_or_else(|| panic!("no `{name}`")).data_offsets;
        assert!(start == end && after >= start, "{name}: {start} to {after} behind {end}");
        end = after;
    }
}
