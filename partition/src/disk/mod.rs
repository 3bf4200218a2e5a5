//! Offloaded state: its layout in the swap files, and the transfers in flight.
//!
//! A rank has up to two files. One holds the parameter shards in the working dtype. Each shard is contiguous because it
//! is gathered as a whole. The other holds the optimizer states and the master, tile by tile, and then the accumulated
//! gradients. The values of a tile are contiguous, so a tile takes one read and one write. All offsets are multiples of
//! a page.

mod file_layout;
mod tiles;
mod values;

use std::collections::HashMap;
use std::path::PathBuf;

use half::{bf16, f16};
use zero_pipeline::{Coordinates, Item, SegmentId, Stages};
use zero_tier::{AlignedBuffer, BufferPool, Pending, PendingVec, SwapFile};

pub use file_layout::{DiskBytes, disk_buffers, disk_bytes};
use file_layout::{DiskVectors, FileLayout, columns, places, stride};
pub(crate) use values::Stored;

use crate::error::ZeroError;
use crate::layout::Layout;
use crate::narrow::Values;
use crate::options::{DiskOptions, Widths};
use crate::rank::Rank;
use crate::states::Column;

/// The offloaded parts of a tile.
pub(crate) struct Tile<T> {
    /// Optimizer states and the master, concatenated.
    pub(crate) state: Option<T>,
    pub(crate) gradients: Option<T>,
    /// Parameters in the working dtype.
    pub(crate) parameters: Option<T>,
}

impl<T> Tile<T> {
    /// Creates a tile without parts.
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

/// Borrows the states of a tile of `elements` elements, and the master if there is one, from the tile's buffer.
pub(crate) fn states_in<'a>(
    buffer: &'a mut AlignedBuffer,
    rank: &Rank,
    id: SegmentId,
    elements: usize,
) -> Vec<Values<'a>> {
    let mut rest = buffer.as_bytes_mut();
    let names = rank.state_names(id).into_iter().chain(["master"]);
    let of_column = |(column, name): (Column, &str)| {
        let (bytes, later) = std::mem::take(&mut rest).split_at_mut(stride(&column, elements));
        rest = later;
        column.in_bytes(name, elements, bytes)
    };
    columns(rank.segment(id), &rank.widths()).into_iter().zip(names).map(of_column).collect()
}

/// A transfer of a segment's accumulated gradients.
enum MovingGradients {
    /// Transferred in place.
    Lent(PendingVec<f32>),
    /// Copied through a buffer.
    Copied(Pending),
}

/// A read of a parameter shard in the working dtype.
enum MovingShard {
    F32(PendingVec<f32>),
    Bf16(PendingVec<bf16>),
    F16(PendingVec<f16>),
    Quantized(PendingVec<u8>),
}

/// One rank's swap files and the transfers in flight.
pub(crate) struct Disk {
    /// Whether the layout offloads anything, on this rank or on others.
    uses_disk: bool,
    optimizer: Option<SwapFile>,
    parameters: Option<SwapFile>,
    buffers: BufferPool,
    /// Layout by segment; `None` for segments without offloaded parts on this rank. Empty if nothing is offloaded.
    places: Vec<Option<FileLayout>>,
    gradients: HashMap<SegmentId, MovingGradients>,
    /// Reads of parameter shards in flight.
    shards: HashMap<SegmentId, MovingShard>,
    moving_tiles: HashMap<Item, Tile<Pending>>,
    tiles: HashMap<Item, Tile<AlignedBuffer>>,
    /// Number of bytes of buffers already counted in the ledger.
    counted: u64,
}

/// Sizes and statistics of a rank's swap files.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DiskUse {
    /// Total size of the files in bytes.
    pub bytes: u64,
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Seconds in which at least one request was in flight.
    pub busy_seconds: f64,
    /// Messages to show the user once: each names a feature that the system refuses, and the fallback.
    pub notices: Vec<String>,
}

impl DiskOptions {
    /// Returns the I/O options of the optimizer's file and of the parameters' file. A file that transfers values of
    /// ordinary vectors has bounce buffers.
    fn of_files(&self, vectors: DiskVectors) -> [zero_tier::Options; 2] {
        [vectors.gradients, vectors.parameters].map(|bounce| zero_tier::Options { bounce, ..self.aio.clone() })
    }

    /// Returns the bytes of the bounce buffers that the rank at `at` holds for both files as long as they are open.
    #[must_use]
    pub fn bounce_bytes(&self, layout: &Layout, stages: &Stages, at: Coordinates, widths: &Widths) -> u64 {
        let vectors = DiskVectors::of(&places(layout, stages, at, widths));
        self.of_files(vectors).iter().map(zero_tier::Options::bounce_bytes).sum()
    }
}

impl Disk {
    /// Creates the zero-filled files of a rank and reserves their space. Creates no file if nothing is offloaded.
    pub(crate) fn new(rank: &Rank) -> Result<Self, ZeroError> {
        let options = &rank.options.disk;
        let uses_disk = rank.layout.uses_disk();
        let places = match uses_disk {
            true => places(&rank.layout, &rank.stages, rank.groups.at(), &rank.widths()),
            false => vec![],
        };
        let file = |folder: &Option<PathBuf>, bytes: u64, aio: &zero_tier::Options| match folder {
            _ if bytes == 0 => Ok(None),
            Some(folder) => Ok(Some(SwapFile::create(folder, bytes, aio)?)),
            None => Err(ZeroError::internal("state is offloaded to a disk, but no folder is set")),
        };
        let DiskBytes { optimizer, parameters } = DiskBytes::of(&places);
        let [of_optimizer, of_parameters] = options.of_files(DiskVectors::of(&places));
        Ok(Self {
            uses_disk,
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

    /// Returns the bytes of bounce buffers of the files.
    pub(crate) fn bounce_bytes(&self) -> u64 {
        self.files().map(SwapFile::bounce_bytes).sum()
    }

    /// Returns the sizes and statistics of the files; `None` if nothing is offloaded.
    pub(crate) fn statistics(&self) -> Option<DiskUse> {
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
        self.uses_disk.then(|| self.files().fold(DiskUse::default(), add))
    }

    fn files(&self) -> impl Iterator<Item = &SwapFile> {
        self.optimizer.iter().chain(&self.parameters)
    }

    fn place_of(&self, id: SegmentId) -> Option<&FileLayout> {
        self.places.get(id)?.as_ref()
    }

    fn place(&self, id: SegmentId) -> Result<&FileLayout, ZeroError> {
        self.place_of(id).ok_or_else(|| ZeroError::internal("the segment has no state on the disk"))
    }

    fn optimizer(&self) -> Result<&SwapFile, ZeroError> {
        self.optimizer.as_ref().ok_or_else(|| ZeroError::internal("no swap file was created for optimizer state"))
    }

    fn parameters(&self) -> Result<&SwapFile, ZeroError> {
        self.parameters.as_ref().ok_or_else(|| ZeroError::internal("no swap file was created for parameters"))
    }
}
