//! Selects the account, the project and the run on Weights & Biases that a training run writes to. The sources are the
//! configuration, the environment variables of W&B's client, and `~/.netrc`.

use std::fs;
use std::path::PathBuf;

use reqwest::Url;

use crate::monitor::server::address;
use zero_engine::Error;

/// The address of W&B's own service.
const SERVICE: &str = "https://api.wandb.ai";

/// An account, and the project and run to write to.
#[derive(Debug, PartialEq)]
pub(in crate::monitor) struct Account {
    /// Address of the server, without a slash at the end.
    pub(super) server: String,
    pub(super) key: String,
    /// Team or user. `None` uses the default of the account.
    pub(super) entity: Option<String>,
    pub(super) project: String,
    pub(super) group: Option<String>,
    pub(super) name: Option<String>,
    /// The run to write to. `None` creates a run.
    pub(super) run: Option<String>,
}

/// Returns the account from the configuration and the environment. Returns `None` if W&B is disabled.
///
/// # Errors
/// Fails if no API key is set, or if this program does not support the mode or the server address that is set.
pub(in crate::monitor) fn account(config: &zero_config::Wandb) -> Result<Option<Account>, Error> {
    of(config, |name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

fn of(config: &zero_config::Wandb, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Account>, Error> {
    if !config.enabled {
        return Ok(None);
    }
    let setting = |message: String, help: &str| Err(Error::setting("wandb", message, help));
    match variable("WANDB_MODE").as_deref() {
        None | Some("online" | "run") => {}
        Some("disabled") => return Ok(None),
        Some(mode) => {
            let help = "unset WANDB_MODE, or set it to `disabled`; `csv_monitor` and `tensorboard` need no server";
            return setting(format!("WANDB_MODE={mode} is not supported"), help);
        }
    }
    let base = variable("WANDB_BASE_URL").unwrap_or_else(|| SERVICE.into());
    let parsed = address(&base).and_then(|base| Some((Url::parse(&base).ok()?.host_str()?.to_string(), base)));
    let Some((host, server)) = parsed else {
        let help = "set WANDB_BASE_URL to a URL such as `https://wandb.example.com`, or unset it";
        return setting(format!("WANDB_BASE_URL={base} is not the URL of a server"), help);
    };
    let netrc = variable("NETRC").map(PathBuf::from);
    let netrc = netrc.or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".netrc")));
    let of_netrc = || password(&fs::read_to_string(netrc?).ok()?, &host);
    let Some(key) = variable("WANDB_API_KEY").or_else(of_netrc) else {
        let help = "set the environment variable WANDB_API_KEY, or run `wandb login`, which writes ~/.netrc";
        return setting(format!("the API key for {host} is missing"), help);
    };
    Ok(Some(Account {
        server,
        key: key.trim().to_string(),
        entity: config.team.clone().or_else(|| variable("WANDB_ENTITY")),
        project: config.project.clone().or_else(|| variable("WANDB_PROJECT")).unwrap_or_else(|| "deepspeed".into()),
        group: config.group.clone().or_else(|| variable("WANDB_RUN_GROUP")),
        name: variable("WANDB_NAME"),
        run: variable("WANDB_RUN_ID"),
    }))
}

/// Returns the password of a host from the text of a `.netrc` file.
fn password(netrc: &str, machine: &str) -> Option<String> {
    let lines = netrc
        .lines()
        .map(|line| line.split_once('#').filter(|(start, _)| start.trim().is_empty()).map_or(line, |_| ""));
    let mut words = lines.flat_map(str::split_whitespace);
    let mut is_its = false;
    while let Some(word) = words.next() {
        match word {
            "machine" => is_its = words.next() == Some(machine),
            "default" => is_its = false,
            "password" if is_its => return words.next().map(str::to_string),
            "login" | "account" | "password" => drop(words.next()),
            _ => {}
        }
    }
    None
}

impl Account {
    /// Returns the address of a run's page.
    pub(super) fn page(&self, entity: &str, project: &str, run: &str) -> String {
        let app = match self.server.replacen("://api.wandb.", "://wandb.", 1) {
            same if same == self.server => same.replacen("://api.", "://app.", 1),
            app => app,
        };
        url(&app, &[entity, project, "runs", run])
    }
}

