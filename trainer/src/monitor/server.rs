//! The HTTP client of the monitors that write to a server: `mlflow` and `wandb`.

use std::time::Duration;

use reqwest::StatusCode;
use reqwest::blocking::{Client, RequestBuilder};
use serde_json::Value;

use super::worker::Trouble;

/// Time limit of a request, from its start to the end of the answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// A server and the client for it.
pub(super) struct Server {
    /// The client, or the reason why it cannot be built, such as a damaged certificate on this machine.
    client: Result<Client, String>,
    /// The address, without a slash at the end.
    pub(super) address: String,
}

/// A response with an error status.
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    /// The body, or null if it is not JSON.
    pub(super) value: Value,
}

impl Server {
    pub(super) fn new(address: String) -> Self {
        zero_store::use_tls();
        let builder = Client::builder().timeout(DEADLINE).user_agent(concat!("zero-train/", env!("CARGO_PKG_VERSION")));
        Self { client: builder.build().map_err(|error| zero_store::on_one_line(&error)), address }
    }

    /// Sends a request. Errors name the request by `place`.
    ///
    /// # Errors
    /// Fails if the server does not answer, or if a successful answer is not JSON.
    pub(super) fn send(
        &self,
        place: &str,
        request: impl FnOnce(&Client) -> RequestBuilder,
    ) -> Result<Result<Value, Refusal>, Trouble> {
        let failed = |error: reqwest::Error| self.trouble(place, &zero_store::on_one_line(&error));
        let client = self.client.as_ref().map_err(|error| self.trouble(place, error))?;
        let answer = request(client).send().map_err(failed)?;
        let status = answer.status();
        let text = answer.text().map_err(failed)?;
        let value: Option<Value> = serde_json::from_str(&text).ok();
        if status.is_success() {
            return value.map(Ok).ok_or_else(|| self.trouble(place, "the response is not JSON"));
        }
        Ok(Err(Refusal { status, value: value.unwrap_or_default() }))
    }

    /// Returns the error for a refused request, with the server's reason.
    pub(super) fn refused(&self, place: &str, status: StatusCode, reason: &str) -> Trouble {
        self.trouble(place, format!("{status} {}", first_line(reason)).trim_end())
    }

    pub(super) fn trouble(&self, place: &str, error: &str) -> Trouble {
        Trouble(format!("{}: {place}: {error}", self.address))
    }
}

/// Returns the first line of a server's message, of at most 300 characters.
pub(super) fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().chars().take(300).collect()
}

/// Returns an HTTP address without slashes at the end. Returns `None` for other addresses.
pub(super) fn address(text: &str) -> Option<String> {
    let text = text.trim_end_matches('/');
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    rest.filter(|rest| !rest.is_empty() && !rest.starts_with('/')).map(|_| text.to_string())
}

/// Returns the name of NaN or an infinity, which JSON cannot represent.
pub(super) fn text_of(value: f64) -> &'static str {
    match value {
        x if x.is_nan() => "NaN",
        x if x > 0.0 => "Infinity",
        _ => "-Infinity",
    }
}
