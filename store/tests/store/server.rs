//! A web server for tests that fails as real stores and networks do.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A fault in the server's answers for a file.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// The next answers to GET have this status. The second field is the number of these answers.
    Status(u16, usize),
    /// The connections of the next answers are closed after this many bytes of the content. The second field is the
    /// number of these answers.
    Cut(usize, usize),
    /// This byte of the file is wrong in the next `times` answers that contain it. If `varies`, it is wrong in a
    /// different way each time.
    Flip { byte: usize, times: usize, varies: bool },
    /// The server sends the content in pieces of this many bytes, with a pause after each.
    Slow(usize, Duration),
}

struct File {
    content: Vec<u8>,
    /// Headers that state a checksum or a version.
    headers: Vec<(String, String)>,
    faults: Vec<Fault>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, File>,
    /// The ranges that GET requested, by path.
    requests: Vec<String>,
}

/// A server on a free port. It runs until it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::at("127.0.0.1:0".parse().unwrap(), Arc::default())
    }

    fn at(address: SocketAddr, state: Arc<Mutex<State>>) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let (address, ends) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let (shared, stop) = (Arc::clone(&state), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let (shared, stop) = (Arc::clone(&shared), Arc::clone(&stop));
                let Ok(stream) = stream else { continue };
                std::thread::spawn(move || drop(serve(&stream, &shared, &stop)));
            }
        });
        Self { address, state, ends, thread: Some(thread) }
    }

    /// Stops the server and all its connections. Returns a function that starts it again on the same port.
    pub(crate) fn kill(mut self) -> impl FnOnce() -> Self {
        self.end();
        let (address, state) = (self.address, Arc::clone(&self.state));
        move || Self::at(address, state)
    }

    fn end(&mut self) {
        self.ends.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    /// Adds or replaces a file.
    pub(crate) fn put(&self, path: &str, content: impl Into<Vec<u8>>, headers: &[(&str, &str)]) {
        let headers = headers.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let file = File { content: content.into(), headers, faults: vec![] };
        self.state.lock().unwrap().files.insert(path.into(), file);
    }

    pub(crate) fn fail(&self, path: &str, fault: Fault) {
        self.state.lock().unwrap().files.get_mut(path).unwrap().faults.push(fault);
    }

    /// Returns the number of GET requests so far.
    pub(crate) fn requests(&self) -> usize {
        self.state.lock().unwrap().requests.len()
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>, ends: &AtomicBool) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let (mut request, mut range) = (String::new(), None);
        reader.read_line(&mut request)?;
        let mut parts = request.split_whitespace();
        let (Some(method), Some(path)) = (parts.next(), parts.next()) else { return Ok(()) };
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let line = line.trim().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            range = line.strip_prefix("range: bytes=").map(str::to_string).or(range);
        }
        if ends.load(Ordering::Acquire) {
            return Ok(());
        }
        answer(stream, state, ends, (method, path.trim_start_matches('/'), range.as_deref()))?;
    }
}

fn answer(
    mut stream: &TcpStream,
    state: &Mutex<State>,
    ends: &AtomicBool,
    (method, path, range): (&str, &str, Option<&str>),
) -> std::io::Result<()> {
    let mut locked = state.lock().unwrap();
    if method == "GET" {
        locked.requests.push(format!("{path} {}", range.unwrap_or("")));
    }
    let Some(file) = locked.files.get_mut(path) else {
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
    };
    let total = file.content.len();
    let (from, to) = match range.and_then(|range| range.split_once('-')) {
        Some((from, to)) => (from.parse().unwrap(), to.parse::<usize>().map_or(total, |to| (to + 1).min(total))),
        None => (0, total),
    };
    let mut body = file.content[from..to].to_vec();
    let (mut cut, mut slow) = (None, None);
    if method == "GET" {
        for fault in &mut file.faults {
            match fault {
                Fault::Status(status, times) if *times > 0 => {
                    *times -= 1;
                    let head = format!("HTTP/1.1 {status} Fault\r\ncontent-length: 5\r\n\r\nfault");
                    return stream.write_all(head.as_bytes());
                }
                Fault::Cut(after, times) if *times > 0 && *after < body.len() => {
                    *times -= 1;
                    cut = Some(*after);
                }
                Fault::Flip { byte, times, varies } if *times > 0 && (from..to).contains(byte) => {
                    body[*byte - from] ^= if *varies { 1 << (*times % 8) } else { 1 };
                    *times -= 1;
                }
                Fault::Slow(piece, pause) => slow = Some((*piece, *pause)),
                _ => {}
            }
        }
    }
    let mut head = match range {
        Some(_) => format!("HTTP/1.1 206 Partial Content\r\ncontent-range: bytes {from}-{}/{total}\r\n", to.max(1) - 1),
        None => "HTTP/1.1 200 OK\r\n".to_string(),
    };
    for (name, value) in &file.headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += &format!("content-length: {}\r\n\r\n", body.len());
    drop(locked);
    stream.write_all(head.as_bytes())?;
    if method == "HEAD" {
        return Ok(());
    }
    let body = &body[..cut.unwrap_or(body.len())];
    let (piece, pause) = slow.unwrap_or((body.len().max(1), Duration::ZERO));
    for piece in body.chunks(piece) {
        if ends.load(Ordering::Acquire) {
            stream.shutdown(std::net::Shutdown::Both)?;
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        stream.write_all(piece)?;
        std::thread::sleep(pause);
    }
    if cut.is_some() {
        stream.shutdown(std::net::Shutdown::Both)?;
        return Err(std::io::ErrorKind::ConnectionReset.into());
    }
    Ok(())
}
