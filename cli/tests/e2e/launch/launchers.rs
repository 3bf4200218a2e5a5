//! Runs the launchers of other systems. Each must train two ranks bit-identically to our launcher, and report a killed
//! rank.
//!
//! A test whose launcher is not installed prints the reason and is skipped. `scripts/launchers.sh` starts the clusters
//! that some launchers need, runs only these tests and prints the table. `ZERO_TRAIN_PYTHON` names the Python
//! interpreter that has Ray and Spark; the default is `python3`.

use crate::case;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use case::{Alone, Case, place, port, signal, text, wait_for};

/// How to start two ranks with another launcher, and what to expect from it.
struct Launcher {
    name: &'static str,
    /// Command that prints the version, and fails if the launcher is not installed.
    version: Vec<String>,
    /// The launcher's command, without the program and its arguments.
    start: Vec<String>,
    /// The command to show in the table instead of `start`.
    shown: Option<&'static str>,
    variables: Vec<(&'static str, String)>,
    /// The launcher's exit status when a rank was killed.
    status: i32,
    /// Texts that the launcher must then print, in this order, in addition to the surviving rank's error.
    says: &'static [&'static str],
    /// Whether the launcher kills the surviving rank before that rank can report an error.
    kills: bool,
}

impl Launcher {
    fn new(name: &'static str, start: &str, status: i32, says: &'static [&'static str]) -> Self {
        let start: Vec<String> = start.split_whitespace().map(String::from).collect();
        let version = start.first().into_iter().chain([&"--version".to_string()]).cloned().collect();
        Self { name, version, start, shown: None, variables: vec![], status, says, kills: false }
    }

    /// Returns the launcher's version: the first word that begins with a digit, in the first line with a digit. Prints
    /// the reason and returns `None` if the launcher is not installed.
    fn found(&self) -> Option<String> {
        let skipped = |reason: &str| {
            println!("skipped, {}: {}", self.name, reason.trim());
            None
        };
        let output = match Command::new(&self.version[0]).args(&self.version[1..]).stdin(Stdio::null()).output() {
            Ok(output) => output,
            Err(error) => return skipped(&error.to_string()),
        };
        if !output.status.success() {
            return skipped(text(&output.stderr).lines().last().unwrap_or("it fails"));
        }
        let said = text(&[output.stdout, output.stderr].concat());
        let line = said.lines().find(|line| line.chars().any(|c| c.is_ascii_digit()));
        let version =
            line.unwrap_or_default().split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
        Some(version.unwrap_or_default().trim_end_matches(',').to_string())
    }

    fn command(&self, case: &Case, out: &Path, args: &[&str]) -> Command {
        let binary = env!("CARGO_BIN_EXE_zero-train");
        let config = case.path("ds.yaml");
        let corpus = format!("data.train={:?}", case.path("corpus.txt"));
        // All paths are absolute, because Ray runs the ranks in another folder.
        let own = ["--config", config.to_str().unwrap(), "--plain", "--set", &corpus, "--out", out.to_str().unwrap()];
        let start: Vec<&str> = self.start.iter().map(String::as_str).collect();
        let all = [&start[1..], &[binary], &own, args].concat();
        let mut command = case.command_of(Path::new(start[0]), &all);
        command.envs(self.variables.iter().cloned());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Trains, compares with our launcher, kills a rank of a second run, and prints a row of the table.
    fn works(&self) {
        let Some(version) = self.found() else { return };
        let case = Case::new();
        case.train(&["--quiet", "-n", "2", "--out", "own"]);
        let own = (case.losses("own"), case.shards("own", 20));
        let out = case.path("theirs");
        let started = Instant::now();
        let running = self.command(&case, &out, &[]).spawn().unwrap();
        let output = running.wait_with_output().unwrap();
        let took = started.elapsed();
        assert_eq!(output.status.code(), Some(0), "{}: {}", self.name, said(&output));
        assert!((case.losses("theirs"), case.shards("theirs", 20)) == own, "{}: not bit-identical", self.name);
        let report = case.report("theirs");
        assert_eq!(
            (&report["world_size"], &report["transport"]),
            (&2.into(), &"shared memory".into()),
            "{}",
            self.name
        );
        let (code, ended) = self.ends_when_a_rank_is_killed(&case);
        let start = || self.start.iter().map(|word| short(word)).collect::<Vec<_>>().join(" ") + " zero-train …";
        println!(
            "| {} | {version} | `{}` | {:.1} s | {code} | {:.1} s |",
            self.name,
            self.shown.map_or_else(start, String::from),
            took.as_secs_f64(),
            ended.as_secs_f64(),
        );
    }

    /// Kills a rank of an endless run. Returns the launcher's exit status, and the time until it ended.
    fn ends_when_a_rank_is_killed(&self, case: &Case) -> (i32, Duration) {
        let out = case.path("killed");
        let running = self.command(case, &out, &["--max-steps", "1000000"]).spawn().unwrap();
        let metrics = || fs::read_to_string(out.join("metrics.jsonl")).map_or(0, |text| text.lines().count());
        // Some launchers take a minute on a busy machine.
        let patience = Instant::now() + Duration::from_secs(300);
        while metrics() < 3 {
            assert!(Instant::now() < patience, "{}: it does not train", self.name);
            std::thread::sleep(Duration::from_millis(20));
        }
        let ranks = ranks_of(&out);
        assert_eq!(ranks.len(), 2, "{}: {ranks:?}", self.name);
        signal(ranks.iter().find(|(rank, _)| *rank == 1).expect("rank 1").1, "KILL");
        let killed = Instant::now();
        let output = running.wait_with_output().unwrap();
        let took = killed.elapsed();
        let said = said(&output);
        let code = output.status.code().unwrap_or_else(|| 128 + output.status.signal().unwrap_or(0));
        assert_eq!(code, self.status, "{}: {said}", self.name);
        assert!(self.kills || said.contains("rank 0 lost rank 1 in "), "{}: {said}", self.name);
        let mut rest = said.as_str();
        for word in self.says {
            let found = rest.split_once(word);
            rest = found.unwrap_or_else(|| panic!("{}: `{word}`: {said}", self.name)).1;
        }
        let end = Instant::now() + Duration::from_secs(10);
        while !ranks_of(&out).is_empty() {
            assert!(Instant::now() < end, "{}: a rank is left", self.name);
            std::thread::sleep(Duration::from_millis(20));
        }
        (code, took)
    }
}

fn said(output: &Output) -> String {
    text(&[&output.stdout[..], &output.stderr].concat())
}

/// Shortens a path to its file name.
fn short(word: &str) -> String {
    Path::new(word).file_name().map_or_else(|| word.into(), |name| name.to_string_lossy().into_owned())
}

/// Returns the running ranks whose arguments contain the folder, as pairs of rank and process ID.
fn ranks_of(out: &Path) -> Vec<(usize, u32)> {
    let wanted = out.to_str().unwrap();
    let binary = fs::canonicalize(env!("CARGO_BIN_EXE_zero-train")).unwrap();
    let mut found = vec![];
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
        let is_rank = fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == binary)
            && read("cmdline").split(|&byte| byte == 0).any(|word| word == wanted.as_bytes());
        if !is_rank {
            continue;
        }
        let environment = text(&read("environ"));
        let variable = |name: &str| {
            let mut entries = environment.split('\0');
            entries.find_map(|entry| entry.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        };
        let names = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
        if let Some(rank) = names.into_iter().find_map(variable) {
            found.push((rank, process));
        }
    }
    found
}

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

/// Both hosts are this machine, under two names; see scripts/ssh-here.sh.
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
        // A private folder. Other Ray programs on this machine would find a head node in the default one, even after
        // it has ended.
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
    // Starts a new Ray instead of connecting to one it finds, which may have ended.
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
        place(&mut command, [rank, 2], [rank, 2], ("127.0.0.1", port));
        let file = case.path(&format!("error{rank}.json"));
        Alone::start({
            command.env("TORCHELASTIC_RUN_ID", "job").env("TORCHELASTIC_ERROR_FILE", file);
            command
        })
    };
    let [mut left, killed] = [0, 1].map(rank);
    wait_for(|| fs::read_to_string(case.path("run/metrics.jsonl")).is_ok_and(|text| text.lines().count() >= 3));
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
