//! `machine_monitor`: what rank 0's machine and process do meanwhile, by the kernel's own counters in `/proc`, and its GPUs by NVML.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::gpu::{Absent, Gpus};
use super::metric::{self, Metric, Scalar};

/// The end of a run waits so long for a sample that is being taken.
const PATIENCE: Duration = Duration::from_secs(1);

/// Samples on a thread of its own, until it is dropped.
pub(super) struct Machine {
    news: Arc<Mutex<News>>,
    /// Dropped, it ends the thread.
    stop: Option<Sender<()>>,
    /// Ends with the thread.
    ended: Receiver<()>,
}

/// What was not taken yet.
#[derive(Default)]
pub(super) struct News {
    /// The newest sample.
    pub(super) sample: Vec<Scalar>,
    /// What is as it should be.
    pub(super) lines: Vec<String>,
    /// What is not.
    pub(super) words: Vec<String>,
}

impl Machine {
    /// Samples every so often from now on.
    pub(super) fn start(interval: Duration) -> std::io::Result<Self> {
        let news = Arc::<Mutex<News>>::default();
        let ((stop, stopped), (running, ended)) = (channel(), channel());
        let of_thread = news.clone();
        std::thread::Builder::new().name("machine_monitor".into()).spawn(move || {
            watch(interval, &stopped, &of_thread);
            drop(running);
        })?;
        Ok(Self { news, stop: Some(stop), ended })
    }

    /// What is new; never waits.
    pub(super) fn take(&self) -> News {
        self.news.try_lock().map(|mut news| std::mem::take(&mut *news)).unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A process shall not end within a call of the driver's library; nor wait for a driver that hangs.
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

fn watch(interval: Duration, stopped: &Receiver<()>, news: &Mutex<News>) {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let mut gpus = Gpus::find(visible.as_deref())
        .map_err(|absent| match absent {
            Absent::None(why) => lock(news).lines.push(format!("`machine_monitor` has no GPU to watch: {why}")),
            Absent::Failed(why) => {
                lock(news).words.push(format!("`machine_monitor` cannot watch GPUs: NVML: {why}; training goes on"));
            }
        })
        .ok();
    let root = PathBuf::from("/proc");
    let mut before = Counters::read(&root);
    while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        let counters = Counters::read(&root);
        let mut sample = counters.since(&before);
        before = counters;
        let mut words = vec![];
        sample.extend(gpus.iter_mut().flat_map(|gpus| gpus.sample(|word| words.push(word))));
        let mut news = lock(news);
        news.sample = sample;
        news.words.extend(words);
    }
}

fn lock(news: &Mutex<News>) -> MutexGuard<'_, News> {
    // Plain data: a thread that panicked leaves nothing half done in it.
    news.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the kernel has counted; what it does not say is `None`.
struct Counters {
    at: Instant,
    /// Ticks of all cores: busy, and all.
    ticks: Option<(u64, u64)>,
    /// Ticks of this process.
    own_ticks: Option<u64>,
    /// Bytes.
    available: Option<u64>,
    resident: Option<u64>,
    /// Bytes that this process has made disks read and write.
    disk: Option<(u64, u64)>,
    /// Bytes that the machine has received and sent, but those to itself.
    network: Option<(u64, u64)>,
    cores: usize,
}

impl Counters {
    fn read(root: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let (stat, io) = (text("stat"), text("self/io"));
        Self {
            at: Instant::now(),
            ticks: ticks(&stat),
            own_ticks: own_ticks(&text("self/stat")),
            available: kilobytes(&text("meminfo"), "MemAvailable"),
            resident: kilobytes(&text("self/status"), "VmRSS"),
            disk: keyed(&io, "read_bytes").zip(keyed(&io, "write_bytes")),
            network: network(&text("net/dev")),
            cores: stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count(),
        }
    }

    /// What has happened since an earlier look.
    fn since(&self, before: &Self) -> Vec<Scalar> {
        let mut scalars = vec![];
        let mut say = |metric: &'static Metric, value: Option<f64>| {
            scalars.extend(value.filter(|value| value.is_finite()).map(|value| Scalar { metric, value }));
        };
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        let more = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let of_all = self.ticks.zip(before.ticks).map(|(now, before)| (more(now.0, before.0), more(now.1, before.1)));
        say(&metric::CPU, of_all.map(|(busy, all)| 100.0 * busy / all));
        // A tick of all cores is as long as one of this process, so no length of it needs to be known.
        let own = self.own_ticks.zip(before.own_ticks).map(|(now, before)| more(now, before));
        let of_one = of_all.zip(own).map(|((_, all), own)| 100.0 * own * self.cores as f64 / all);
        say(&metric::PROCESS_CPU, of_one);
        say(&metric::RESIDENT, self.resident.map(|bytes| bytes as f64));
        say(&metric::AVAILABLE, self.available.map(|bytes| bytes as f64));
        let rates = [
            (&metric::DISK_READ, &metric::DISK_WRITTEN, self.disk.zip(before.disk)),
            (&metric::RECEIVED, &metric::SENT, self.network.zip(before.network)),
        ];
        for (first, second, counters) in rates {
            say(first, counters.map(|(now, before)| more(now.0, before.0) / seconds));
            say(second, counters.map(|(now, before)| more(now.1, before.1) / seconds));
        }
        scalars
    }
}

