//! Reads this process's rank and the job's size from the environment that the launcher sets.
//!
//! No flag is needed under torchrun, deepspeed, mpirun, MPICH's hydra, srun, Ray, Spark or Kubernetes; each sets its
//! own variables. The first row that matches wins, and `source` names the variables used:
//!
//! | condition | rank and size | local rank and size |
//! |---|---|---|
//! | `LOCAL_RANK` | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` or `LOCAL_SIZE` |
//! | OpenMPI | `OMPI_COMM_WORLD_RANK`, `…_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `…_LOCAL_SIZE` |
//! | PMI (MPICH, Intel MPI, hydra) | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS`, … |
//! | a Slurm step | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |
//! | only `RANK` and `WORLD_SIZE` | `RANK`, `WORLD_SIZE` | 0, 1 |
//! | none of these, or only `WORLD_SIZE=1` | 0, 1 | 0, 1 |
//!
//! OpenMPI and PMI come before Slurm because hydra inside Slurm gives every rank `SLURM_PROCID=0`. In the script of a
//! batch job, `SLURM_PROCID` is set but `SLURM_STEP_ID` is not; the script is not a rank. A process with only
//! `MASTER_ADDR` is a job of one rank. `RANK` without `WORLD_SIZE`, or a `WORLD_SIZE` above 1 without `RANK`, is an
//! error, because there must be other ranks.

mod master;
mod slurm;

/// The place of a process in its job: rank, sizes and rendezvous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LauncherEnvironment {
    /// This process's rank, in `0..world_size`.
    pub rank: usize,
    /// Number of ranks in the job.
    pub world_size: usize,
    /// Rank among the ranks of this host; 0 if the launcher does not set it.
    pub local_rank: usize,
    /// Number of ranks on this host, or `local_rank + 1` if the launcher does not set it.
    pub local_world_size: usize,
    /// Host of the rendezvous.
    pub master_addr: String,
    /// Port of the rendezvous.
    pub master_port: u16,
    /// Whether the launcher serves a store on that port, so that rank 0 does not.
    pub store_is_served: bool,
    /// Number of times the job has been restarted. Ranks of different attempts never connect.
    pub attempt: u32,
    /// Name of the job, the same on all ranks.
    pub run_id: String,
    /// Names of the variables that determined the ranks.
    pub source: String,
}

/// Why the environment does not determine this process's rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LauncherEnvironmentError {
    /// A required variable is not set.
    #[error("{present} is set but {missing} is not: set both or neither")]
    Missing {
        /// The variable that indicates a launcher.
        present: String,
        /// The variable that must be set with it.
        missing: String,
    },
    /// The value of a variable is invalid.
    #[error("{variable}={value}: {expected}")]
    Unreadable {
        /// The variable.
        variable: String,
        /// The value.
        value: String,
        /// What is wrong with the value.
        expected: String,
    },
    /// The rank is not less than the size.
    #[error("{variable}: rank {rank} is not below the number of ranks, {size}")]
    OutOfRange {
        /// The variable with the rank.
        variable: String,
        /// The rank.
        rank: usize,
        /// The number of ranks.
        size: usize,
    },
    /// No variable contains the address of the rendezvous.
    #[error(
        "the address that the {world_size} ranks connect to is missing: set MASTER_ADDR to the host of rank 0, and MASTER_PORT"
    )]
    NoMaster {
        /// The number of ranks.
        world_size: usize,
    },
    /// `RANK` and `WORLD_SIZE` may count pods instead of ranks.
    #[error(
        "RANK and WORLD_SIZE are set without LOCAL_RANK, and PET_NPROC_PER_NODE={processes}, so they may count pods instead \
         of ranks: start the ranks with torchrun, or run one process per pod"
    )]
    AmbiguousPods {
        /// Processes per pod, from `PET_NPROC_PER_NODE`.
        processes: String,
    },
}

impl LauncherEnvironment {
    /// Returns the environment of a job of one rank, which never waits for other ranks.
    pub fn alone() -> LauncherEnvironment {
        LauncherEnvironment {
            rank: 0,
            world_size: 1,
            local_rank: 0,
            local_world_size: 1,
            master_addr: "127.0.0.1".into(),
            master_port: master::DEFAULT_PORT,
            store_is_served: false,
            attempt: 0,
            run_id: "local".into(),
            source: "no rank variables".into(),
        }
    }

