//! What lives on a disk: where in its files, and on the way from and to them.
//!
//! A rank has up to two files. One holds the shards of the parameters, in the working dtype, each in one piece, for it is gathered
//! as a whole. The other holds, tile by tile, the optimizer's states and the master behind each other, so that a tile is one read and
//! one write; and the accumulated gradients. All places are whole pages.

mod file_layout;
mod tiles;
mod values;

use std::collections::HashMap;
use std::path::PathBuf;

use half::{bf16, f16};
use zero_pipeline::{Coordinates, Item, SegmentId, Stages};
use zero_tier::{AlignedBuffer, BufferPool, Pending, PendingVec, SwapFile};

pub use file_layout::{DiskBytes, disk_buffers, disk_bytes};
pub(crate) use file_layout::{DiskVectors, FileLayout, places, stride};
pub(crate) use values::Stored;

use crate::error::ZeroError;
use crate::layout::Layout;
use crate::zero::ShardedState;

/// Where files are made, and how they are read and written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskOptions {
    /// Folder of the file with optimizer state, masters and gradients; needed if any live on a disk.
    pub optimizer: Option<PathBuf>,
    /// Folder of the file with parameters; needed if any live on a disk.
    pub parameters: Option<PathBuf>,
    /// `aio`.
    pub aio: zero_tier::Options,
}

/// The parts of a tile, as far as they live on the disk.
pub(crate) struct Tile<T> {
    /// The optimizer's states and the master, one behind the other.
    pub(crate) state: Option<T>,
    pub(crate) gradients: Option<T>,
    /// In the working dtype.
    pub(crate) parameters: Option<T>,
}

impl<T> Tile<T> {
    /// Nothing yet.
    pub(crate) fn empty() -> Self {
        Self { state: None, gradients: None, parameters: None }
    }

    fn map<U>(self, mut to: impl FnMut(T) -> Result<U, ZeroError>) -> Result<Tile<U>, ZeroError> {
        Ok(Tile {
            state: self.state.map(&mut to).transpose()?,
            gradients: self.gradients.map(&mut to).transpose()?,
            parameters: self.parameters.map(&mut to).transpose()?,
        })
    }
}

/// Accumulated gradients of a segment that are being read or written.
enum MovingGradients {
    /// They themselves.
    Lent(PendingVec<f32>),
    /// In a buffer.
    Copied(Pending),
}

/// A shard in the working dtype.
enum MovingShard {
    F32(PendingVec<f32>),
    Bf16(PendingVec<bf16>),
    F16(PendingVec<f16>),
}

/// One rank's files, and what is on its way.
pub(crate) struct Disk {
    optimizer: Option<SwapFile>,
    parameters: Option<SwapFile>,
    pub(crate) buffers: BufferPool,
    /// By segment, of those that this rank has a part of on the disk.
    pub(crate) places: Vec<Option<FileLayout>>,
    gradients: HashMap<SegmentId, MovingGradients>,
    /// Shards of parameters that are being read.
    shards: HashMap<SegmentId, MovingShard>,
    moving_tiles: HashMap<Item, Tile<Pending>>,
    pub(crate) tiles: HashMap<Item, Tile<AlignedBuffer>>,
    /// Bytes of buffers that the ledger counts.
    pub(crate) counted: u64,
}

/// What a rank's files are, and what they did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DiskUse {
    /// Bytes of the files.
    pub bytes: u64,
    /// Bytes that were read.
    pub read: u64,
    /// Bytes that were written.
    pub written: u64,
    /// Seconds in which at least one request was under way.
    pub busy_seconds: f64,
    /// What the user should know, once: what the system refused, and what is done instead.
    pub notices: Vec<String>,
}

impl DiskOptions {
    /// Of the files of a rank that reads and writes such vectors.
    fn of_files(&self, vectors: DiskVectors) -> [zero_tier::Options; 2] {
        [vectors.gradients, vectors.parameters].map(|bounce| zero_tier::Options { bounce, ..self.aio.clone() })
    }

    /// Bytes of memory of both files, for as long as there are any, of the rank at `at`.
    #[must_use]
    pub fn bounce_bytes(&self, layout: &Layout, stages: &Stages, at: Coordinates) -> u64 {
        let vectors = DiskVectors::of(&places(layout, stages, at, 4, 0));
        self.of_files(vectors).iter().map(zero_tier::Options::bounce_bytes).sum()
    }
}

impl ShardedState {
    /// What this rank's disk did so far; `None` if everything lives in memory.
    #[must_use]
    pub fn disk_use(&self) -> Option<DiskUse> {
        let add = |mut sum: DiskUse, file: &SwapFile| {
            let did = file.statistics();
            sum.bytes += file.size();
            sum.read += did.read_bytes;
            sum.written += did.written_bytes;
            sum.busy_seconds += did.busy_seconds;
            sum.notices.extend(
                file.notices().iter().filter(|notice| !sum.notices.contains(notice)).cloned().collect::<Vec<_>>(),
            );
            sum
        };
        Some(self.disk.as_ref()?.files().fold(DiskUse::default(), add))
    }
}

impl Disk {
    /// Makes the files and reserves their space. They read as zeros.
    pub(crate) fn new(options: &DiskOptions, places: Vec<Option<FileLayout>>) -> Result<Self, ZeroError> {
        let file = |folder: &Option<PathBuf>, bytes: u64, aio: &zero_tier::Options| match folder {
            _ if bytes == 0 => Ok(None),
            Some(folder) => Ok(Some(SwapFile::create(folder, bytes, aio)?)),
            None => Err(ZeroError::internal("something lives on a disk, and there is no folder for it")),
        };
        let DiskBytes { optimizer, parameters } = DiskBytes::of(&places);
        let [of_optimizer, of_parameters] = options.of_files(DiskVectors::of(&places));
        Ok(Self {
            optimizer: file(&options.optimizer, optimizer, &of_optimizer)?,
            parameters: file(&options.parameters, parameters, &of_parameters)?,
            buffers: BufferPool::new(),
            places,
            gradients: HashMap::new(),
            shards: HashMap::new(),
            moving_tiles: HashMap::new(),
            tiles: HashMap::new(),
            counted: 0,
        })
    }

    /// Bytes of memory of its files.
    pub(crate) fn bounce_bytes(&self) -> u64 {
        self.files().map(SwapFile::bounce_bytes).sum()
    }

    fn files(&self) -> impl Iterator<Item = &SwapFile> {
        self.optimizer.iter().chain(&self.parameters)
    }

    pub(crate) fn place(&self, id: SegmentId) -> Result<FileLayout, ZeroError> {
        self.places[id].ok_or_else(|| ZeroError::internal("nothing of this segment is on the disk"))
    }

    fn optimizer(&self) -> Result<&SwapFile, ZeroError> {
        self.optimizer.as_ref().ok_or_else(|| ZeroError::internal("there is no file for optimizer state"))
    }

    fn parameters(&self) -> Result<&SwapFile, ZeroError> {
        self.parameters.as_ref().ok_or_else(|| ZeroError::internal("there is no file for parameters"))
    }
}
