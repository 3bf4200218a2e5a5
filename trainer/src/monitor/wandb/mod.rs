//! `wandb`: logs to a run on Weights & Biases, with the protocol of its Python client. GraphQL requests create the run,
//! and a series of POST requests sends its lines. The protocol has no specification, so the tests compare this module
//! with the Python client.

mod account;

use std::collections::BTreeMap;
use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::metric::{Record, now};
use super::server::{Server, first_line, text_of};
use super::worker::{RunStatus, Sink, Trouble};
pub(super) use account::{Account, account};

/// Time between two POST requests in the first minute, and after the first minute. The service limits the rate.
const PACES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(15)];
const FIRST: f64 = 60.0;

const VIEWER: &str = "query Viewer { viewer { entity } }";
const RESUME: &str = "query RunResumeStatus($project: String, $entity: String, $name: String!) {
    model(name: $project, entityName: $entity) {
        bucket(name: $name, missingOk: true) { historyLineCount historyTail summaryMetrics }
    }
}";
const UPSERT: &str = "mutation UpsertBucket($name: String, $project: String, $entity: String, $groupName: String,
    $displayName: String, $config: JSONString, $program: String) {
    upsertBucket(input: { name: $name, modelName: $project, entityName: $entity, groupName: $groupName,
        displayName: $displayName, config: $config, jobProgram: $program }) {
        bucket { displayName project { name entity { name } } }
    }
}";

pub(super) struct Wandb {
    server: Server,
    account: Account,
    /// The configuration in the format of the service.
    config: String,
    /// The file with the identity of the run. A later attempt reads it to continue the same run.
    file: PathBuf,
    /// The number of samples after which this attempt continues the run of an earlier attempt, or `None` for a new run.
    resumed: Option<u64>,
    /// The ID of a new run. If creating the run fails, the next try uses the same ID.
    new: Option<String>,
    run: Option<Run>,
    lines: Vec<String>,
    warnings: Vec<String>,
}

/// A run on the server.
struct Run {
    /// The address to which the run's lines are posted.
    stream: String,
    /// Number of history lines that the server has.
    offset: u64,
    /// The last step that the server has. A step is a number of samples.
    last: Option<u64>,
    /// The time from which the run's duration is counted, in seconds since 1970. When a run is continued, this is the
    /// start of this attempt minus the duration of the earlier attempts.
    began: f64,
    /// The newest value of each metric.
    summary: BTreeMap<String, f64>,
}

impl Wandb {
    /// Creates the monitor without contacting the server. With `resumed`, it continues the run that an earlier attempt
    /// created in this folder, after this number of samples.
    pub(super) fn new(account: Account, folder: PathBuf, resumed: Option<u64>, config: &Value) -> Self {
        let keys = config.as_object().into_iter().flatten();
        let config: Map<String, Value> =
            keys.map(|(key, value)| (key.clone(), json!({ "desc": null, "value": value }))).collect();
        Self {
            server: Server::new(account.server.clone()),
            account,
            config: Value::Object(config).to_string(),
            file: folder.join("wandb.json"),
            resumed,
            new: None,
            run: None,
            lines: vec![],
            warnings: vec![],
        }
    }

    fn post(&self, place: &str, url: &str, body: &Value) -> Result<Value, Trouble> {
        let answer = self.server.send(place, |client| {
            let request = client.post(url).basic_auth("api", Some(&self.account.key));
            request.header("Content-Type", "application/json").body(body.to_string())
        })?;
        answer.map_err(|refusal| {
            let value = &refusal.value;
            let of_graphql = value["errors"][0]["message"].as_str();
            let reason = of_graphql.or_else(|| value["error"].as_str()).or_else(|| value["message"].as_str());
            self.server.refused(place, refusal.status, reason.unwrap_or_default())
        })
    }

    /// Returns the `data` field of the response to a query.
    fn ask(&self, place: &str, query: &str, variables: &Value) -> Result<Value, Trouble> {
        let url = account::url(&self.account.server, &["graphql"]);
        let mut answer = self.post(place, &url, &json!({ "query": query, "variables": variables }))?;
        match answer["errors"][0]["message"].as_str() {
            Some(reason) => Err(self.server.trouble(place, &first_line(reason))),
            None => Ok(answer["data"].take()),
        }
    }

