//! Checks that the disks have enough free space for offloaded data.

use std::path::Path;

use zero_engine::Error;
use zero_engine::costs::subject::Subject;
use zero_partition::disk_bytes;

use crate::memory::Needs;

/// Checks that the folders are writable and have room for the files of all ranks on this machine. `needs` has an entry
/// for each pipeline stage.
///
/// # Errors
/// Fails if a folder is not writable or has too little room; the error names the folder's key.
pub(crate) fn check_space(subject: &Subject<'_>, needs: &[Needs]) -> Result<(), Error> {
    let (settings, mesh) = (subject.settings, subject.stage_plan.mesh);
    let mut files: Vec<(&str, &Path, u64)> = vec![];
    if subject.layout.uses_disk() {
        let widths = settings.zero.widths(settings.dtype.size_in_bytes());
        let of_rank = |rank| disk_bytes(subject.layout, &subject.stage_plan.stages, mesh.coordinates(rank), &widths);
        let (optimizer, parameters) = (0..mesh.world_size())
            .map(of_rank)
            .fold((0, 0), |sum, bytes| (sum.0 + bytes.optimizer, sum.1 + bytes.parameters));
        let disk = &settings.zero.disk;
        files.extend(disk.optimizer.iter().map(|to| ("zero_optimization.offload_optimizer", to.as_path(), optimizer)));
        files.extend(disk.parameters.iter().map(|to| ("zero_optimization.offload_param", to.as_path(), parameters)));
    }
    let inputs = (0..mesh.world_size()).map(|rank| needs[mesh.coordinates(rank).stage].inputs_on_disk).sum();
    let folder = subject.config.activation_checkpointing.as_ref().and_then(|section| section.nvme_path.as_deref());
    files.extend(folder.filter(|_| inputs > 0).map(|to| ("activation_checkpointing", to, inputs)));
    // Several keys may name the same folder, which then needs room for all of their files.
    let mut folders: Vec<(&str, &Path, u64)> = vec![];
    for (section, folder, bytes) in files {
        match folders.iter_mut().find(|(_, known, _)| *known == folder) {
            Some((.., sum)) => *sum += bytes,
            None => folders.push((section, folder, bytes)),
        }
    }
    for (section, folder, bytes) in folders {
        zero_tier::check(folder, bytes).map_err(|error| {
            let key = format!("{section}.nvme_path");
            Error::setting(&key, error.to_string(), error.help())
        })?;
    }
    Ok(())
}
