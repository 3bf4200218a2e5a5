//! Connections to stores: credentials and endpoints from the environment, TLS, time limits.
//!
//! | store | credentials and endpoint |
//! |---|---|
//! | S3 | `AWS_*` variables, a profile in `~/.aws`, web identity, container and instance metadata; `AWS_ENDPOINT_URL` |
//! | Google | `GOOGLE_*` variables, application default credentials, instance metadata |
//! | Azure | `AZURE_*` variables, workload and managed identity; `AZURE_STORAGE_USE_EMULATOR` |
//! | Hub | `HF_TOKEN`, or the file that `hf auth login` writes; `HF_ENDPOINT` |
//!
//! `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` are respected.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::Duration;

use object_store::ClientOptions;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};
use tokio::runtime::{Builder, Runtime};

use crate::digest::Checksum;
use crate::hub;
use crate::location::{Location, Service};
use crate::profile::Profile;

/// Maximum time to connect, and maximum time between two parts of an answer.
const CONNECT: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_secs(60);

/// The stores that were opened, by service. They keep connections open.
static OPENED: Mutex<BTreeMap<Service, Arc<dyn ObjectStore>>> = Mutex::new(BTreeMap::new());

/// Returns the threads on which all requests run while the caller waits.
///
/// # Errors
/// Fails if the system has no threads left.
pub(crate) fn runtime() -> std::io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let built = Builder::new_multi_thread().worker_threads(2).thread_name("store").enable_all().build()?;
    Ok(RUNTIME.get_or_init(|| built))
}

/// Chooses ring as the implementation of TLS, unless the program has chosen one. Call this function before the
/// program's first request with reqwest.
pub fn use_tls() {
    static CHOSEN: Once = Once::new();
    CHOSEN.call_once(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// Opens the store of an address.
pub(crate) fn store(location: &Location) -> Result<Arc<dyn ObjectStore>, object_store::Error> {
    use_tls();
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(store) = opened.get(&location.service) {
        return Ok(Arc::clone(store));
    }
    let store: Arc<dyn ObjectStore> = match &location.service {
        Service::S3(bucket) => {
            let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
            let profile = Profile::of_environment();
            if let Some(region) = profile.as_ref().and_then(|profile| profile.region.clone())
                && !is_set(&["AWS_REGION", "AWS_DEFAULT_REGION"])
            {
                builder = builder.with_region(region);
            }
            if let Some(endpoint) = profile.as_ref().and_then(|profile| profile.endpoint.clone())
                && !is_set(&["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
            {
                builder = builder.with_endpoint(endpoint);
            }
            if let Some(profile) = profile.filter(|profile| profile.has_keys) {
                builder = builder.with_credentials(Arc::new(profile));
            }
            Arc::new(builder.with_retry(retry()).with_client_options(options()).with_http_connector(Connector).build()?)
        }
        Service::Gcs(bucket) => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
            Arc::new(builder.with_retry(retry()).with_client_options(options()).with_http_connector(Connector).build()?)
        }
        Service::Azure { container, account } => {
            let mut builder = MicrosoftAzureBuilder::from_env().with_container_name(container);
            if let Some(account) = account {
                builder = builder.with_account(account);
            }
            Arc::new(builder.with_retry(retry()).with_client_options(options()).with_http_connector(Connector).build()?)
        }
        Service::Http(host) => Arc::new(web(host, options())?),
        Service::Hub { kind, repo, revision } => {
            let options = match hub::authorization() {
                Some(headers) => options().with_default_headers(headers),
                None => options(),
            };
            Arc::new(web(&hub::files(*kind, repo, revision), options)?)
        }
    };
    opened.insert(location.service.clone(), Arc::clone(&store));
    Ok(store)
}

fn web(url: &str, options: ClientOptions) -> Result<impl ObjectStore, object_store::Error> {
    HttpBuilder::new()
        .with_url(url)
        .with_retry(retry())
        .with_client_options(options)
        .with_http_connector(Connector)
        .build()
}

fn is_set(names: &[&str]) -> bool {
    names.iter().any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
}

/// Unencrypted HTTP is allowed: the scheme of the endpoint's address alone decides whether a connection is encrypted.
fn options() -> ClientOptions {
    ClientOptions::new()
        .with_allow_http(true)
        .with_timeout_disabled()
        .with_connect_timeout(CONNECT)
        .with_read_timeout(SILENCE)
}

/// These retries cover short interruptions. The module `download` waits until a long interruption is over, and reports
/// that it waits.
fn retry() -> RetryConfig {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(2), base: 2.0 };
    RetryConfig { backoff, max_retries: 3, retry_timeout: Duration::from_secs(10) }
}

/// Connects as object_store does, and copies the checksum in an answer's headers into the answer's extensions.
#[derive(Debug)]
struct Connector;

#[derive(Debug)]
struct Observed(HttpClient);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Observed(ReqwestConnector::default().connect(options)?)))
    }
}

#[async_trait::async_trait]
impl HttpService for Observed {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let mut response = self.0.execute(request).await?;
        if let Some(checksum) = Checksum::of_headers(response.headers()) {
            response.extensions_mut().insert(checksum);
        }
        Ok(response)
    }
}

/// The client for requests outside of object_store.
pub(crate) fn http() -> Result<&'static reqwest::Client, reqwest::Error> {
    static BUILT: OnceLock<reqwest::Client> = OnceLock::new();
    if let Some(client) = BUILT.get() {
        return Ok(client);
    }
    use_tls();
    let built = reqwest::Client::builder().connect_timeout(CONNECT).read_timeout(SILENCE).build()?;
    Ok(BUILT.get_or_init(|| built))
}
