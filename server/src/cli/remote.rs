//! Requests to a server over the network, as an administrator: `--server`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use gpusession_proto::control::AskRequest;
use gpusession_proto::control::administration_client::AdministrationClient;
use gpusession_proto::join;
use serde_json::Value;
use tonic::Code;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::admin::{self, Ask, MAX_ANSWER, Refusal};
use crate::certificate;
use crate::clock::{Clock as _, SystemClock};
use crate::config;
use crate::net::host_port;

/// Time that a connection may take, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time before the end of an administrator's certificate from which each use warns, in seconds.
const EXPIRES_SOON: u64 = 30 * 24 * 3600;
const PORT: u16 = 7601;
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";

/// A server, and the administrator's file for it.
pub struct Remote {
    /// Address of the control service, as HOST:PORT.
    pub address: String,
    identity: PathBuf,
}

/// Returns the default path of the administrator's file.
fn default_identity() -> anyhow::Result<PathBuf> {
    let folder = std::env::var_os("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    Ok(folder
        .context("HOME is not set; name the administrator's file with --identity")?
        .join("gpusession/admin.pem"))
}

impl Remote {
    /// Addresses the server at HOST[:PORT] with a file from `gpuserver admin create`.
    pub fn new(server: &str, identity: Option<&Path>) -> anyhow::Result<Self> {
        let address = config::advertised(server)
            .map_err(|m| Refusal::new("usage", format!("--server {server:?}: {m}")))?;
        let identity = identity.map_or_else(default_identity, |path| Ok(path.into()))?;
        Ok(Self { address: host_port(&address.host, address.port.unwrap_or(PORT)), identity })
    }

    /// Sends a request and returns the answer.
    pub fn ask(&self, ask: &Ask) -> anyhow::Result<Value> {
        if let Some(refusal) = ask.local() {
            return Err(refusal.into());
        }
        let shown = self.identity.display();
        let bundle = std::fs::read_to_string(&self.identity).map_err(|e| Refusal {
            code: "no-identity".into(),
            message: format!("{shown}: {e}"),
            hint: "create it with `gpuserver admin create NAME` on the server, and name it with --identity"
                .into(),
        })?;
        // The file has certificate, key and the authorities' certificates, in this order.
        let own = bundle.find(BEGIN).map_or(0, |at| at + BEGIN.len());
        let authorities = bundle[own..].find(BEGIN).map(|at| &bundle[own + at..]).ok_or_else(|| {
            Refusal::new("no-identity", format!("{shown}: not a file from `gpuserver admin create`"))
        })?;
        warn_of_end(&bundle, &shown.to_string());
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(authorities))
            .identity(Identity::from_pem(&bundle, &bundle))
            .domain_name(join::any_server());
        let json = serde_json::to_vec(ask)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let reply = runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("https://{}", self.address))?
                .tls_config(tls)?
                .connect_timeout(CONNECT_TIMEOUT)
                .timeout(ask.answer_timeout());
            let channel = endpoint.connect().await.map_err(|e| self.unreachable(root_cause(&e)))?;
            let mut client = AdministrationClient::new(channel).max_decoding_message_size(MAX_ANSWER);
            let reply = client.ask(AskRequest { json }).await.map_err(|status| match status.code() {
                Code::PermissionDenied | Code::Unauthenticated => {
                    Refusal::new("not-allowed", status.message())
                }
                Code::Unimplemented => Refusal::new(
                    "too-old",
                    format!(
                        "{}: the server is older than this gpuserver, and cannot be administered over the network",
                        self.address
                    ),
                ),
                _ => self.unreachable(status.message().to_string()),
            })?;
            anyhow::Ok(reply.into_inner().json)
        })?;
        Ok(admin::read(&reply).with_context(|| self.address.clone())??)
    }

    fn unreachable(&self, why: String) -> Refusal {
        Refusal {
            code: "not-reachable".into(),
            message: format!("{}: {why}", self.address),
            hint: "check that gpuserver runs there, that its port is open, and that the file is for its pool"
                .into(),
        }
    }
}

/// Warns an administrator whose certificate ends within 30 days.
fn warn_of_end(bundle: &str, shown: &str) {
    let own = x509_parser::pem::parse_x509_pem(bundle.as_bytes()).ok();
    let Some(ends) = own.and_then(|(_, pem)| certificate::expiry(&pem.contents)) else { return };
    let unix = SystemClock.unix();
    if unix <= ends && ends < unix + EXPIRES_SOON {
        eprintln!(
            "gpuserver: {shown}: this certificate expires on {}; `gpuserver admin revoke NAME` and \
             `gpuserver admin create NAME` on a server of the pool make a new one",
            certificate::day(ends)
        );
    }
}

/// Returns the innermost cause of an error: tonic's own text is only "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(next) = deepest.source() {
        deepest = next;
    }
    deepest.to_string()
}
