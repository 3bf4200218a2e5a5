//! `prometheus`: serves the newest values at `/metrics`, in Prometheus's text format, version 0.0.4.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::metric::{Kind, Metric, Record};
use super::worker::{RunStatus, Sink, Trouble};

/// Maximum number of connections. Further connections are closed.
const VISITORS: usize = 16;
/// Time limit for a client to send its request and to read the response.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum length of a request in bytes.
const LONGEST: usize = 8192;

pub(super) struct Prometheus {
    host: String,
    port: u16,
    page: Arc<Mutex<Page>>,
    /// The server's address and its stop flag. `None` until it listens.
    server: Option<(SocketAddr, Arc<AtomicBool>)>,
}

/// The values that are served.
#[derive(Debug, Default)]
struct Page {
    /// Labels and values that do not change during the run.
    info: Vec<(&'static str, String)>,
    /// The values by name, then by label.
    values: BTreeMap<&'static str, BTreeMap<&'static str, (&'static Metric, f64)>>,
    step: u64,
    samples: u64,
    time: f64,
    /// Milliseconds of each rank's own work, by rank.
    rank_ms: Vec<f64>,
}

impl Prometheus {
    /// Creates the monitor. It does not listen yet.
    pub(super) fn new(config: &zero_config::Prometheus, info: Vec<(&'static str, String)>) -> Self {
        let page = Arc::new(Mutex::new(Page { info, ..Page::default() }));
        Self { host: config.host.clone(), port: config.port, page, server: None }
    }

    /// Starts listening, unless the server listens already. Returns the address.
    pub(super) fn listen(&mut self) -> Result<SocketAddr, Trouble> {
        if let Some((address, _)) = &self.server {
            return Ok(*address);
        }
        let place = || format!("{}:{}", self.host, self.port);
        let trouble = |error| Trouble(format!("{}: {error}", place()));
        let listener = TcpListener::bind((self.host.as_str(), self.port)).map_err(trouble)?;
        let address = listener.local_addr().map_err(trouble)?;
        let (page, stop) = (self.page.clone(), Arc::new(AtomicBool::new(false)));
        let stops = stop.clone();
        let serving = std::thread::Builder::new().name("prometheus-server".into());
        serving.spawn(move || serve(&listener, &page, &stops)).map_err(trouble)?;
        self.server = Some((address, stop));
        Ok(address)
    }
}

impl Sink for Prometheus {
    fn write(&mut self, records: &[Record]) -> Result<(), Trouble> {
        self.listen()?;
        let mut page = lock(&self.page);
        records.iter().for_each(|record| page.add(record));
        Ok(())
    }

    fn help(&self) -> String {
        "free the port, or set `prometheus.port`".into()
    }

    fn finish(&mut self, _: RunStatus) -> Result<(), Trouble> {
        if let Some((address, stop)) = self.server.take() {
            stop.store(true, Ordering::Relaxed);
            // The connection wakes the server so that it checks the flag. A failure to connect does not matter.
            let _ = TcpStream::connect_timeout(&address, Duration::from_millis(200));
        }
        Ok(())
    }
}

impl Page {
    fn add(&mut self, record: &Record) {
        (self.step, self.samples, self.time) = (record.step, record.samples, record.time);
        if !record.rank_ms.is_empty() {
            self.rank_ms.clone_from(&record.rank_ms);
        }
        for scalar in &record.scalars {
            let metric = scalar.metric;
            let of_name = self.values.entry(metric.name).or_default();
            let (_, value) = of_name.entry(metric.label.map_or("", |(_, value)| value)).or_insert((metric, 0.0));
            match metric.kind {
                Kind::Gauge => *value = scalar.value * metric.scale,
                Kind::Counter => *value += scalar.value * metric.scale,
            }
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let labels: Vec<String> =
            self.info.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        family(&mut text, "info", "gauge", "Labels that describe the run.");
        let _ = writeln!(text, "zero_train_info{{{}}} 1", labels.join(","));
        if self.step == 0 {
            return text;
        }
        family(&mut text, "steps_total", "counter", "Optimizer steps of the run, including those before a resume.");
        let _ = writeln!(text, "zero_train_steps_total {}", self.step);
        family(&mut text, "samples_total", "counter", "Samples processed by all ranks in the run's optimizer steps.");
        let _ = writeln!(text, "zero_train_samples_total {}", self.samples);
        family(&mut text, "last_step_timestamp_seconds", "gauge", "Unix time at which the last step ended.");
        let _ = writeln!(text, "zero_train_last_step_timestamp_seconds {}", number(self.time));
        family(
            &mut text,
            "rank_work_seconds",
            "gauge",
            "Time of each rank's own work in the last step, excluding waits for other ranks.",
        );
        for (rank, ms) in self.rank_ms.iter().enumerate() {
            let _ = writeln!(text, "zero_train_rank_work_seconds{{rank=\"{rank}\"}} {}", number(ms / 1e3));
        }
        for (name, of_name) in &self.values {
            for (index, (metric, value)) in of_name.values().enumerate() {
                if index == 0 {
                    family(&mut text, name, metric.kind.name(), metric.help);
                }
                let label = metric.label.map_or(String::new(), |(label, of)| format!("{{{label}=\"{of}\"}}"));
                let _ = writeln!(text, "zero_train_{name}{label} {}", number(*value));
            }
        }
        text
    }
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = write!(text, "# HELP zero_train_{name} {help}\n# TYPE zero_train_{name} {kind}\n");
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Formats a number as Prometheus does.
fn number(x: f64) -> String {
    match x {
        x if x.is_nan() => "NaN".into(),
        f64::INFINITY => "+Inf".into(),
        f64::NEG_INFINITY => "-Inf".into(),
        x => x.to_string(),
    }
}

fn serve(listener: &TcpListener, page: &Arc<Mutex<Page>>, stop: &AtomicBool) {
    let visitors = Arc::new(AtomicUsize::new(0));
    for visitor in listener.incoming() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let Ok(stream) = visitor else {
            // Waits before the next attempt, because errors such as too many open files may persist.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        let Some(visitor) = Visitor::admit(&visitors) else { continue };
        let page = page.clone();
        // If the thread does not start, its closure is dropped. This also drops the visitor and closes the connection.
        let _ = std::thread::Builder::new().name("prometheus-answer".into()).spawn(move || {
            let _visitor = visitor;
            let _ = answer(stream, &page);
        });
    }
}

/// A connection that counts as a visitor until it is dropped, even during a panic.
struct Visitor(Arc<AtomicUsize>);

impl Visitor {
    /// Counts a new visitor. Returns `None` if there are already [`VISITORS`].
    fn admit(visitors: &Arc<AtomicUsize>) -> Option<Self> {
        if visitors.load(Ordering::Relaxed) >= VISITORS {
            return None;
        }
        visitors.fetch_add(1, Ordering::Relaxed);
        Some(Self(visitors.clone()))
    }
}

impl Drop for Visitor {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn answer(mut stream: TcpStream, page: &Mutex<Page>) -> std::io::Result<()> {
    let until = Instant::now() + PATIENCE;
    let mut question = vec![];
    let mut piece = [0; 1024];
    while question.len() < LONGEST && !question.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut piece)? {
            0 => break,
            n => question.extend(&piece[..n]),
        }
    }
    let first = question.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let first = String::from_utf8_lossy(first);
    let mut words = first.split(' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let is_http = version.is_some_and(|version| version.starts_with("HTTP/1.")) && words.next().is_none();
    let path = target.map(|target| target.split('?').next().unwrap_or_default());
    let (status, body) = match (method, path) {
        _ if !is_http => ("400 Bad Request", "not an HTTP request\n".to_string()),
        (Some("GET" | "HEAD"), Some("/metrics")) => ("200 OK", lock(page).text()),
        (Some("GET" | "HEAD"), _) => ("404 Not Found", "the metrics are at /metrics\n".to_string()),
        _ => ("405 Method Not Allowed", "only GET\n".to_string()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(head.as_bytes())?;
    if method != Some("HEAD") {
        stream.write_all(body.as_bytes())?;
    }
    stream.flush()
}

fn lock(page: &Mutex<Page>) -> MutexGuard<'_, Page> {
    // A panicked thread leaves these plain numbers consistent, so the poison is ignored.
    page.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::metric::{self, Scalar};
    use super::*;

    fn server() -> (Prometheus, SocketAddr) {
        let config = zero_config::Prometheus { enabled: true, host: "127.0.0.1".into(), port: 0 };
        let mut prometheus = Prometheus::new(&config, vec![("version", "1 \"a\"".into())]);
        let address = prometheus.listen().expect("a free port");
        (prometheus, address)
    }

    fn ask(address: SocketAddr, question: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).expect("a server");
        stream.write_all(question).expect("it listens");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    fn record(step: u64, loss: f64) -> Record {
        let scalar = |metric, value| Scalar { metric, value };
        let scalars = vec![
            scalar(&metric::TRAIN_LOSS, loss),
            scalar(&metric::FORWARD_TIME, 2.0),
            scalar(&metric::UPDATE_TIME, 1.0),
            scalar(&metric::SENT_BYTES, 100.0),
        ];
        Record { step, samples: 4 * step, time: 5.5, scalars, rank_ms: vec![1500.0, 250.0] }
    }

    #[test]
    fn the_page_shows_the_newest_values_and_sums() {
        let (mut prometheus, address) = server();
        let question = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        let before = ask(address, question);
        assert!(before.ends_with("zero_train_info{version=\"1 \\\"a\\\"\"} 1\n"), "{before}");
        prometheus.write(&[record(1, 3.0), record(2, f64::NAN)]).expect("it listens");
        let answer = ask(address, question);
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{answer}");
        for line in [
            "zero_train_steps_total 2",
            "zero_train_samples_total 8",
            "zero_train_loss NaN",
            "zero_train_sent_bytes_total 200",
            "# TYPE zero_train_sent_bytes_total counter",
            "# TYPE zero_train_phase_seconds gauge",
            "zero_train_phase_seconds{phase=\"forward\"} 0.002",
            "zero_train_phase_seconds{phase=\"step\"} 0.001",
            "zero_train_rank_work_seconds{rank=\"1\"} 0.25",
        ] {
            assert_eq!(answer.lines().filter(|known| *known == line).count(), 1, "{line} in {answer}");
        }
        let head = ask(address, b"HEAD /metrics HTTP/1.0\r\n\r\n");
        assert!(head.contains("200 OK") && head.ends_with("\r\n\r\n"), "{head}");
        prometheus.finish(RunStatus::Done).expect("it ends");
        assert!(prometheus.listen().is_ok(), "and its port is free again");
    }

    #[test]
    fn invalid_requests_and_silent_clients_do_no_harm() {
        let (_prometheus, address) = server();
        let silent: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(address).expect("a server")).collect();
        for (question, status) in [
            (&b"\xFF\xFE\r\n\r\n"[..], "400"),
            (b"GET /metrics\r\n\r\n", "400"),
            (b"GET /metrics HTTP/1.1 more\r\n\r\n", "400"),
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET /metrics?a=b HTTP/1.1\r\n\r\n", "200"),
        ] {
            let answer = ask(address, question);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{question:?}: {answer}");
        }
        // The request exceeds the limit: the server answers or closes the connection.
        let endless = ask(address, &[b'a'; LONGEST]);
        assert!(endless.starts_with("HTTP/1.1 400 ") || endless.is_empty(), "{endless}");
        drop(silent);
    }

    #[test]
    fn a_panicking_response_frees_its_connection_slot() {
        let visitors = Arc::new(AtomicUsize::new(0));
        let admitted: Vec<Visitor> = (0..VISITORS).filter_map(|_| Visitor::admit(&visitors)).collect();
        assert!(admitted.len() == VISITORS && Visitor::admit(&visitors).is_none());
        for visitor in admitted {
            let answering = std::thread::spawn(move || {
                let _visitor = visitor;
                panic!("an answer that fails");
            });
            assert!(answering.join().is_err());
        }
        assert!(Visitor::admit(&visitors).is_some());
    }

    #[test]
    fn a_port_in_use_is_an_error() {
        let (_prometheus, address) = server();
        let config = zero_config::Prometheus { enabled: true, host: "127.0.0.1".into(), port: address.port() };
        let mut second = Prometheus::new(&config, vec![]);
        let Trouble(text) = second.write(&[record(1, 1.0)]).expect_err("it is taken");
        assert_eq!(text, format!("{address}: Address already in use (os error 98)"));
    }
}
