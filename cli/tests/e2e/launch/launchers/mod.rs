//! Runs the launchers of other systems. Each must train two ranks bit-identically to our launcher, and report a killed
//! rank.
//!
//! A test whose launcher is not installed prints the reason and is skipped. `scripts/launchers.sh` starts the clusters
//! that some launchers need, runs only these tests and prints the table. `ZERO_TRAIN_PYTHON` names the Python
//! interpreter that has Ray and Spark; the default is `python3`.

mod launcher;

use crate::case;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use case::{Alone, Case, port, signal, wait_for};
use launcher::Launcher;

fn python() -> String {
    std::env::var("ZERO_TRAIN_PYTHON").unwrap_or_else(|_| "python3".into())
}

fn adapter(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/launchers").join(name);
    fs::canonicalize(path).unwrap().to_str().unwrap().to_string()
}

/// Returns a command that prints the version of a Python package, using the interpreter of one of its scripts.
fn version_beside(script: &str, package: &str) -> Vec<String> {
    let ask = format!(
        "exec $(sed -n '1s/^#!//p' \"$(command -v {script})\") -c 'import importlib.metadata as m; print(m.version(\"{package}\"))'"
    );
    vec![
        "sh".into(),
        "-c".into(),
        format!("command -v {script} >/dev/null || {{ echo not found >&2; exit 1; }}; {ask}"),
    ]
}

#[test]
fn torchrun() {
    let start = "torchrun --no-python --standalone --nproc-per-node 2";
    // torchrun must report the killed rank as the root cause, not the rank that lost its peer.
    let mut launcher = Launcher::new("torchrun", start, 1, &["Root Cause", "rank      : 1 ", "Signal 9 (SIGKILL)"]);
    launcher.version = version_beside("torchrun", "torch");
    launcher.works();
}

#[test]
fn deepspeed() {
    let start = format!("deepspeed --no_python --num_gpus 2 --master_port {}", port());
    let mut launcher = Launcher::new("DeepSpeed", &start, 247, &["exits with return code = -9"]);
    launcher.version = version_beside("deepspeed", "deepspeed");
    launcher.works();
}

/// Both hosts are this machine under two names. See scripts/ssh-here.sh.
#[test]
fn deepspeed_by_ssh() {
    let folder = tempfile::tempdir().unwrap();
    let hosts = folder.path().join("hosts");
    fs::write(&hosts, "localhost slots=1\n127.0.0.1 slots=1\n").unwrap();
    let start = format!(
        "deepspeed --hostfile {} --num_nodes 2 --no_ssh_check --no_python --master_addr 127.0.0.1 --master_port {}",
        hosts.display(),
        port()
    );
    let mut launcher = Launcher::new("DeepSpeed, pdsh", &start, 247, &["exits with return code = -9", "exit code 247"]);
    launcher.version = version_beside("deepspeed", "deepspeed");
    let reachable =
        "[ -n \"$PDSH_SSH_ARGS_APPEND\" ] || { echo no host is reached by ssh: scripts/ssh-here.sh >&2; exit 1; }; ";
    launcher.version[2].insert_str(0, reachable);
    launcher.shown = Some("deepspeed --hostfile hosts --num_nodes 2 --no_python zero-train …");
    launcher.works();
}

#[test]
fn openmpi() {
    let start = "mpirun.openmpi --oversubscribe -n 2";
    let mut launcher = Launcher::new("OpenMPI", start, 137, &["exited on signal 9 (Killed)"]);
    let name = |name| (name, "1".to_string());
    launcher.variables = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(name).to_vec();
    launcher.works();
}

#[test]
fn mpich() {
    let mut launcher = Launcher::new("MPICH", "mpiexec.hydra -n 2", 9, &["EXIT CODE: 9"]);
    launcher.kills = true;
    launcher.works();
}

#[test]
fn slurm() {
    let mut launcher = Launcher::new("Slurm", "srun -K -n 2", 137, &["task 1: Killed"]);
    // An installed `srun` is not enough: a cluster must respond.
    launcher.version = vec!["sh".into(), "-c".into(), "sinfo --noheader >/dev/null && sinfo --version".into()];
    launcher.works();
}

/// Submits the script of `examples/launchers` as a job, with sizes that fit this machine.
#[test]
fn sbatch() {
    let mut launcher = Launcher::new("Slurm, sbatch", "sh -c", 137, &["task 1: Killed"]);
    launcher.version = vec!["sh".into(), "-c".into(), "sinfo --noheader >/dev/null && sbatch --version".into()];
    let submit = format!(
        "PATH=$(dirname \"$1\"):$PATH HOME=$PWD; export PATH HOME; shift
         sbatch --wait --nodes 1 --ntasks-per-node 2 --cpus-per-task 1 --output slurm.out {} \"$@\"
         status=$?; cat slurm.out; exit $status",
        adapter("slurm.sbatch")
    );
    launcher.start.extend([submit, "sbatch".into()]);
    launcher.shown = Some("sbatch --wait slurm.sbatch");
    launcher.works();
}

