//! Verifies a checkpoint against its checksums and locates damage.

use std::collections::HashMap;
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;

use crate::error::CheckpointError;
use crate::manifest::Manifest;
use crate::tensors::TensorFile;

/// A part of a checkpoint that differs from the data that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The damaged shard or manifest.
    pub path: PathBuf,
    /// The damaged tensor, `name@start` or `name@start/state`, if known.
    pub tensor: Option<String>,
    /// The difference.
    pub reason: String,
}

impl Display for Damage {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match &self.tensor {
            Some(tensor) => write!(f, "{}: `{tensor}`: {}", self.path.display(), self.reason),
            None => write!(f, "{}: {}", self.path.display(), self.reason),
        }
    }
}

/// Reads a whole checkpoint and returns all damage, in the order of the shards and of each shard's tensors.
#[must_use]
pub fn verify(folder: &Path) -> Vec<Damage> {
    let manifest = match Manifest::read(folder) {
        Ok(manifest) => manifest,
        Err(error) => return vec![unreadable(&folder.join("manifest.json"), error)],
    };
    (0..manifest.shards.len()).flat_map(|shard| damages(folder, &manifest, shard)).collect()
}

/// Returns the first damage of a shard as an error.
pub(crate) fn intact(folder: &Path, manifest: &Manifest, shard: usize) -> Result<(), CheckpointError> {
    match damages(folder, manifest, shard).into_iter().next() {
        None => Ok(()),
        Some(Damage { path, tensor: Some(tensor), reason }) => {
            Err(CheckpointError::damaged(&path, format!("`{tensor}`: {reason}")))
        }
        Some(Damage { path, tensor: None, reason }) => Err(CheckpointError::damaged(&path, reason)),
    }
}

/// Converts an error about one file into damage, without repeating the path.
fn unreadable(path: &Path, error: CheckpointError) -> Damage {
    let reason = match error {
        CheckpointError::Io { source, .. } => source.to_string(),
        CheckpointError::Damaged { reason, .. } | CheckpointError::Mismatch { reason, .. } => reason,
        other => other.to_string(),
    };
    Damage { path: path.to_path_buf(), tensor: None, reason }
}

