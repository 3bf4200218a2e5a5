//! `mlflow`: logs to a run on a tracking server, through its REST interface.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use reqwest::blocking::{Client, RequestBuilder};
use serde_json::{Value, json};

use super::metric::{Record, now};
use super::server::{Server, address, text_of};
use super::worker::{RunStatus, Sink, Trouble};
use zero_engine::Error;

/// Maximum numbers of metrics and of parameters that the server accepts per request.
const METRICS: usize = 1000;
const PARAMS: usize = 100;
/// Maximum length of a parameter's value that the server accepts.
const LONGEST: usize = 6000;

/// Returns the address of the server from the configuration or `MLFLOW_TRACKING_URI`. Returns `None` if MLflow is
/// disabled.
///
/// # Errors
/// Fails if neither the configuration nor the variable has an address, or if this program does not support the address.
pub(super) fn tracking_uri(config: &zero_config::Mlflow) -> Result<Option<String>, Error> {
    if !config.enabled {
        return Ok(None);
    }
    let uri = config.tracking_uri.clone().or_else(|| std::env::var("MLFLOW_TRACKING_URI").ok());
    let uri = uri.filter(|uri| !uri.trim_end_matches('/').is_empty());
    let key = "mlflow.tracking_uri";
    let Some(uri) = uri else {
        let help = "set this key or the environment variable MLFLOW_TRACKING_URI";
        return Err(Error::setting(key, "the URL of the tracking server is missing", help));
    };
    address(&uri).map(Some).ok_or_else(|| {
        let message = format!("{} is not the URL of a tracking server", uri.trim_end_matches('/'));
        Error::setting(key, message, "use a URL such as `http://host:5000`; `mlflow server` starts a server")
    })
}

pub(super) struct Mlflow {
    server: Server,
    token: Option<String>,
    experiment: String,
    run_name: Option<String>,
    /// Parameters that were not sent to the server yet.
    params: Vec<(String, String)>,
    /// The file with the identity of the run. A later attempt reads it to continue the same run.
    file: PathBuf,
    /// Whether this attempt continues the run of an earlier attempt.
    goes_on: bool,
    run: Option<RunId>,
    warnings: Vec<String>,
}

struct RunId {
    id: String,
    /// The last step that was sent to the server.
    last: Option<u64>,
}

impl Mlflow {
    /// Creates the monitor without contacting the server. With `goes_on`, it continues the run that an earlier attempt
    /// created in this folder.
    pub(super) fn new(
        config: &zero_config::Mlflow,
        uri: String,
        folder: PathBuf,
        goes_on: bool,
        params: Vec<(String, String)>,
    ) -> Self {
        Self {
            server: Server::new(uri),
            token: std::env::var("MLFLOW_TRACKING_TOKEN").ok().filter(|token| !token.is_empty()),
            experiment: config.experiment_name.clone(),
            run_name: config.run_name.clone(),
            params,
            file: folder.join("mlflow.json"),
            goes_on,
            run: None,
            warnings: vec![],
        }
    }

    /// Returns the server's answer, or `None` if the requested object does not exist.
    fn ask(&self, path: &str, query: &[(&str, &str)]) -> Result<Option<Value>, Trouble> {
        self.send(path, |client, url| client.get(url).query(query))
    }

    fn tell(&self, path: &str, body: &Value) -> Result<Value, Trouble> {
        let json = |client: &Client, url| client.post(url).header("Content-Type", "application/json");
        let answer = self.send(path, |client, url| json(client, url).body(body.to_string()))?;
        answer.ok_or_else(|| self.server.trouble(path, "the server does not know the experiment or run in the request"))
    }

    fn send(
        &self,
        path: &str,
        request: impl FnOnce(&Client, String) -> RequestBuilder,
    ) -> Result<Option<Value>, Trouble> {
        let answer = self.server.send(path, |client| {
            let request = request(client, format!("{}/api/2.0/mlflow/{path}", self.server.address));
            match &self.token {
                Some(token) => request.bearer_auth(token),
                None => request,
            }
        })?;
        match answer {
            Ok(value) => Ok(Some(value)),
            Err(refusal) if refusal.value["error_code"] == "RESOURCE_DOES_NOT_EXIST" => Ok(None),
            Err(refusal) => {
                Err(self.server.refused(path, refusal.status, refusal.value["message"].as_str().unwrap_or_default()))
            }
        }
    }