    /// Reads the variables through `lookup`; usually called as
    /// `LauncherEnvironment::from_environment(|name| std::env::var(name).ok())`.
    ///
    /// # Errors
    /// Fails if a variable is missing or invalid, if the rank is out of range, or if no variable contains the address
    /// of the rendezvous.
    pub fn from_environment(
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<LauncherEnvironment, LauncherEnvironmentError> {
        let environment = Environment { lookup: &lookup };
        let Some(ranks) = find_ranks(&environment)? else {
            return Ok(LauncherEnvironment::alone());
        };
        if ranks.world_size == 1 {
            return Ok(LauncherEnvironment {
                source: ranks.source,
                run_id: master::run_id(&environment),
                ..LauncherEnvironment::alone()
            });
        }
        let one_host = ranks.local_world_size == ranks.world_size;
        Ok(LauncherEnvironment {
            rank: ranks.rank,
            world_size: ranks.world_size,
            local_rank: ranks.local_rank,
            local_world_size: ranks.local_world_size,
            master_addr: master::address(&environment, ranks.world_size, one_host)?,
            master_port: master::port(&environment)?,
            store_is_served: master::store_is_served(&environment),
            attempt: master::attempt(&environment)?,
            run_id: master::run_id(&environment),
            source: ranks.source,
        })
    }
}

struct Ranks {
    rank: usize,
    world_size: usize,
    local_rank: usize,
    local_world_size: usize,
    source: String,
}

fn find_ranks(environment: &Environment) -> Result<Option<Ranks>, LauncherEnvironmentError> {
    if environment.has("LOCAL_RANK") {
        let names = ["RANK", "WORLD_SIZE"];
        return ranks(environment, "LOCAL_RANK", names, &["LOCAL_RANK"], &["LOCAL_WORLD_SIZE", "LOCAL_SIZE"]).map(Some);
    }
    if environment.has("OMPI_COMM_WORLD_RANK") {
        let names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"];
        let local = ["OMPI_COMM_WORLD_LOCAL_RANK"];
        return ranks(environment, names[0], names, &local, &["OMPI_COMM_WORLD_LOCAL_SIZE"]).map(Some);
    }
    if environment.has("PMI_RANK") {
        let local = ["MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"];
        let local_size = ["MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"];
        return ranks(environment, "PMI_RANK", ["PMI_RANK", "PMI_SIZE"], &local, &local_size).map(Some);
    }
    if environment.has("SLURM_PROCID") && environment.has("SLURM_STEP_ID") {
        let names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"];
        let mut found = ranks(environment, names[0], names, &["SLURM_LOCALID"], &[])?;
        if let Some(tasks) = environment.get("SLURM_STEP_TASKS_PER_NODE") {
            let node = environment.number("SLURM_NODEID")?.unwrap_or(0);
            found.local_world_size = slurm::tasks_on_node(&tasks, node).unwrap_or(1).max(found.local_rank + 1);
        }
        return Ok(Some(found));
    }
    if environment.has("RANK") && environment.has("WORLD_SIZE") {
        if let Some(processes) = environment.get("PET_NPROC_PER_NODE").filter(|processes| processes != "1") {
            return Err(LauncherEnvironmentError::AmbiguousPods { processes });
        }
        return ranks(environment, "RANK", ["RANK", "WORLD_SIZE"], &[], &[]).map(Some);
    }
    let missing = |present: &str, missing: &str| LauncherEnvironmentError::Missing {
        present: present.into(),
        missing: missing.into(),
    };
    match (environment.number("RANK")?, environment.number("WORLD_SIZE")?) {
        (Some(_), None) => Err(missing("RANK", "WORLD_SIZE")),
        (None, Some(size)) if size != 1 => Err(missing("WORLD_SIZE", "RANK")),
        _ => Ok(None),
    }
}

/// Reads one row of the table.
fn ranks(
    environment: &Environment,
    present: &str,
    [rank_name, size_name]: [&str; 2],
    local_rank_names: &[&str],
    local_size_names: &[&str],
) -> Result<Ranks, LauncherEnvironmentError> {
    let needed = |name: &str| {
        let missing = || LauncherEnvironmentError::Missing { present: present.into(), missing: name.into() };
        environment.number(name)?.ok_or_else(missing)
    };
    let (rank, world_size) = (needed(rank_name)?, needed(size_name)?);
    if rank >= world_size {
        return Err(LauncherEnvironmentError::OutOfRange { variable: rank_name.into(), rank, size: world_size });
    }
    let local_rank = environment.first_number(local_rank_names)?;
    let local_size = environment.first_number(local_size_names)?;
    let source: Vec<&str> = [rank_name, size_name]
        .into_iter()
        .chain(local_rank.map(|found| found.0))
        .chain(local_size.map(|found| found.0))
        .collect();
    let local_rank = local_rank.map_or(0, |found| found.1);
    let local_world_size = local_size.map_or(local_rank + 1, |found| found.1);
    if local_rank >= local_world_size {
        let variable = source[source.len() - 1].into();
        return Err(LauncherEnvironmentError::OutOfRange { variable, rank: local_rank, size: local_world_size });
    }
    Ok(Ranks { rank, world_size, local_rank, local_world_size, source: source.join(", ") })
}

/// Looks up variables by name. An empty variable counts as unset.
struct Environment<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Environment<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn number(&self, name: &str) -> Result<Option<usize>, LauncherEnvironmentError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(LauncherEnvironmentError::Unreadable {
                variable: name.into(),
                value,
                expected: "not a whole number".into(),
            }),
        }
    }

    fn first_number<'n>(&self, names: &[&'n str]) -> Result<Option<(&'n str, usize)>, LauncherEnvironmentError> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(Some((name, number)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
