//! Tests each row of the table of launchers in the parent module.

use super::*;

fn place(variables: &[(&str, &str)]) -> Result<LauncherEnvironment, LauncherEnvironmentError> {
    LauncherEnvironment::from_environment(|name| {
        variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| value.to_string())
    })
}

fn numbers(place: &LauncherEnvironment) -> [usize; 4] {
    [place.rank, place.world_size, place.local_rank, place.local_world_size]
}

#[test]
fn an_empty_environment_is_a_world_of_one_rank() {
    assert_eq!(place(&[]), Ok(LauncherEnvironment::alone()));
    assert_eq!(place(&[("MASTER_ADDR", "n1")]), Ok(LauncherEnvironment::alone()));
    let batch_script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_ID", "7")];
    assert_eq!(place(&batch_script).map(|place| place.world_size), Ok(1));
    assert_eq!(place(&[("RANK", ""), ("WORLD_SIZE", "")]), Ok(LauncherEnvironment::alone()));
}

#[test]
fn torchrun() {
    let place = place(&[
        ("LOCAL_RANK", "1"),
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "1234"),
        ("TORCHELASTIC_RESTART_COUNT", "2"),
        ("TORCHELASTIC_RUN_ID", "abc"),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("OMPI_COMM_WORLD_RANK", "0"),
    ])
    .expect("torchrun's variables");
    assert_eq!(numbers(&place), [5, 8, 1, 4]);
    assert_eq!((place.master_addr.as_str(), place.master_port, place.attempt), ("node0", 1234, 2));
    assert_eq!(
        (place.run_id.as_str(), place.source.as_str()),
        ("abc", "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE")
    );
    assert!(place.store_is_served);
}

#[test]
fn a_store_is_served_if_the_launcher_says_so() {
    let ranks = [("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")];
    for (value, served) in [("True", true), ("False", false), ("", false)] {
        let place = place(&[&ranks[..], &[("TORCHELASTIC_USE_AGENT_STORE", value)]].concat()).expect("ranks");
        assert_eq!(place.store_is_served, served, "{value}");
    }
}

#[test]
fn openmpi_and_pmi_come_before_slurm() {
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_JOB_ID", "9")];
    let ompi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ];
    let found = place(&[&slurm[..], &ompi].concat()).expect("OpenMPI's variables");
    assert_eq!((numbers(&found), found.master_addr.as_str()), ([1, 2, 1, 2], "127.0.0.1"));
    let pmi = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
    let found = place(&[&slurm[..], &pmi].concat()).expect("hydra's variables");
    assert_eq!((numbers(&found), found.source.starts_with("PMI_RANK")), ([1, 2, 1, 2], true));
}

#[test]
fn a_slurm_step() {
    let place = place(&[
        ("SLURM_PROCID", "6"),
        ("SLURM_STEP_ID", "1"),
        ("SLURM_STEP_NUM_TASKS", "7"),
        ("SLURM_LOCALID", "2"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "4,3"),
        ("SLURM_STEP_NODELIST", "n[03-04]"),
        ("SLURM_JOB_ID", "77"),
        ("SLURM_RESTART_COUNT", "1"),
    ])
    .expect("a step's variables");
    assert_eq!(numbers(&place), [6, 7, 2, 3]);
    assert_eq!((place.master_addr.as_str(), place.attempt, place.run_id.as_str()), ("n03", 1, "slurm-77.1"));
    assert!((20000..29000).contains(&place.master_port));
}

#[test]
fn the_attempt_of_the_innermost_launcher_counts() {
    let ranks = [("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")];
    let counts = [("SLURM_RESTART_COUNT", "4"), ("TORCHELASTIC_RESTART_COUNT", "2"), ("ZERO_TRAIN_ATTEMPT", "1")];
    for (set, attempt) in [(0, 0), (1, 4), (2, 2), (3, 1)] {
        let found = place(&[&ranks[..], &counts[..set]].concat()).map(|place| place.attempt);
        assert_eq!(found, Ok(attempt));
    }
}

#[test]
fn without_local_rank_each_rank_has_its_own_host() {
    let plain = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "pod-0")];
    assert_eq!(place(&plain).map(|place| numbers(&place)), Ok([1, 2, 0, 1]));
    let pods = [&plain[..], &[("PET_NPROC_PER_NODE", "4")]].concat();
    assert_eq!(place(&pods), Err(LauncherEnvironmentError::AmbiguousPods { processes: "4".into() }));
    assert_eq!(place(&plain[..2]), Err(LauncherEnvironmentError::NoMaster { world_size: 2 }));
}

#[test]
fn azure_gives_host_and_port_together() {
    let ranks = [("RANK", "0"), ("WORLD_SIZE", "2"), ("AZ_BATCH_MASTER_NODE", "10.0.0.4:6000")];
    let place = place(&ranks).expect("Azure's variables");
    assert_eq!((place.master_addr.as_str(), place.master_port), ("10.0.0.4", 6000));
}

#[test]
fn errors_name_the_invalid_variable() {
    let missing = place(&[("LOCAL_RANK", "0"), ("RANK", "0")]);
    assert_eq!(
        missing,
        Err(LauncherEnvironmentError::Missing { present: "LOCAL_RANK".into(), missing: "WORLD_SIZE".into() })
    );
    let range = place(&[("RANK", "2"), ("WORLD_SIZE", "2")]);
    assert_eq!(range, Err(LauncherEnvironmentError::OutOfRange { variable: "RANK".into(), rank: 2, size: 2 }));
    let text = place(&[("RANK", "one"), ("WORLD_SIZE", "2")]).map_err(|error| error.to_string());
    assert_eq!(text, Err("RANK=one: not a whole number".into()));
    let port = place(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "99999")]);
    assert!(matches!(port, Err(LauncherEnvironmentError::Unreadable { variable, .. }) if variable == "MASTER_PORT"));
}

#[test]
fn incomplete_rank_variables_are_an_error() {
    let missing = |present: &str, missing: &str| {
        Err(LauncherEnvironmentError::Missing { present: present.into(), missing: missing.into() })
    };
    for (variables, expected) in [
        (&[("WORLD_SIZE", "1")][..], Ok(LauncherEnvironment::alone())),
        (&[("WORLD_SIZE", "1"), ("MASTER_ADDR", "n1")], Ok(LauncherEnvironment::alone())),
        (&[("WORLD_SIZE", "2")], missing("WORLD_SIZE", "RANK")),
        (&[("WORLD_SIZE", "2"), ("MASTER_ADDR", "n1")], missing("WORLD_SIZE", "RANK")),
        (&[("WORLD_SIZE", "0")], missing("WORLD_SIZE", "RANK")),
        (&[("RANK", "0")], missing("RANK", "WORLD_SIZE")),
        (&[("RANK", "1"), ("MASTER_ADDR", "n1")], missing("RANK", "WORLD_SIZE")),
        (&[("RANK", "1"), ("WORLD_SIZE", "2")], Err(LauncherEnvironmentError::NoMaster { world_size: 2 })),
    ] {
        assert_eq!(place(variables), expected, "{variables:?}");
    }
    assert!(matches!(place(&[("WORLD_SIZE", "two")]), Err(LauncherEnvironmentError::Unreadable { .. })));
}