/// A Ray head node on this machine that accepts jobs. Dropping it ends Ray.
struct Head {
    child: Child,
    _folder: tempfile::TempDir,
}

impl Head {
    fn start(port: u16, variables: &[(&'static str, String)]) -> Self {
        let dashboard = format!("--dashboard-port={port}");
        // A private folder. If the head node used the default folder, other Ray programs on this machine would find it
        // there, even after it has ended.
        let folder = tempfile::tempdir().unwrap();
        let own = format!("--temp-dir={}", folder.path().display());
        let child = Command::new("ray")
            .args(["start", "--head", "--block", "--port=0", "--num-cpus=2", "--disable-usage-stats", &dashboard, &own])
            .envs(variables.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut head = Self { child, _folder: folder };
        let patience = Instant::now() + Duration::from_secs(300);
        let answers = || {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
            stream.write_all(b"GET /api/version HTTP/1.0\r\n\r\n").ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            answer.starts_with("HTTP/").then_some(())
        };
        while answers().is_none() {
            assert!(Instant::now() < patience && head.child.try_wait().unwrap().is_none(), "Ray does not come up");
            std::thread::sleep(Duration::from_millis(100));
        }
        head
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        // On SIGTERM, Ray also ends the processes that it has started.
        let _ = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        let _ = self.child.wait();
    }
}

#[test]
fn ray_job() {
    let mut launcher = Launcher::new("Ray, job", "", 1, &["rank 1 exited with status 137; it failed first"]);
    launcher.version = version_beside("ray", "ray");
    if launcher.found().is_none() {
        return;
    }
    // Without a token, other users of this machine could submit jobs.
    let mut token = [0; 32];
    fs::File::open("/dev/urandom").unwrap().read_exact(&mut token).unwrap();
    let token = token.iter().map(|byte| format!("{byte:02x}")).collect();
    launcher.variables = vec![("RAY_AUTH_MODE", "token".into()), ("RAY_AUTH_TOKEN", token)];
    launcher.variables.extend([("RAY_DEDUP_LOGS", "0".into()), ("RAY_raylet_start_wait_time_s", "300".into())]);
    let port = port();
    let _head = Head::start(port, &launcher.variables);
    let script = adapter("zero_ray.py");
    let folder = Path::new(&script).parent().unwrap().to_str().unwrap();
    let start = format!(
        "ray job submit --address http://127.0.0.1:{port} --working-dir {folder} -- python zero_ray.py -n 2 --"
    );
    launcher.start = start.split(' ').map(String::from).collect();
    launcher.shown = Some("ray job submit --working-dir . -- python zero_ray.py -n 2 -- zero-train …");
    launcher.works();
}

#[test]
fn ray() {
    let mut launcher = Launcher::new("Ray", "", 137, &["rank 1 exited with status 137; it failed first"]);
    launcher.version = vec![python(), "-c".into(), "import ray; print(ray.__version__)".into()];
    launcher.start = vec![python(), adapter("zero_ray.py"), "-n".into(), "2".into(), "--".into()];
    launcher.variables = vec![("RAY_DEDUP_LOGS", "0".into()), ("RAY_raylet_start_wait_time_s", "300".into())];
    // Starts a new Ray cluster instead of connecting to an earlier one, which may have ended.
    launcher.variables.push(("RAY_ADDRESS", "local".into()));
    launcher.works();
}

#[test]
fn spark() {
    let mut launcher = Launcher::new("Spark", "", 1, &["rank 1 exited with status -9"]);
    launcher.version = vec![python(), "-c".into(), "import pyspark; print(pyspark.__version__)".into()];
    launcher.start = vec![python(), adapter("zero_spark.py"), "-n".into(), "2".into(), "--".into()];
    launcher.variables = vec![
        ("PYSPARK_SUBMIT_ARGS", "--master local[2] pyspark-shell".into()),
        ("PYSPARK_PYTHON", python()),
        ("SPARK_LOCAL_IP", "127.0.0.1".into()),
    ];
    launcher.works();
}

#[test]
fn a_rank_that_lost_a_peer_waits_until_a_polling_launcher_ends_it() {
    let case = Case::new();
    let port = port();
    let rank = |rank: usize| {
        let mut command = case.command(&["--config", "ds.yaml", "--quiet", "--max-steps", "1000000"]);
        let file = case.path(&format!("error{rank}.json"));
        command.env("TORCHELASTIC_RUN_ID", "job").env("TORCHELASTIC_ERROR_FILE", file);
        Alone::rank(command, rank, 2, port)
    };
    let [mut left, killed] = [0, 1].map(rank);
    case.wait_for_steps("run", 3);
    signal(killed.id(), "KILL");
    let file = case.path("error0.json");
    wait_for(|| file.exists());
    // The rank has written the file and now waits for a signal.
    assert!(!left.has_ended());
    signal(left.id(), "TERM");
    let (status, errors) = left.end();
    assert_eq!(status, Some(4), "{errors}");
    let told: serde_json::Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!(told["message"]["message"], errors.trim_end());
    assert!(errors.starts_with("error: rank 0 lost rank 1 in "), "{errors}");
    assert!(!case.path("error1.json").exists());
}
