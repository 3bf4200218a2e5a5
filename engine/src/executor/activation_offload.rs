//! Offloads inputs of recomputed layers to disk until their recomputation.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Shape};
use zero_config::Config;
use zero_model::{Activations, Model};
use zero_partition::DiskUse;
use zero_pipeline::{Instruction, Item, LayerId, Program};
use zero_tier::{AlignedBuffer, BufferPool, Pending, SwapFile, align};

use crate::costs::forms::Table;
use crate::device::tensor;
use crate::error::Error;
use crate::executor::tensor_bytes::{buffer_of, room, storage_of};
use crate::settings::Settings;

/// Dtype, shape and size of an offloaded tensor.
struct Form {
    dtype: DType,
    shape: Shape,
    bytes: usize,
}

/// This rank's swap file of layer inputs.
pub(crate) struct ActivationOffload {
    file: SwapFile,
    buffers: BufferPool,
    /// Size in bytes of a slot in the file.
    place: u64,
    /// Slot number by layer and micro-batch; each pair has its own slot.
    places: HashMap<(LayerId, usize), u64>,
    forms: HashMap<(LayerId, usize), Vec<Form>>,
    moving: HashMap<(LayerId, usize), Pending>,
}

type Subject = (LayerId, usize);

impl ActivationOffload {
    /// Creates a file for `count` inputs of at most `bytes` bytes each.
    ///
    /// # Errors
    /// Returns errors of the disk.
    pub(crate) fn new(folder: &Path, count: usize, bytes: u64, options: &zero_tier::Options) -> Result<Self, Error> {
        let place = align(bytes);
        let file = SwapFile::create(folder, place * count as u64, options).map_err(Error::Disk)?;
        Ok(Self {
            file,
            buffers: BufferPool::new(),
            place,
            places: HashMap::new(),
            forms: HashMap::new(),
            moving: HashMap::new(),
        })
    }

    /// Starts writing a layer's inputs. The caller may drop the tensors, since their values are copied.
    ///
    /// # Errors
    /// Fails if the inputs are larger than planned.
    pub(crate) fn offload(&mut self, subject: Subject, kept: &Activations) -> Result<(), Error> {
        let next = self.places.len() as u64;
        let at = *self.places.entry(subject).or_insert(next) * self.place;
        let forms = kept.tensors().iter().map(|x| {
            let bytes = x.elem_count() * x.dtype().size_in_bytes();
            Form { dtype: x.dtype(), shape: x.shape().clone(), bytes }
        });
        let forms: Vec<Form> = forms.collect();
        let total: usize = forms.iter().map(|form| form.bytes).sum();
        if total as u64 > self.place {
            return Err(Error::Batch(format!(
                "a layer's inputs have {total} bytes, but only {} were reserved on the disk",
                self.place
            )));
        }
        let mut buffer = self.take(total)?;
        let mut rest = buffer.as_bytes_mut();
        for (x, form) in kept.tensors().iter().zip(&forms) {
            let (here, behind) = rest.split_at_mut(form.bytes);
            here.copy_from_slice(buffer_of(x)?.as_bytes());
            rest = behind;
        }
        self.forms.insert(subject, forms);
        self.moving.insert(subject, self.file.write(at, buffer, align(total as u64) as usize));
        Ok(())
    }

    /// Waits until the inputs are on disk.
    ///
    /// # Errors
    /// Returns errors of the disk.
    pub(crate) fn await_offload(&mut self, subject: Subject) -> Result<(), Error> {
        let buffer = self.wait(subject)?;
        self.buffers.put(buffer);
        Ok(())
    }

    /// Starts reading a layer's inputs.
    ///
    /// # Errors
    /// Fails if memory for the buffer cannot be allocated.
    pub(crate) fn fetch(&mut self, subject: Subject) -> Result<(), Error> {
        let total: usize = self.forms.get(&subject).into_iter().flatten().map(|form| form.bytes).sum();
        let place = self.places.get(&subject).copied().ok_or_else(|| not_there(subject))?;
        let buffer = self.take(total)?;
        self.moving.insert(subject, self.file.read(place * self.place, buffer, align(total as u64) as usize));
        Ok(())
    }

