//! Finds the rendezvous of a job and the values that distinguish it from other jobs.

use super::{Environment, LauncherEnvironmentError, slurm};
use crate::collective::signature::digest;

/// The default port of PyTorch's launchers.
pub(super) const DEFAULT_PORT: u16 = 29500;

/// Azure Batch sets one of these variables to `host:port`.
const AZURE: [&str; 2] = ["AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"];

pub(super) fn address(
    environment: &Environment,
    world_size: usize,
    one_host: bool,
) -> Result<String, LauncherEnvironmentError> {
    for name in ["MASTER_ADDR", "PET_MASTER_ADDR"] {
        if let Some(address) = environment.get(name) {
            return Ok(address);
        }
    }
    if let Some(node) = AZURE.iter().find_map(|name| environment.get(name)) {
        return Ok(node.rsplit_once(':').map_or(node.clone(), |(host, _)| host.to_string()));
    }
    if one_host {
        return Ok("127.0.0.1".into());
    }
    for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
        if let Some(value) = environment.get(name) {
            return slurm::first_host(&value).ok_or_else(|| LauncherEnvironmentError::Unreadable {
                variable: name.into(),
                value,
                expected: "not a host list such as n[1-2,7]".into(),
            });
        }
    }
    Err(LauncherEnvironmentError::NoMaster { world_size })
}

pub(super) fn port(environment: &Environment) -> Result<u16, LauncherEnvironmentError> {
    let parse = |variable: &str, value: String| {
        let expected = "not a port".to_string();
        let unreadable =
            LauncherEnvironmentError::Unreadable { variable: variable.into(), value: value.clone(), expected };
        value.parse().ok().filter(|port| *port != 0).ok_or(unreadable)
    };
    for name in ["MASTER_PORT", "PET_MASTER_PORT"] {
        if let Some(value) = environment.get(name) {
            return parse(name, value);
        }
    }
    for name in AZURE {
        if let Some(port) = environment.get(name).and_then(|node| Some(node.rsplit_once(':')?.1.to_string())) {
            return parse(name, port);
        }
    }
    // Derive the port from the job id, so that two jobs on one host rarely use the same port. Ray reserves 10002 to
    // 19999 for its workers.
    let job = ["SLURM_JOB_ID", "PMI_JOBID", "OMPI_MCA_ess_base_jobid"].iter().find_map(|name| environment.get(name));
    Ok(job.map_or(DEFAULT_PORT, |job| 20000 + (digest(&job, &[]) % 9000) as u16))
}

/// Returns whether the launcher serves the store. torchrun and this project's launcher set
/// `TORCHELASTIC_USE_AGENT_STORE` if they serve the store. Ray Train serves a store but does not set the variable.
pub(super) fn store_is_served(environment: &Environment) -> bool {
    environment.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| matches!(value.as_str(), "True" | "true" | "1"))
}

pub(super) fn attempt(environment: &Environment) -> Result<u32, LauncherEnvironmentError> {
    // The variable of this project's launcher comes first: inside a Slurm job, `SLURM_RESTART_COUNT` is set as well.
    let found =
        environment.first_number(&["ZERO_TRAIN_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])?;
    Ok(found.map_or(0, |(_, attempt)| attempt as u32))
}

/// Returns the launcher's name for the job. In a Slurm allocation, each step counts as a separate job.
pub(super) fn run_id(environment: &Environment) -> String {
    if let Some(run) = ["ZERO_TRAIN_RUN_ID", "TORCHELASTIC_RUN_ID"].iter().find_map(|name| environment.get(name)) {
        return run;
    }
    match (environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")) {
        (Some(job), Some(step)) => format!("slurm-{job}.{step}"),
        (Some(job), None) => format!("slurm-{job}"),
        _ => "local".into(),
    }
}