/// Of the line `cpu user nice system idle iowait irq softirq steal …`: busy, and all. What guests take is in `user` and `nice`.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line.split_whitespace().take(8).map_while(|field| field.parse().ok()).collect();
    let all = fields.iter().sum();
    let idle = fields.get(3)? + fields.get(4).unwrap_or(&0);
    Some((all - idle, all))
}

/// User's and system's of `pid (name) state …`; a name may have spaces and brackets in it.
fn own_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// The number behind `key:`.
fn keyed(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}

fn kilobytes(text: &str, key: &str) -> Option<u64> {
    Some(keyed(text, key)? * 1024)
}

/// Of all interfaces but the loopback: received and sent.
fn network(dev: &str) -> Option<(u64, u64)> {
    let mut sum = None;
    for line in dev.lines() {
        let Some((name, counters)) = line.split_once(':') else { continue };
        let counters: Vec<u64> = counters.split_whitespace().map_while(|field| field.parse().ok()).collect();
        if let (true, Some(received), Some(sent)) = (name.trim() != "lo", counters.first(), counters.get(8)) {
            let (before, after) = sum.unwrap_or((0, 0));
            sum = Some((before + received, after + sent));
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, files: [(&str, &str); 5]) {
        fs::create_dir_all(root.join("self")).and_then(|()| fs::create_dir_all(root.join("net"))).expect("folders");
        files.iter().for_each(|(name, text)| fs::write(root.join(name), text).expect("a file"));
    }

    #[test]
    fn what_the_kernel_says() {
        let folder = tempfile::tempdir().expect("a folder");
        let stat = |busy: u64, idle: u64| format!("cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2\ncpu1 1 2\nintr 5\n");
        let own = |user: u64| format!("7 (a (b) c) R 1 1 1 0 -1 4194304 100 0 0 0 {user} 5 0 0 20 0 1 0 9 9 9\n");
        let io = |read: u64| format!("rchar: 9\nread_bytes: {read}\nwrite_bytes: 40\ncancelled_write_bytes: 0\n");
        let dev = |received: u64| {
            format!(
                "Inter-|   Receive |\n face |bytes\n    lo: 5 0 0 0 0 0 0 0 5 0\n  eth0: {received} 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0\n"
            )
        };
        let status = "Name:\tx\nVmRSS:\t   2 kB\n";
        let files = |stat: &str, own: &str, io: &str, dev: &str| {
            write(
                folder.path(),
                [("stat", stat), ("self/stat", own), ("self/io", io), ("net/dev", dev), ("self/status", status)],
            );
        };
        files(&stat(100, 100), &own(10), &io(0), &dev(0));
        let before = Counters::read(folder.path());
        files(&stat(150, 150), &own(35), &io(1_000), &dev(4_000));
        let mut after = Counters::read(folder.path());
        after.at = before.at + Duration::from_secs(2);
        let found: Vec<(&str, f64)> =
            after.since(&before).iter().map(|scalar| (scalar.metric.tag, scalar.value)).collect();
        // 100 ticks of two cores are 50 of each, of which this process had 25. There is no meminfo.
        assert_eq!(
            found,
            [
                ("Machine/cpu_percent", 50.0),
                ("Machine/process_cpu_percent", 50.0),
                ("Machine/process_resident_bytes", 2048.0),
                ("Machine/disk_read_bytes_per_second", 500.0),
                ("Machine/disk_written_bytes_per_second", 0.0),
                ("Machine/network_received_bytes_per_second", 2_000.0),
                ("Machine/network_sent_bytes_per_second", 0.0),
            ]
        );
    }

    #[test]
    fn nothing_is_said_of_what_is_not_there() {
        let nowhere = Counters::read(Path::new("/nonexistent"));
        assert!(nowhere.since(&Counters::read(Path::new("/nonexistent"))).is_empty());
        for text in ["", "cpu \n", "cpu  1 2\n", "7 (", "read_bytes:", "eth0: 1"] {
            assert_eq!(
                (ticks(text), own_ticks(text), keyed(text, "read_bytes"), network(text)),
                (None, None, None, None)
            );
        }
        let here = Counters::read(Path::new("/proc"));
        assert!(here.ticks.is_some() && here.own_ticks.is_some() && here.resident.is_some() && here.cores > 0);
    }
}