    /// Returns the run. Creates or finds it first, and sends its parameters. `step` is the first step to send.
    fn run(&mut self, step: u64) -> Result<(String, Option<u64>), Trouble> {
        let (id, last) = match &self.run {
            Some(run) => (run.id.clone(), run.last),
            None => {
                let run = match self.earlier()? {
                    Some(run) => {
                        // The server already has the parameters of the first attempt, and does not accept changes.
                        self.params.clear();
                        let next = run.last.unwrap_or_default() + 1;
                        if next < step {
                            self.warnings.push(format!(
                                "the monitor `mlflow` is missing the steps {next} to {}: an earlier process did not send them",
                                step - 1
                            ));
                        }
                        run
                    }
                    None => self.new_run()?,
                };
                // Stores the run before anything else can fail, so that a retry does not create a second run.
                let run = self.run.insert(run);
                (run.id.clone(), run.last)
            }
        };
        while !self.params.is_empty() {
            let some = &self.params[self.params.len().saturating_sub(PARAMS)..];
            let params: Vec<Value> = some.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
            self.tell("runs/log-batch", &json!({ "run_id": id, "params": params }))?;
            self.params.truncate(self.params.len().saturating_sub(PARAMS));
        }
        Ok((id, last))
    }

    /// Returns the run of an earlier attempt, if this attempt continues it and the server still has it.
    fn earlier(&self) -> Result<Option<RunId>, Trouble> {
        let known = fs::read_to_string(&self.file).ok().filter(|_| self.goes_on);
        let known: Option<Value> = known.and_then(|text| serde_json::from_str(&text).ok());
        let known = known.filter(|known| known["tracking_uri"] == self.server.address.as_str());
        let Some(id) = known.as_ref().and_then(|known| known["run_id"].as_str()) else { return Ok(None) };
        let found = self.ask("runs/get", &[("run_id", id)])?;
        // The server does not accept changes to a deleted run.
        let found = found.filter(|found| found["run"]["info"]["lifecycle_stage"] != "deleted");
        let Some(found) = found else { return Ok(None) };
        let metrics = found["run"]["data"]["metrics"].as_array().into_iter().flatten();
        let last = metrics.filter_map(|metric| metric["step"].as_u64()).max();
        self.tell("runs/update", &json!({ "run_id": id, "status": "RUNNING" }))?;
        Ok(Some(RunId { id: id.to_string(), last }))
    }

    fn new_run(&self) -> Result<RunId, Trouble> {
        let experiment = self.experiment()?;
        let tags = [("mlflow.source.name", "zero-train"), ("zero_train.version", env!("CARGO_PKG_VERSION"))];
        let tags = tags.map(|(key, value)| json!({ "key": key, "value": value }));
        let mut run = json!({ "experiment_id": experiment, "start_time": millis(now()), "tags": tags });
        if let Some(name) = &self.run_name {
            run["run_name"] = json!(name);
        }
        let made = self.tell("runs/create", &run)?;
        let Some(id) = made["run"]["info"]["run_id"].as_str() else {
            return Err(self.server.trouble("runs/create", "the response has no run_id"));
        };
        let known = json!({ "tracking_uri": self.server.address, "experiment_id": experiment, "run_id": id });
        // A failure is ignored: this run is logged anyway, but a later attempt creates a new MLflow run.
        let _ = fs::write(&self.file, format!("{known:#}\n"));
        Ok(RunId { id: id.to_string(), last: None })
    }

    /// Returns the experiment with the configured name, creating it if needed.
    fn experiment(&self) -> Result<String, Trouble> {
        let find = || -> Result<Option<String>, Trouble> {
            let found = self.ask("experiments/get-by-name", &[("experiment_name", &self.experiment)])?;
            Ok(found.and_then(|found| found["experiment"]["experiment_id"].as_str().map(str::to_string)))
        };
        if let Some(id) = find()? {
            return Ok(id);
        }
        match self.tell("experiments/create", &json!({ "name": self.experiment })) {
            Ok(made) => made["experiment_id"]
                .as_str()
                .map(str::to_string)
                .ok_or_else(|| self.server.trouble("experiments/create", "the response has no experiment_id")),
            // Another run may have created the experiment in the meantime.
            Err(trouble) => find()?.ok_or(trouble),
        }
    }
}

