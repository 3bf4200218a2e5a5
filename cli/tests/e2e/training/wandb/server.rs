//! A server with the part of the protocol of Weights & Biases that its Python client and this program need.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};

/// An API key. The client rejects keys of a different length.
pub(super) const KEY: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
/// `api:KEY` in base 64.
const BASIC: &str = "Basic YXBpOmFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWE=";

/// The data that the server stores about a run.
#[derive(Default, Clone)]
pub(super) struct Run {
    place: String,
    pub(super) group: Value,
    pub(super) name: Value,
    pub(super) config: Value,
    pub(super) history: Vec<String>,
    pub(super) summary: String,
    /// The last message of a run that has ended.
    pub(super) end: Option<Value>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) runs: BTreeMap<String, Run>,
    /// Number of following posts of lines that the server stores and does not answer.
    pub(super) lost: usize,
    /// Number of posts of lines that the server has stored.
    pub(super) stored: usize,
}

#[derive(Clone)]
pub(super) struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Server {
    /// Starts a server, which runs until the test ends.
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self { address: listener.local_addr().unwrap(), state: Arc::default() };
        let own = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, own) = (stream.unwrap(), own.clone());
                std::thread::spawn(move || drop(own.serve(&stream)));
            }
        });
        server
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Returns the only run.
    pub(super) fn run(&self) -> (String, Run) {
        let state = self.state();
        assert_eq!(state.runs.len(), 1, "{:?}", state.runs.keys());
        let (id, run) = state.runs.first_key_value().unwrap();
        (id.clone(), run.clone())
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn serve(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let (mut request, mut length, mut is_authorized) = (String::new(), 0, false);
            reader.read_line(&mut request)?;
            let Some(path) = request.split_whitespace().nth(1).map(str::to_string) else { return Ok(()) };
            loop {
                let mut line = String::new();
                reader.read_line(&mut line)?;
                let Some((name, value)) = line.trim().split_once(": ") else { break };
                match name.to_ascii_lowercase().as_str() {
                    "content-length" => length = value.parse().unwrap(),
                    "authorization" => is_authorized = value == BASIC,
                    _ => {}
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body)?;
            let body: Value = serde_json::from_slice(&body).unwrap_or_default();
            let (status, answer) = match path.as_str() {
                _ if !is_authorized => {
                    ("401 Unauthorized", json!({ "errors": [{ "message": "user is not logged in" }] }))
                }
                "/graphql" => ("200 OK", self.graphql(&body)),
                stream if stream.ends_with("/file_stream") => match self.lines(stream, &body) {
                    Some(answer) => answer,
                    None => return Ok(()),
                },
                _ => ("404 Not Found", json!({})),
            };
            let answer = answer.to_string();
            write!(stream, "HTTP/1.1 {status}\r\nContent-Type: application/json\r\n")?;
            write!(stream, "Content-Length: {}\r\n\r\n{answer}", answer.len())?;
        }
    }

    fn graphql(&self, body: &Value) -> Value {
        let (query, variables) = (body["query"].as_str().unwrap(), &body["variables"]);
        let mut state = self.state();
        let data = if query.contains("upsertBucket") {
            let id = variables["name"].as_str().unwrap();
            let [entity, project] = ["entity", "project"].map(|key| variables[key].as_str().unwrap());
            let run = state.runs.entry(id.into()).or_default();
            run.place = format!("/files/{entity}/{project}/{id}/file_stream").replace(' ', "%20");
            // An update of a run contains only the values that change.
            for (to, from) in [(&mut run.group, "groupName"), (&mut run.name, "displayName")] {
                if !variables[from].is_null() {
                    *to = variables[from].clone();
                }
            }
            if let Some(config) = variables["config"].as_str() {
                run.config = serde_json::from_str(config).unwrap();
            }
            let project = json!({ "id": "p", "name": project, "entity": { "id": "e", "name": entity } });
            let bucket = json!({
                "id": "b", "name": id, "displayName": "a name", "description": null, "config": null, "sweepName": null,
                "project": project, "historyLineCount": run.history.len(),
            });
            json!({ "upsertBucket": { "bucket": bucket, "inserted": true } })
        } else if query.contains("bucket(name: $name, missingOk: true)") {
            let run = state.runs.get(variables["name"].as_str().unwrap());
            let bucket = run.map(|run| {
                let tail = &run.history[run.history.len().saturating_sub(1)..];
                json!({
                    "historyLineCount": run.history.len(), "historyTail": json!(tail).to_string(),
                    "summaryMetrics": run.summary,
                })
            });
            json!({ "model": { "bucket": bucket } })
        } else if query.contains("viewer") {
            json!({ "viewer": { "id": "u", "entity": "the user", "flags": "{}", "teams": { "edges": [] } } })
        } else {
            json!({})
        };
        json!({ "data": data })
    }

    /// Stores lines. Returns the answer, or `None` to close the connection without one.
    fn lines(&self, path: &str, body: &Value) -> Option<(&'static str, Value)> {
        let mut state = self.state();
        let Some(run) = state.runs.values_mut().find(|run| run.place == path) else {
            return Some(("404 Not Found", json!({ "error": "there is no such run" })));
        };
        let content = |file: &Value| -> Vec<String> { serde_json::from_value(file["content"].clone()).unwrap() };
        let files = &body["files"];
        if let Some(history) = files.get("wandb-history.jsonl") {
            let (offset, lines) = (history["offset"].as_u64().unwrap() as usize, content(history));
            assert!(offset <= run.history.len(), "lines {} to {offset} are missing", run.history.len());
            run.history.truncate(offset);
            run.history.extend(lines);
        }
        if let Some(summary) = files.get("wandb-summary.json") {
            run.summary = content(summary).pop().unwrap();
        }
        run.end = (body["complete"] == true).then(|| body.clone());
        if files.is_object() {
            state.stored += 1;
            if state.lost > 0 {
                state.lost -= 1;
                return None;
            }
        }
        Some(("200 OK", json!({ "limits": {} })))
    }
}