/// Finds the damage of a shard. Reads every byte once; the checksum of the whole file is combined from the checksums of
/// the header and the tensors.
fn damages(folder: &Path, manifest: &Manifest, shard: usize) -> Vec<Damage> {
    let entry = &manifest.shards[shard];
    let path = folder.join(&entry.file);
    let damage =
        |tensor: Option<&str>, reason: String| Damage { path: path.clone(), tensor: tensor.map(String::from), reason };
    let size = match std::fs::metadata(&path) {
        Ok(metadata) => metadata.len(),
        Err(error) => return vec![damage(None, error.to_string())],
    };
    let mut found = vec![];
    if size != entry.bytes {
        found.push(damage(None, format!("the file has {size} bytes, but had {} when it was written", entry.bytes)));
    }
    let file = match TensorFile::open_own(&path) {
        Ok(file) => file,
        Err(error) => {
            let Damage { reason, .. } = unreadable(&path, error);
            found.push(damage(None, format!("the header is damaged, so the tensors cannot be located: {reason}")));
            return found;
        }
    };
    let expected: Vec<_> = manifest.tensors(shard).collect();
    let mut unread: HashMap<&str, ((Dtype, usize), u32)> =
        expected.iter().map(|(name, held, crc32)| (name.as_str(), (*held, *crc32))).collect();
    let mut whole = file.header_crc32.clone();
    let mut end = file.data_start;
    for tensor in file.metadata.offset_keys() {
        let Some(info) = file.metadata.info(&tensor) else { continue };
        end = file.end(info);
        let known = unread.remove(tensor.as_str());
        match known {
            None => found.push(damage(Some(&tensor), "the tensor is not in the manifest".into())),
            Some(((dtype, elements), _)) if info.dtype != dtype || info.shape != [elements] => {
                let reason = format!("the tensor is {:?} {:?}, not {dtype:?} [{elements}]", info.dtype, info.shape);
                found.push(damage(Some(&tensor), reason));
            }
            Some(_) => {}
        }
        if end > size {
            found.push(damage(Some(&tensor), format!("the tensor ends at byte {end}, beyond the end of the file")));
            continue;
        }
        match file.portions(info, |_| Ok(())) {
            Err(error) => found.push(damage(Some(&tensor), unreadable(&path, error).reason)),
            Ok(crc32) => {
                whole.combine(&crc32);
                let crc32 = crc32.finalize();
                if known.is_some_and(|(_, written)| written != crc32) {
                    found.push(damage(Some(&tensor), "the checksum does not match the manifest".into()));
                }
            }
        }
    }
    for (tensor, ..) in expected.iter().filter(|(tensor, ..)| unread.contains_key(tensor.as_str())) {
        found.push(damage(Some(tensor), "the tensor is missing".into()));
    }
    if found.is_empty() && end != size {
        found.push(damage(
            None,
            format!("the header is damaged: its tensors end at byte {end}, but the file has {size} bytes"),
        ));
    }
    if found.is_empty() && whole.finalize() != entry.crc32 {
        found.push(damage(None, "the header is damaged: the file's checksum does not match the manifest".into()));
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::*;
    use crate::manifest::{CutEntry, FORMAT, ParameterEntry, PieceEntry, ShardEntry, VERSION, shard_file};
    use crate::writer::TensorWriter;

    /// Writes a checkpoint with two shards. It has two parameters with one state each; one parameter is split over both
    /// shards.
    fn written(folder: &Path) -> Manifest {
        let piece = |shard, start, end| PieceEntry { shard, slice: 0, start, end, crc32: vec![] };
        let entry =
            |shape: &[usize], pieces| ParameterEntry { shape: shape.to_vec(), pieces, ..ParameterEntry::default() };
        let mut manifest = Manifest {
            format: FORMAT.into(),
            version: VERSION,
            step: 7,
            updates: 6,
            samples: 28,
            loss_scale: None,
            local_steps: None,
            schedule_free: None,
            world_size: 2,
            zero_stage: 3,
            states: vec!["exp_avg".into()],
            engine: serde_json::json!({"best": 0.5}),
            config: serde_json::Value::Null,
            buffers: BTreeMap::new(),
            shards: vec![],
            parameters: BTreeMap::from([
                ("a.weight".into(), entry(&[4, 50], vec![piece(0, 0, 120), piece(1, 120, 200)])),
                ("b".into(), entry(&[], vec![piece(1, 0, 1)])),
            ]),
        };
        for shard in 0..2 {
            let mut tensors = vec![];
            for (name, entry) in &manifest.parameters {
                for piece in entry.pieces.iter().filter(|piece| piece.shard == shard) {
                    for state in ["", "/exp_avg"] {
                        tensors.push((
                            format!("{name}@{}{state}", piece.start),
                            Dtype::F32,
                            vec![piece.end - piece.start],
                        ));
                    }
                }
            }
            let file = shard_file(shard, 2);
            let mut writer = TensorWriter::create(&folder.join(&file), tensors, None).unwrap();
            for entry in manifest.parameters.values_mut() {
                for piece in entry.pieces.iter_mut().filter(|piece| piece.shard == shard) {
                    for kind in 0..2 {
                        let value = |i: usize| ((i * 31 + kind * 7) as f32).sin().to_le_bytes();
                        let bytes: Vec<u8> = (piece.start..piece.end).flat_map(value).collect();
                        piece.crc32.push(writer.write(&bytes).unwrap());
                    }
                }
            }
            let (bytes, crc32) = writer.finish().unwrap();
            manifest.shards.push(ShardEntry { file, bytes, crc32 });
        }
        manifest.write(folder).unwrap();
        manifest
    }

    /// Overwrites a file with `content` and returns the damage found.
    fn found_with(folder: &Path, file: &str, content: &[u8]) -> Vec<Damage> {
        fs::write(folder.join(file), content).unwrap();
        verify(folder)
    }

    #[test]
    fn an_intact_checkpoint_has_no_damage() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = written(folder.path());
        assert_eq!(verify(folder.path()), []);
        assert_eq!(Manifest::read(folder.path()).unwrap(), manifest);
        // The file checksum, combined from its parts, equals the checksum of its bytes.
        for shard in &manifest.shards {
            let bytes = fs::read(folder.path().join(&shard.file)).unwrap();
            assert_eq!((bytes.len() as u64, crc32fast::hash(&bytes)), (shard.bytes, shard.crc32));
        }
    }

    #[test]
    fn every_flipped_bit_is_found_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = written(folder.path());
        let mut of_payload = 0;
        for (index, shard) in manifest.shards.iter().enumerate() {
            let good = fs::read(folder.path().join(&shard.file)).unwrap();
            let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
            // The name of the tensor that holds each byte; tensors are stored in the manifest's order.
            let held = manifest.tensors(index).flat_map(|(name, (_, elements), _)| vec![name; 4 * elements]);
            let held: Vec<String> = held.collect();
            assert_eq!(header + held.len(), good.len());
            for bit in 0..8 * good.len() {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                let found = found_with(folder.path(), &shard.file, &bad);
                assert!(!found.is_empty(), "bit {bit} of {}", shard.file);
                assert!(found.iter().all(|damage| damage.path.ends_with(&shard.file)));
                if bit / 8 >= header {
                    of_payload += 1;
                    assert_eq!(found.len(), 1, "{found:?}");
                    assert_eq!(found[0].tensor.as_ref(), Some(&held[bit / 8 - header]), "bit {bit}");
                }
            }
            assert_eq!(found_with(folder.path(), &shard.file, &good), []);
        }
        assert!(of_payload > 10_000, "{of_payload}");
    }

    #[test]
    fn every_flipped_bit_of_the_manifest_is_found() {
        let folder = tempfile::tempdir().unwrap();
        written(folder.path());
        let good = fs::read(folder.path().join("manifest.json")).unwrap();
        for bit in 0..8 * good.len() {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let found = found_with(folder.path(), "manifest.json", &bad);
            assert!(found.len() == 1 && found[0].path.ends_with("manifest.json"), "bit {bit}: {found:?}");
        }
        for length in 0..good.len() {
            assert_eq!(found_with(folder.path(), "manifest.json", &good[..length]).len(), 1, "{length} bytes");
        }
    }

    #[test]
    fn every_truncation_and_every_growth_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = written(folder.path());
        let file = &manifest.shards[1].file;
        let good = fs::read(folder.path().join(file)).unwrap();
        for length in 0..good.len() {
            let found = found_with(folder.path(), file, &good[..length]);
            assert!(found[0].reason.contains("when it was written"), "{length} bytes: {found:?}");
            assert!(found.len() >= 2, "lost tensors must be named: {found:?}");
        }
        let found = found_with(folder.path(), file, &[&good[..], &[0]].concat());
        assert_eq!(found.len(), 1, "{found:?}");
        fs::remove_file(folder.path().join(file)).unwrap();
        assert!(verify(folder.path())[0].to_string().contains("shard-00001-of-00002.safetensors: No such file"));
    }

    #[test]
    fn swapped_shards_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = written(folder.path());
        let path = |shard: usize| folder.path().join(&manifest.shards[shard].file);
        fs::rename(path(0), folder.path().join("other")).unwrap();
        fs::rename(path(1), path(0)).unwrap();
        fs::rename(folder.path().join("other"), path(1)).unwrap();
        let found = verify(folder.path());
        let says = |tensor: &str, reason: &str| {
            found.iter().any(|damage| damage.tensor.as_deref() == Some(tensor) && damage.reason.contains(reason))
        };
        assert!(says("a.weight@120", "not in the manifest") && says("a.weight@0", "missing"), "{found:?}");
    }

    /// A parameter of shape `[4, 50]`, cut by two ranks into slices of 100 elements.
    #[test]
    fn only_slices_that_cover_a_parameter_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = written(folder.path());
        let parsed = |cut: CutEntry, [first, second]: [(usize, usize, usize); 2]| {
            let mut manifest = manifest.clone();
            let entry = manifest.parameters.get_mut("a.weight").unwrap();
            entry.cut = Some(cut);
            for (piece, (slice, start, end)) in entry.pieces.iter_mut().zip([first, second]) {
                (piece.slice, piece.start, piece.end) = (slice, start, end);
            }
            Manifest::parse(manifest.text().unwrap().as_bytes())
        };
        let cut = |dimension: usize, parts: &[usize], ranks: usize| CutEntry {
            dimension,
            shared: 0,
            parts: parts.to_vec(),
            ranks,
        };
        let pieces = [(0, 0, 100), (1, 0, 100)];
        for good in [cut(0, &[4], 2), cut(1, &[50], 2), cut(1, &[20, 30], 2)] {
            assert!(parsed(good, pieces).is_ok());
        }
        for wrong in [
            cut(2, &[4], 2),
            cut(0, &[5], 2),
            cut(1, &[25, 25], 2),
            cut(0, &[usize::MAX, 5], 2),
            cut(0, &[4], 0),
            cut(0, &[4], 1),
            cut(0, &[4], 4),
            cut(0, &[4], usize::MAX),
        ] {
            assert!(parsed(wrong.clone(), pieces).is_err(), "{wrong:?}");
        }
        // Without slices or pieces, nothing would be read.
        let mut empty = manifest.clone();
        let entry = empty.parameters.get_mut("a.weight").unwrap();
        (entry.cut, entry.pieces) = (Some(cut(0, &[4], 0)), vec![]);
        assert!(Manifest::parse(empty.text().unwrap().as_bytes()).is_err());
        // Only weights in 8 bits have scales that all slices share.
        let shared = CutEntry { shared: 2, ..cut(0, &[2], 2) };
        assert!(parsed(shared, [(0, 0, 150), (1, 0, 150)]).is_err());
        for wrong in [
            [(0, 0, 100), (1, 1, 100)],
            [(0, 0, 100), (0, 0, 100)],
            [(0, 0, 120), (1, 0, 80)],
            [(1, 0, 100), (0, 0, 100)],
            [(0, 0, 100), (2, 0, 100)],
            [(0, 0, 100), (1, 0, 50)],
        ] {
            assert!(parsed(cut(0, &[4], 2), wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn another_manifest_version_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let old = format!("{{\"format\": \"{FORMAT}\", \"version\": 1, \"step\": 7, \"shards\": []}}");
        let found = found_with(folder.path(), "manifest.json", old.as_bytes());
        assert_eq!(found[0].reason, "the manifest has version 1; this program reads version 3");
    }
}
