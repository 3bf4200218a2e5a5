//! Fuzzing entry points for files that others may have written, used by `fuzz/`.

use crate::manifest::Manifest;
use crate::tensors;

/// Parses a manifest, both as given and with a correct checksum appended. A parsed manifest must survive a round trip.
pub fn manifest(bytes: &[u8]) {
    for text in [bytes.to_vec(), Manifest::sealed(bytes)] {
        if let Ok(manifest) = Manifest::parse(&text) {
            let again = manifest.text().map_err(|e| e.to_string()).and_then(|text| Manifest::parse(text.as_bytes()));
            assert_eq!(again, Ok(manifest));
        }
    }
}

/// Parses the header of a safetensors file. The tensors must be contiguous.
pub fn safetensors(bytes: &[u8]) {
    let Ok(metadata) = tensors::parse(bytes) else { return };
    let mut end = 0;
    for name in metadata.offset_keys() {
        let (start, after) = metadata.info(&name).unwrap_or_else(|| panic!("no `{name}`")).data_offsets;
        assert!(start == end && after >= start, "{name}: {start} to {after} behind {end}");
        end = after;
    }
}