    /// Waits until the inputs are in memory, and returns them as autograd leaves on `device`.
    ///
    /// # Errors
    /// Returns errors of the disk.
    pub(crate) fn await_fetch(&mut self, subject: Subject, device: &Device) -> Result<Activations, Error> {
        let buffer = self.wait(subject)?;
        let mut rest = buffer.as_bytes();
        let mut tensors = vec![];
        for form in self.forms.remove(&subject).unwrap_or_default() {
            let (here, behind) = rest.split_at(form.bytes);
            rest = behind;
            let mut values = room(form.dtype, form.shape.elem_count());
            values.as_bytes_mut().copy_from_slice(here);
            tensors.push(tensor(device, storage_of(values, form.dtype)?, form.shape, form.dtype.is_float())?);
        }
        self.buffers.put(buffer);
        Ok(Activations::new(tensors))
    }

    /// Returns pooled buffers to the allocator. Called between steps.
    pub(crate) fn rest(&self) {
        self.buffers.clear();
    }

    /// Returns the size and the statistics of the file.
    pub(crate) fn disk_use(&self) -> DiskUse {
        let statistics = self.file.statistics();
        DiskUse {
            bytes: self.file.size(),
            read: statistics.read_bytes,
            written: statistics.written_bytes,
            busy_seconds: statistics.busy_seconds,
            notices: self.file.notices().to_vec(),
        }
    }

    fn take(&self, bytes: usize) -> Result<AlignedBuffer, Error> {
        self.buffers.take(align(bytes as u64) as usize).map_err(Error::Disk)
    }

    fn wait(&mut self, subject: Subject) -> Result<AlignedBuffer, Error> {
        let pending = self.moving.remove(&subject).ok_or_else(|| not_there(subject))?;
        pending.wait().map_err(Error::Disk)
    }
}

fn not_there((layer, micro_batch): Subject) -> Error {
    let what = format!("the inputs of layer {layer} of micro-batch {micro_batch} are not on the disk");
    Error::Zero(zero_partition::ZeroError::Internal(what))
}

/// Returns the layers and micro-batches whose inputs the program offloads.
fn offloaded(program: &Program) -> BTreeSet<Subject> {
    let items = program.instructions.iter().filter_map(|instruction| match instruction {
        Instruction::Offload { item: Item::Activations { layer, micro_batch } } => Some((*layer, *micro_batch)),
        _ => None,
    });
    items.collect()
}

/// Returns the bytes of the largest of these inputs.
fn largest(items: &BTreeSet<Subject>, table: &Table) -> u64 {
    items.iter().map(|&(layer, _)| table.inputs[layer]).max().unwrap_or(0)
}

/// Returns the size of the swap file of layer inputs that [`open`] creates for this program.
pub(crate) fn file_bytes(program: &Program, table: &Table) -> u64 {
    let items = offloaded(program);
    items.len() as u64 * align(largest(&items, table))
}

/// Creates the swap file of layer inputs, if the program offloads any.
///
/// # Errors
/// Returns errors of the disk. Fails for a model whose activation sizes cannot be computed in a dry run.
pub(crate) fn open(
    config: &Config,
    settings: &Settings,
    model: &Model,
    program: &Program,
) -> Result<Option<ActivationOffload>, Error> {
    let Some(section) = &config.activation_checkpointing else { return Ok(None) };
    let items = offloaded(program);
    let (Some(folder), false) = (&section.nvme_path, items.is_empty()) else { return Ok(None) };
    let table = Table::of(config, model);
    let table = table.ok_or_else(|| {
        Error::setting(
            "activation_checkpointing.device",
            "cannot reserve disk space: the sizes of the layers' inputs are known only when the model runs",
            "remove the key to keep the inputs in memory",
        )
    })?;
    let made = ActivationOffload::new(folder, items.len(), largest(&items, &table), &settings.zero.disk.aio);
    made.map(Some).map_err(|error| match error {
        Error::Disk(error) => Error::setting("activation_checkpointing.nvme_path", error.to_string(), error.help()),
        other => other,
    })
}