    /// Creates or continues the run.
    fn open(&mut self) -> Result<Run, Trouble> {
        let known = self.known();
        let account = &self.account;
        let of_file = |key: &str| known.as_ref().and_then(|known| known[key].as_str()).map(str::to_string);
        let entity = match of_file("entity").or_else(|| account.entity.clone()) {
            Some(entity) => entity,
            None => {
                let answer = self.ask("viewer", VIEWER, &json!({}))?;
                let entity = answer["viewer"]["entity"].as_str().map(str::to_string);
                entity.ok_or_else(|| self.server.trouble("viewer", "the server does not know the API key"))?
            }
        };
        let project = of_file("project").unwrap_or_else(|| account.project.clone());
        let of_file = of_file("run_id");
        let mut run = Run { stream: String::new(), offset: 0, last: None, began: now(), summary: BTreeMap::new() };
        let found = match account.run.as_ref().or(of_file.as_ref()).filter(|_| self.resumed.is_some()) {
            Some(id) => self.resume(&mut run, &entity, &project, id)?.then(|| id.clone()),
            None => None,
        };
        let (sent, resumed) = (run.last.unwrap_or_default(), self.resumed.unwrap_or_default());
        if found.is_some() && sent < resumed {
            self.warnings.push(format!(
                "the monitor `wandb` is missing the steps after {sent} up to {resumed} samples: an earlier process did not send them"
            ));
        }
        let id = match found.or_else(|| account.run.clone()) {
            Some(id) => id,
            None => self.new.get_or_insert_with(new_id).clone(),
        };
        let account = &self.account;
        let answer = self.ask(
            "upsertBucket",
            UPSERT,
            &json!({
                "name": id, "project": project, "entity": entity, "groupName": account.group,
                "displayName": account.name, "config": self.config, "program": "zero-train",
            }),
        )?;
        let bucket = &answer["upsertBucket"]["bucket"];
        if !bucket.is_object() {
            return Err(self.server.trouble("upsertBucket", "the response has no run"));
        }
        // The server may normalize names.
        let entity = bucket["project"]["entity"]["name"].as_str().unwrap_or(&entity);
        let project = bucket["project"]["name"].as_str().unwrap_or(&project);
        run.stream = account::url(&account.server, &["files", entity, project, &id, "file_stream"]);
        self.lines.push(format!("wandb: {}", account.page(entity, project, &id)));
        let known = json!({ "base_url": account.server, "entity": entity, "project": project, "run_id": id });
        // A failure is ignored: this run is logged anyway, but a later attempt creates a new W&B run.
        let _ = fs::write(&self.file, format!("{known:#}\n"));
        Ok(run)
    }

    /// Returns the contents of the file with the run of an earlier attempt, if this attempt continues it on the same
    /// server.
    fn known(&self) -> Option<Value> {
        let text = fs::read_to_string(&self.file).ok().filter(|_| self.resumed.is_some())?;
        let known: Value = serde_json::from_str(&text).ok()?;
        let is_same = self.account.run.as_deref().is_none_or(|run| known["run_id"] == run);
        (known["base_url"] == self.account.server.as_str() && is_same).then_some(known)
    }

    /// Continues a run from the state that the server has. Returns whether the server knows the run.
    fn resume(&self, run: &mut Run, entity: &str, project: &str, id: &str) -> Result<bool, Trouble> {
        let place = "runResumeStatus";
        let answer = self.ask(place, RESUME, &json!({ "entity": entity, "project": project, "name": id }))?;
        let bucket = &answer["model"]["bucket"];
        if !bucket.is_object() {
            return Ok(false);
        }
        let lines = bucket["historyLineCount"].as_u64();
        run.offset = lines.ok_or_else(|| self.server.trouble(place, "the response has no historyLineCount"))?;
        // The tail is a JSON list of lines, encoded as a string.
        let tail: Vec<String> =
            serde_json::from_str(bucket["historyTail"].as_str().unwrap_or("[]")).unwrap_or_default();
        let tail = tail.last().map(|line| parsed(line)).unwrap_or_default();
        run.last = tail["_step"].as_u64();
        if run.offset > 0 && run.last.is_none() {
            return Err(self.server.trouble(place, "the response does not contain the last step of the run"));
        }
        run.began -= tail["_runtime"].as_f64().unwrap_or_default();
        let summary = bucket["summaryMetrics"].as_str().map(parsed).unwrap_or_default();
        let values = summary.as_object().into_iter().flatten();
        run.summary = values.filter_map(|(key, value)| Some((key.clone(), value.as_f64()?))).collect();
        Ok(true)
    }
}

impl Run {
    /// Returns the history line of a step, and adds its values to the summary. As in DeepSpeed, the line's step is the
    /// number of samples.
    fn line(&mut self, record: &Record) -> String {
        let scalars = record.scalars.iter().map(|scalar| (scalar.metric.tag, scalar.value));
        let times = [("_timestamp", record.time), ("_runtime", (record.time - self.began).max(0.0))];
        let values: Vec<(&str, f64)> = scalars.chain(times).collect();
        self.summary.extend(values.iter().map(|(key, value)| (key.to_string(), *value)));
        let step = ("_step", record.samples.to_string());
        object(values.into_iter().map(|(key, value)| (key, number(value))).chain([step]))
    }