impl Sink for Mlflow {
    fn write(&mut self, records: &[Record]) -> Result<(), Trouble> {
        let Some(first) = records.first() else { return Ok(()) };
        let (id, last) = self.run(first.step)?;
        let new = records.iter().filter(|record| last.is_none_or(|last| record.step > last));
        let metrics: Vec<(u64, Value)> = new.flat_map(metrics).collect();
        for chunk in metrics.chunks(METRICS) {
            let values: Vec<&Value> = chunk.iter().map(|(_, value)| value).collect();
            self.tell("runs/log-batch", &json!({ "run_id": id, "metrics": values }))?;
        }
        if let (Some((step, _)), Some(run)) = (metrics.last(), &mut self.run) {
            run.last = Some(*step);
        }
        Ok(())
    }

    fn help(&self) -> String {
        "check that the tracking server is running, or set `mlflow.tracking_uri`".into()
    }

    fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    fn finish(&mut self, outcome: RunStatus) -> Result<(), Trouble> {
        let status = match outcome {
            RunStatus::Done => "FINISHED",
            RunStatus::Stopped => "KILLED",
            RunStatus::Failed => "FAILED",
        };
        // Before the first step, the run does not exist on the server.
        let Some(run) = &self.run else { return Ok(()) };
        self.tell("runs/update", &json!({ "run_id": run.id, "status": status, "end_time": millis(now()) }))?;
        Ok(())
    }
}

/// Returns the metrics of a step, under MLflow's step number. The number of samples is a separate metric.
fn metrics(record: &Record) -> impl Iterator<Item = (u64, Value)> {
    let samples = std::iter::once(("Train/Samples/samples", record.samples as f64));
    let scalars = record.scalars.iter().map(|scalar| (scalar.metric.tag, scalar.value));
    let (step, time) = (record.step, millis(record.time));
    samples.chain(scalars).map(move |(key, value)| {
        // The REST interface encodes NaN and infinities as strings, because JSON lacks them.
        let value = if value.is_finite() { json!(value) } else { json!(text_of(value)) };
        (step, json!({ "key": key, "value": value, "timestamp": time, "step": step }))
    })
}

fn millis(seconds: f64) -> u64 {
    (seconds * 1e3) as u64
}

/// Returns the leaves of a configuration with their paths. They become parameters of the run.
pub(super) fn flattened(config: &Value) -> Vec<(String, String)> {
    let mut leaves = BTreeMap::new();
    flatten("", config, &mut leaves);
    leaves.into_iter().collect()
}

fn flatten(path: &str, value: &Value, leaves: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(keys) => keys.iter().for_each(|(name, value)| {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            flatten(&path, value, leaves);
        }),
        Value::Null => {}
        Value::String(text) => {
            leaves.insert(path.to_string(), text.chars().take(LONGEST).collect());
        }
        other => {
            leaves.insert(path.to_string(), other.to_string().chars().take(LONGEST).collect());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_cannot_be_used_is_refused_at_once() {
        let of = |uri: &str| {
            let config = zero_config::Mlflow {
                enabled: true,
                tracking_uri: Some(uri.into()),
                experiment_name: "e".into(),
                run_name: None,
            };
            tracking_uri(&config).map_err(|error| error.to_string())
        };
        assert_eq!(of("http://localhost:5000/"), Ok(Some("http://localhost:5000".into())));
        assert_eq!(of("https://mlflow.example.com"), Ok(Some("https://mlflow.example.com".into())));
        for uri in ["https://", "file:///tmp/mlruns", "databricks", "http://", "http:///a"] {
            let error = of(uri).expect_err(uri);
            assert!(error.contains("\n  in: mlflow.tracking_uri\n  help: "), "{error}");
        }
    }

    #[test]
    fn a_configuration_becomes_parameters() {
        let config = json!({ "a": { "b": 1, "c": null, "d": [1, 2] }, "e": "text", "f": true });
        let flat = flattened(&config);
        let flat: Vec<(&str, &str)> = flat.iter().map(|(key, value)| (&**key, &**value)).collect();
        assert_eq!(flat, [("a.b", "1"), ("a.d", "[1,2]"), ("e", "text"), ("f", "true")]);
    }
}
