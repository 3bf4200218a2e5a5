//! Checks that disks have room for offloaded data.

use zero_engine::Error;
use zero_engine::settings::Settings;
use zero_engine::stage_plan::StagePlan;
use zero_partition::{Layout, disk_bytes};

/// Checks that the folders are writable and have room for the files of all ranks on this machine.
///
/// # Errors
/// Fails if a folder is not writable or has too little room; the error names the folder's key.
pub(crate) fn check_space(layout: &Layout, stage_plan: &StagePlan, settings: &Settings) -> Result<(), Error> {
    let disk = &settings.zero.disk;
    if !layout.uses_disk() {
        return Ok(());
    }
    let widths = settings.zero.widths(settings.dtype.size_in_bytes());
    let (mesh, stages) = (stage_plan.mesh, &stage_plan.stages);
    let of_rank = |rank| disk_bytes(layout, stages, mesh.coordinates(rank), &widths);
    let (optimizer, parameters) = (0..mesh.world_size())
        .map(of_rank)
        .fold((0, 0), |sum, bytes| (sum.0 + bytes.optimizer, sum.1 + bytes.parameters));
    let mut folders = vec![("offload_optimizer", &disk.optimizer, optimizer)];
    match (&disk.optimizer, &disk.parameters) {
        // Both keys may name the same folder, which then needs room for the optimizer state and the parameters.
        (Some(one), Some(other)) if one == other => folders[0].2 += parameters,
        _ => folders.push(("offload_param", &disk.parameters, parameters)),
    }
    for (section, folder, bytes) in folders {
        let Some(folder) = folder else { continue };
        zero_tier::check(folder, bytes).map_err(|error| {
            let key = format!("zero_optimization.{section}.nvme_path");
            Error::setting(&key, error.to_string(), error.help())
        })?;
    }
    Ok(())
}
