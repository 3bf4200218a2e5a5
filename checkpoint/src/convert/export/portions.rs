//! Copies parameters of a checkpoint into exported files, a portion at a time.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use safetensors::tensor::Dtype;
use zero_model::ops::MAGNITUDES;
use zero_partition::Range;

use super::{Contents, Export, elements, too_large};
use crate::convert::merge::{Merge, Product, matrices};
use crate::error::CheckpointError;
use crate::manifest::{ParameterEntry, tensor_name};
use crate::source::Source;
use crate::verify::intact;
use crate::writer::TensorWriter;

impl Source<'_> {
    /// Appends a parameter to a file. If adapters are folded into the weights, adds the product of the parameter's
    /// adapter to the values.
    pub(super) fn copy(
        &mut self,
        name: &str,
        entry: &ParameterEntry,
        options: &Export,
        writer: &mut TensorWriter,
    ) -> Result<(), CheckpointError> {
        let product = match options.contents {
            Contents::Merged(merge) => self.product(name, entry, merge)?,
            Contents::Model | Contents::Adapter => None,
        };
        let factor = options.factors.iter().find(|(of, _)| *of == name).map(|(_, factor)| factor);
        let (mut at, mut changed, mut converted) = (0, vec![], vec![]);
        self.portions(name, entry, |shard, bytes| {
            let mut bytes = bytes;
            if product.is_some() || factor.is_some() {
                changed.clear();
                changed.extend_from_slice(bytes);
                if let Some(product) = &product {
                    product.add(at, &mut changed);
                    at += bytes.len() / size_of::<f32>();
                }
                if let Some(factor) = factor {
                    changed
                        .as_chunks_mut()
                        .0
                        .iter_mut()
                        .for_each(|x| *x = (f32::from_le_bytes(*x) * factor).to_le_bytes());
                }
                bytes = &changed;
            }
            let fits = options.dtype.convert(bytes, &mut converted);
            fits.ok_or_else(|| too_large(shard, name, options.dtype))?;
            writer.write(&converted).map(drop)
        })
    }

    /// Returns the product to add to a weight, if its linear layer has an adapter.
    fn product(
        &mut self,
        name: &str,
        entry: &ParameterEntry,
        merge: Merge,
    ) -> Result<Option<Product>, CheckpointError> {
        let (Some(names), &[_, columns]) = (matrices(self.manifest, name), entry.shape.as_slice()) else {
            return Ok(None);
        };
        let [a, b] = names.each_ref().map(|name| self.values(name));
        let rank = self.manifest.parameters[&names[0]].shape.first().copied().unwrap_or(1);
        let mut product = Product { a: a?, b: b?, rank, columns, merge, factors: None };
        let magnitudes = format!("{}{MAGNITUDES}", name.trim_end_matches("weight"));
        if self.manifest.parameters.contains_key(&magnitudes) {
            let mut factors = self.values(&magnitudes)?;
            let (mut at, mut sums) = (0, vec![0.0; factors.len()]);
            self.portions(name, entry, |_, bytes| {
                product.add_squares(at, bytes, &mut sums);
                at += bytes.len() / size_of::<f32>();
                Ok(())
            })?;
            factors.iter_mut().zip(sums).for_each(|(factor, sum)| *factor /= sum.sqrt() as f32);
            product.factors = Some(factors);
        }
        Ok(Some(product))
    }

    /// Returns all values of a small parameter.
    fn values(&mut self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let mut values = vec![];
        self.portions(name, &self.manifest.parameters[name], |_, bytes| {
            values.extend(bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)));
            Ok(())
        })?;
        Ok(values)
    }

    /// Passes the values of a parameter to `take` as little-endian f32, a portion at a time and in order. Checks each
    /// piece against its checksum.
    fn portions(
        &mut self,
        name: &str,
        entry: &ParameterEntry,
        mut take: impl FnMut(&Path, &[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        if entry.cut.is_some() {
            return self.portions_of_cut(name, entry, take);
        }
        let (state, added) = self.evaluated_states(entry);
        for piece in &entry.pieces {
            let shard: PathBuf = self.folder.join(&self.manifest.shards[piece.shard].file);
            let file = self.shard(piece.shard)?;
            let elements = piece.end - piece.start;
            let intact = |tensor: &str, found: Hasher, expected: u32| match found.finalize() == expected {
                true => Ok(()),
                false => {
                    let reason = format!("the checksum of `{tensor}` does not match the manifest");
                    Err(CheckpointError::damaged(&shard, reason))
                }
            };
            let tensor = tensor_name(name, piece.start, state);
            let info = file.piece(&tensor, Dtype::F32, elements)?;
            let crc32 = match added {
                None => file.portions(info, |bytes| take(&shard, bytes))?,
                Some(state) => {
                    let added = tensor_name(name, piece.start, Some(state));
                    let of_added = file.piece(&added, Dtype::F32, elements)?;
                    intact(&added, file.portions(of_added, |_| Ok(()))?, piece.crc32[1])?;
                    let (mut at, mut sums) = (0, vec![]);
                    file.portions(info, |bytes| {
                        sums.resize(bytes.len(), 0);
                        file.read_bytes(of_added, at, &mut sums)?;
                        at += bytes.len();
                        for (sum, value) in sums.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
                            *sum = (f32::from_le_bytes(*value) + f32::from_le_bytes(*sum)).to_le_bytes();
                        }
                        take(&shard, &sums)
                    })?
                }
            };
            intact(&tensor, crc32, piece.crc32[usize::from(state.is_some())])?;
        }
        Ok(())
    }

    /// Does the same as [`Source::portions`] for a parameter that a tensor group cut. The pieces of such a parameter
    /// are not in the order of its elements.
    fn portions_of_cut(
        &mut self,
        name: &str,
        entry: &ParameterEntry,
        mut take: impl FnMut(&Path, &[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        for shard in entry.pieces.iter().map(|piece| piece.shard).collect::<BTreeSet<_>>() {
            if self.intact.insert(shard) {
                intact(self.folder, self.manifest, shard)?;
            }
        }
        for range in (Range { parameter: 0, elements: 0..elements(entry) }).portions() {
            let values = self.assemble_evaluated(name, range.elements)?;
            take(self.folder, bytemuck::cast_slice(&values))?;
        }
        Ok(())
    }
}