/// Returns `base` extended by path components, which are percent-encoded.
pub(super) fn url(base: &str, parts: &[&str]) -> String {
    // [`of`] has already parsed the address.
    let Ok(mut url) = Url::parse(base) else { return base.to_string() };
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().extend(parts);
    }
    url.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> zero_config::Wandb {
        zero_config::Wandb { enabled: true, group: None, team: Some("team".into()), project: None }
    }

    fn with(variables: &[(&str, &str)]) -> Result<Option<Account>, String> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string());
        of(&config(), find).map_err(|error| error.to_string())
    }

    #[test]
    fn the_configuration_comes_before_the_environment() {
        let account = with(&[
            ("WANDB_API_KEY", "abc"),
            ("WANDB_ENTITY", "other"),
            ("WANDB_PROJECT", "p"),
            ("WANDB_RUN_GROUP", "g"),
            ("WANDB_NAME", "n"),
            ("WANDB_RUN_ID", "i"),
        ]);
        let account = account.expect("an account").expect("enabled");
        assert_eq!((account.server.as_str(), account.key.as_str()), ("https://api.wandb.ai", "abc"));
        assert_eq!((account.entity.as_deref(), account.project.as_str()), (Some("team"), "p"));
        assert_eq!(account.group.as_deref(), Some("g"));
        assert_eq!((account.name.as_deref(), account.run.as_deref()), (Some("n"), Some("i")));
        assert_eq!(account.page("a b", "p", "i"), "https://wandb.ai/a%20b/p/runs/i");
        assert_eq!(with(&[("WANDB_API_KEY", "abc")]).expect("one").expect("one").project, "deepspeed");
    }

    #[test]
    fn the_address_of_the_run_page_follows_from_the_server() {
        for (server, page) in [
            ("http://localhost:8080", "http://localhost:8080/e/p/runs/i"),
            ("https://api.example.com", "https://app.example.com/e/p/runs/i"),
            ("https://wandb.example.com/base", "https://wandb.example.com/base/e/p/runs/i"),
        ] {
            let account = with(&[("WANDB_API_KEY", "abc"), ("WANDB_BASE_URL", &format!("{server}/"))]);
            assert_eq!(account.expect("an account").expect("enabled").page("e", "p", "i"), page);
        }
    }

    #[test]
    fn modes_addresses_and_missing_keys_are_refused_with_help() {
        assert_eq!(with(&[("WANDB_MODE", "disabled")]), Ok(None));
        for (variables, expected) in [
            (&[("WANDB_MODE", "offline"), ("WANDB_API_KEY", "abc")][..], "WANDB_MODE=offline is not supported"),
            (&[("WANDB_BASE_URL", "wandb"), ("WANDB_API_KEY", "abc")], "WANDB_BASE_URL=wandb is not the URL"),
            (&[("WANDB_BASE_URL", "https://h:x"), ("WANDB_API_KEY", "abc")], "WANDB_BASE_URL=https://h:x is not"),
            (&[("WANDB_BASE_URL", "http://host:1")], "the API key for host is missing"),
        ] {
            let error = with(variables).expect_err(expected);
            assert!(error.contains(expected) && error.contains("\n  in: wandb\n  help: "), "{error}");
        }
    }

    #[test]
    fn the_key_is_found_in_netrc() {
        let netrc = "# machine api.wandb.ai password no\nmachine other login machine password api.wandb.ai\n\
                     machine api.wandb.ai\n  login user\n  password a#b\ndefault login x password y\n";
        assert_eq!(password(netrc, "api.wandb.ai").as_deref(), Some("a#b"));
        assert_eq!(password(netrc, "host"), None);
        let file = std::env::temp_dir().join(format!("zero-train-netrc-{}", std::process::id()));
        fs::write(&file, netrc).expect("a file");
        let account = with(&[("NETRC", &file.display().to_string())]);
        fs::remove_file(&file).expect("the file");
        assert_eq!(account.expect("an account").expect("enabled").key, "a#b");
    }
}
