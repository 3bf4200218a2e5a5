//! `machine_monitor`: measures rank 0's machine and process with the kernel's counters in `/proc`, and the GPUs with
//! NVML.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::gpu::{Absent, Gpus};
use super::metric::{self, Metric, Scalar};
use crate::process::resident::kilobytes;

/// Maximum time that a run waits at its end for a sample in progress.
const PATIENCE: Duration = Duration::from_secs(1);

/// Takes samples on its own thread until it is dropped.
pub(super) struct Machine {
    news: Arc<Mutex<News>>,
    /// Ends the thread when dropped.
    stop: Option<Sender<()>>,
    /// Disconnected when the thread ends.
    ended: Receiver<()>,
}

/// Results that the run has not taken yet.
#[derive(Default)]
pub(super) struct News {
    /// The newest sample.
    pub(super) sample: Vec<Scalar>,
    /// Lines of information.
    pub(super) lines: Vec<String>,
    /// Warnings.
    pub(super) words: Vec<String>,
}

impl Machine {
    /// Starts taking one sample per `interval`.
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

    /// Returns the results since the last call. Never waits.
    pub(super) fn take(&self) -> News {
        self.news.try_lock().map(|mut news| std::mem::take(&mut *news)).unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.stop.take());
        // The process must not exit during a call into the driver's library, but must not wait for a hanging driver
        // either.
        let _ = self.ended.recv_timeout(PATIENCE);
    }
}

fn watch(interval: Duration, stopped: &Receiver<()>, news: &Mutex<News>) {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let mut gpus = Gpus::find(visible.as_deref())
        .map_err(|absent| match absent {
            Absent::None(why) => lock(news).lines.push(format!("`machine_monitor` found no GPU: {why}")),
            Absent::Failed(why) => {
                lock(news)
                    .words
                    .push(format!("`machine_monitor` cannot monitor GPUs: NVML: {why}; training continues"));
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
    // A panicked thread leaves this plain data consistent, so the poison is ignored.
    news.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Values of the kernel's counters. A value is `None` if the kernel does not report the counter.
struct Counters {
    at: Instant,
    /// Busy ticks and all ticks, summed over all cores.
    ticks: Option<(u64, u64)>,
    /// Ticks of this process.
    own_ticks: Option<u64>,
    /// Available memory of the machine in bytes.
    available: Option<u64>,
    resident: Option<u64>,
    /// Bytes that this process has read from disks and written to them.
    disk: Option<(u64, u64)>,
    /// Bytes that the machine has received and sent, without the loopback interface.
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
            available: kilobytes(&text("meminfo"), "MemAvailable:"),
            resident: kilobytes(&text("self/status"), "VmRSS:"),
            disk: keyed(&io, "read_bytes").zip(keyed(&io, "write_bytes")),
            network: network(&text("net/dev")),
            cores: stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count(),
        }
    }

    /// Returns the metrics of the time between `before` and this reading.
    fn since(&self, before: &Self) -> Vec<Scalar> {
        let mut scalars = vec![];
        let mut say = |metric: &'static Metric, value: Option<f64>| {
            scalars.extend(value.filter(|value| value.is_finite()).map(|value| Scalar { metric, value }));
        };
        let seconds = self.at.duration_since(before.at).as_secs_f64();
        let more = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let of_all = self.ticks.zip(before.ticks).map(|(now, before)| (more(now.0, before.0), more(now.1, before.1)));
        say(&metric::CPU, of_all.map(|(busy, all)| 100.0 * busy / all));
        // The process's ticks and the machine's ticks have the same length, which cancels out.
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

/// Parses the line `cpu user nice system idle iowait irq softirq steal …` and returns the busy ticks and all ticks. The
/// ticks of guests are included in `user` and `nice`.
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line.split_whitespace().take(8).map_while(|field| field.parse().ok()).collect();
    let all = fields.iter().sum();
    let idle = fields.get(3)? + fields.get(4).unwrap_or(&0);
    Some((all - idle, all))
}

/// Returns the user and system ticks from `pid (name) state …`. The name may contain spaces and brackets.
fn own_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Returns the number after `key:`.
fn keyed(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}

/// Returns the bytes received and sent by all interfaces except the loopback.
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
    fn counters_become_metrics() {
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
        // The machine's ticks grow by 100 on two cores, so 50 ticks of time pass. The process uses 25 of them. The
        // folder has no `meminfo`, so there is no metric of the available memory.
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
    fn missing_counters_give_no_metrics() {
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