    /// Returns the newest values of all metrics, and the duration that the service displays.
    fn summary(&self, step: u64) -> String {
        let own = ["_step", "_wandb"];
        let values = self.summary.iter().filter(|(key, _)| !own.contains(&key.as_str()));
        let seconds = self.summary.get("_runtime").copied().unwrap_or_default() as u64;
        let more = [("_step", step.to_string()), ("_wandb", json!({ "runtime": seconds }).to_string())];
        object(values.map(|(key, value)| (key.as_str(), number(*value))).chain(more))
    }
}

impl Sink for Wandb {
    fn write(&mut self, records: &[Record]) -> Result<(), Trouble> {
        let mut run = match self.run.take() {
            Some(run) => run,
            None => self.open()?,
        };
        let new: Vec<&Record> = records.iter().filter(|one| run.last.is_none_or(|last| one.samples > last)).collect();
        let lines: Vec<String> = new.iter().map(|record| run.line(record)).collect();
        // A line that is sent again has the same offset, so it replaces the line that the server may already have.
        let sent = match new.last() {
            None => Ok(Value::Null),
            Some(newest) => {
                let history = json!({ "offset": run.offset, "content": lines });
                let summary = json!({ "offset": 0, "content": [run.summary(newest.samples)] });
                let files = json!({ "wandb-history.jsonl": history, "wandb-summary.json": summary });
                self.post("file_stream", &run.stream, &json!({ "files": files, "dropped": 0 }))
            }
        };
        if let (Ok(_), Some(record)) = (&sent, new.last()) {
            run.offset += lines.len() as u64;
            run.last = Some(record.samples);
        }
        self.run = Some(run);
        sent.map(drop)
    }

    fn help(&self) -> String {
        "check WANDB_BASE_URL, WANDB_API_KEY and the `wandb` section".into()
    }

    fn pace(&self) -> Duration {
        match &self.run {
            None => Duration::ZERO,
            Some(run) => PACES[usize::from(now() - run.began > FIRST)],
        }
    }

    fn beat(&mut self) -> Result<(), Trouble> {
        let Some(run) = &self.run else { return Ok(()) };
        let body = json!({ "complete": false, "failed": false, "dropped": 0, "uploaded": [] });
        self.post("file_stream", &run.stream, &body).map(drop)
    }

    fn lines(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines)
    }

    fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    fn finish(&mut self, outcome: RunStatus) -> Result<(), Trouble> {
        // The service shows a run with exit code 255 as killed.
        let status = match outcome {
            RunStatus::Done => 0,
            RunStatus::Stopped => 255,
            RunStatus::Failed => 1,
        };
        // Before the first step, the run does not exist on the server.
        let Some(run) = &self.run else { return Ok(()) };
        let body = json!({ "complete": true, "exitcode": status, "dropped": 0, "uploaded": [] });
        self.post("file_stream", &run.stream, &body).map(drop)
    }
}

fn object<'a>(entries: impl Iterator<Item = (&'a str, String)>) -> String {
    let entries: Vec<String> = entries.map(|(key, value)| format!("{}: {value}", json!(key))).collect();
    format!("{{{}}}", entries.join(", "))
}

/// Formats a number as Python does, so that the service can read it. NaN and infinities become words, because JSON
/// cannot represent them.
fn number(value: f64) -> String {
    if value.is_finite() { json!(value).to_string() } else { text_of(value).into() }
}

/// Parses an object that Python may have written. Numbers that are NaN or infinite become null.
fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| {
        let words = [": NaN", ":NaN", ": Infinity", ":Infinity", ": -Infinity", ":-Infinity"];
        let text = words.iter().fold(text.to_string(), |text, word| text.replace(word, ": null"));
        serde_json::from_str(&text).unwrap_or_default()
    })
}

/// Returns eight random digits and lower-case letters. They identify a run within its project.
fn new_id() -> String {
    // Each `RandomState` of the standard library has its own random keys.
    let mut random = RandomState::new().hash_one(now().to_bits());
    let digit = |_| {
        let digit = char::from_digit((random % 36) as u32, 36);
        random /= 36;
        digit
    };
    (0..8).filter_map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_json_lacks_are_written_and_read() {
        let values = [("a", 1.5), ("b", f64::NAN), ("c", f64::NEG_INFINITY), ("d", f64::INFINITY)];
        let text = object(values.into_iter().map(|(key, value)| (key, number(value))));
        assert_eq!(text, r#"{"a": 1.5, "b": NaN, "c": -Infinity, "d": Infinity}"#);
        assert_eq!(parsed(&text), json!({ "a": 1.5, "b": null, "c": null, "d": null }));
    }

    #[test]
    fn run_ids_differ() {
        let ids = [new_id(), new_id()];
        assert!(ids.iter().all(|id| id.len() == 8 && id.chars().all(|one| one.is_ascii_alphanumeric())), "{ids:?}");
        assert_ne!(ids[0], ids[1]);
    }
}
